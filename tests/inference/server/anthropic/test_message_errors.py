"""Errors of /v1/messages as Anthropic's client raises them: each names the field."""

import anthropic
import pytest

from inference.server.service import Limits
from inference.server.web.access import Keys
from tests.inference.server.anthropic.asking import (
    ASKED,
    COUNT,
    HOW,
    PATH,
    RESULT,
    TOOL,
    USE,
    assistant,
    text,
    user,
)
from tests.inference.server.parrot import CONTEXT
from tests.inference.server.running import running

KEY = "key-0123456789abcdef"
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x.example/a.png"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
CLEARS = {"edits": [{"type": "clear_tool_uses_20250919"}]}
OF_MESSAGES = [
    ([], "messages", "length"), ([{"role": "user"}], "messages[0].content", "required"),
    ([{"role": "tool", "content": "a"}], "messages[0].role", "tool"),
    ([{"role": "user", "content": ""}], "messages[0].content", "is empty"),
    ([user()], "messages[0].content", "is empty"),
    ([user(text(""))], "messages[0].content[0].text", "is empty"),
    ([user({"type": "text"})], "messages[0].content[0].text", "required"),
    ([assistant(text("a"))], "messages[0].role", "is user in the first message"),
    ([user(IMAGE)], "messages[0].content[0].type", "not 'image': this server reads text only"),
    ([user({"type": "document"})], "messages[0].content[0].type", "not 'document'"),
    ([user({"type": "server_tool_use"})], "messages[0].content[0].type", "not 'server_tool_use'"),
    ([user(USE)], "messages[0].content[0].type", "message of role assistant"),
    ([*ASKED, assistant(RESULT)], "messages[1].content[0].type", "message of role user"),
    ([user({"type": "thinking", "thinking": "a"})], "messages[0].content[0].type", "assistant"),
    ([user(RESULT)], "messages[0].content[0].tool_use_id", "no open tool_use"),
    ([*ASKED, assistant(USE), user(RESULT, RESULT)], "messages[2].content[1].tool_use_id",
     "no open tool_use"),
    ([*ASKED, assistant(USE), user(RESULT), assistant(text("a")), user(RESULT)],
     "messages[4].content[0].tool_use_id", "toolu_1"),
    ([*ASKED, assistant(text("a"), USE)], "messages[1].content[1]", "has no tool_result"),
    ([*ASKED, assistant(USE), user(text("a"))], "messages[2].content[0]",
     "comes before the tool_result"),
    ([*ASKED, assistant(USE), user(text("a"), RESULT)], "messages[2].content[0]",
     "comes before the tool_result"),
    ([*ASKED, assistant(USE), {"role": "user", "content": "a"}], "messages[2].content",
     "comes before the tool_result"),
    ([*ASKED, assistant(USE), assistant(text("a"))], "messages[1].content[0]",
     "has no tool_result"),
    ([*ASKED, assistant(USE, USE), user(RESULT)], "messages[1].content[1].id", "another tool_use"),
    ([*ASKED, assistant({"type": "tool_use", "id": "a", "name": "b"})],
     "messages[1].content[0].input", "required"),
    ([*ASKED, assistant(USE | {"input": "x"})], "messages[1].content[0].input", "expected"),
    ([*ASKED, assistant(USE), user({"type": "tool_result"})],
     "messages[2].content[0].tool_use_id", "required"),
    ([*ASKED, assistant(USE), user(RESULT | {"content": [IMAGE]})],
     "messages[2].content[0].content[0].type", "not 'image'"),
    ([*ASKED, assistant(USE), user(RESULT | {"content": [{"type": "text"}]})],
     "messages[2].content[0].content[0].text", "required"),
]  # fmt: skip
OF_FIELDS = [
    ({"system": [IMAGE]}, "system[0].type", "not 'image'"),
    ({"system": [text("")]}, "system[0].text", "is empty"),
    ({"tools": [SEARCH]}, "tools[0].type", "web_search_20250305"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name", "another tool"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", "regex"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema", "required"),
    ({"tools": [{"name": "a", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type",
     "object"),
    ({"tools": [{"name": "a", "input_schema": {"properties": {"b": {"$ref": "#/c"}}}}],
      "tool_choice": {"type": "any"}}, "tools[0].input_schema", "$ref"),
    ({"tool_choice": {"type": "auto"}}, "tool_choice", "goes with tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name", "required"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name", "x"),
    ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type", "some"),
    ({"thinking": {"type": "on"}}, "thinking.type", "on"),
    ({"output_config": {"effort": "low"}}, "output_config.effort", "not read"),
    ({"extra_body": {"context_management": CLEARS}}, "context_management.edits[0].type",
     "clear_tool_uses"),
    ({"cache_control": {"type": "forever"}}, "cache_control.type", "forever"),
]  # fmt: skip
OF_ANSWERS = [
    ({"max_tokens": 0}, "max_tokens", "from 1"),
    ({"stop_sequences": "a"}, "stop_sequences", "got a text"),
    ({"stop_sequences": [""]}, "stop_sequences[0]", "length"),
    ({"metadata": {"user_id": 1}}, "metadata.user_id", "got a whole number"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"$ref": "#/x"}}}},
     "output_config.format", "$ref"),
    ({"messages": [user(text("a" * CONTEXT))]}, "messages", "context of this model"),
    ({"extra_body": {"temperature": 3}}, "temperature", "up to 2"),
    ({"extra_body": {"stop": 5}}, "stop", "got a whole number"),
    ({"extra_body": {"min_tokens": 500}}, "min_tokens", "max_tokens, 400 here"),
    ({"extra_body": {"response_format": {"type": "x"}}}, "response_format", "x"),
    ({"extra_body": {"mcp_servers": [{"url": "x"}]}}, "mcp_servers", "no tools run"),
    ({"extra_body": {"container": "x"}}, "container", "no tools run"),
    ({"extra_body": {"prompt": "x"}}, "prompt", "not supported"),
]  # fmt: skip
OF_BOTH = [({"messages": messages}, place, words) for messages, place, words in OF_MESSAGES]


def check(error, place, words):
    assert error.status_code == 400 and error.type == "invalid_request_error"
    assert error.body.keys() == {"type", "error", "request_id"}
    assert error.body["request_id"] == error.request_id
    message = error.body["error"]["message"]
    assert message.removeprefix(place)[0] in " :" and "\n" not in message, message
    assert message.startswith(place) and words in message and len(message) < 400


@pytest.mark.parametrize("asked, place, words", [*OF_BOTH, *OF_FIELDS, *OF_ANSWERS])
def test_bad_requests(client, asked, place, words):
    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(**HOW | asked)
    check(error.value, place, words)
    assert client.messages.create(**HOW).content  # the next is served


@pytest.mark.parametrize("asked, place, words", [
    case for case in (*OF_BOTH, *OF_FIELDS) if case[2] != "$ref"  # no grammar is compiled here
])  # fmt: skip
def test_bad_counts(client, asked, place, words):
    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.count_tokens(**{"model": "fake", "messages": ASKED} | asked)
    check(error.value, place, words)


def test_what_is_required(perch):
    for path, body, name in (
        (PATH, {"messages": ASKED}, "max_tokens"),
        (PATH, {"max_tokens": 1}, "messages"),
        (COUNT, {}, "messages"),
    ):
        error = perch.http.post(path, json=body).json()["error"]
        assert error == {"type": "invalid_request_error", "message": f"{name} is required"}


def test_another_model_is_not_found(client):
    for ask in (client.messages.create, client.messages.count_tokens):
        how = HOW if ask == client.messages.create else {"messages": ASKED}
        with pytest.raises(anthropic.NotFoundError, match="model: .* fake is") as error:
            ask(**how | {"model": "claude-x"})
        assert error.value.type == "not_found_error"


@pytest.mark.parametrize("method, path, status, kind", [
    ("GET", PATH, 405, "invalid_request_error"), ("POST", PATH, 415, "invalid_request_error"),
    ("POST", f"{PATH}/batches", 404, "not_found_error"),
    ("GET", f"{PATH}/msg_1", 404, "not_found_error"),
])  # fmt: skip
def test_errors_of_http_have_the_same_shape(perch, method, path, status, kind):
    response = perch.http.request(method, path)
    assert response.status_code == status
    body = response.json()
    assert body["type"] == "error" and body["error"]["type"] == kind
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert "param" in perch.http.get("/v1/messagesx").json()["error"]


def test_keys():
    with running(keys=Keys([KEY])) as server:
        for how in ({"api_key": KEY}, {"auth_token": KEY}):
            with anthropic.Anthropic(base_url=server.url, max_retries=0, **how) as client:
                assert client.messages.create(**HOW | {"max_tokens": 1}).content
        wrong = anthropic.Anthropic(base_url=server.url, api_key=f"{KEY}x", max_retries=0)
        with wrong as client, pytest.raises(anthropic.AuthenticationError) as error:
            client.messages.create(**HOW)
        assert error.value.type == "authentication_error" and KEY not in str(error.value)
        headers = error.value.response.headers
        assert headers["request-id"] == error.value.body["request_id"]


def test_bodies_that_are_too_large():
    with running(limits=Limits(body_bytes=1000)) as server:
        how = {"base_url": server.url, "api_key": "none", "max_retries": 0}
        with anthropic.Anthropic(**how) as client, pytest.raises(anthropic.APIError) as error:
            client.messages.create(**HOW | {"messages": [user(text("a" * 2000))]})
        assert error.value.status_code == 413 and error.value.type == "request_too_large"


def test_a_server_that_ends_is_overloaded(perch, client, monkeypatch):
    service, check_ready = perch.service, perch.service.check_ready

    def check_while_draining():  # for no longer, or the server would end
        service.is_draining = True
        try:
            check_ready()
        finally:
            service.is_draining = False

    monkeypatch.setattr(service, "check_ready", check_while_draining)
    with pytest.raises(anthropic.InternalServerError, match="shutting down") as error:
        client.messages.create(**HOW)
    assert error.value.status_code == 503 and error.value.type == "overloaded_error"
    assert error.value.response.headers["retry-after"]
