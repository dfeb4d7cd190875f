"""Errors as OpenAI's client raises them, and what it tries again."""

import time

import openai
import pytest

from inference.server.protocol import errors
from inference.server.service import Limits
from inference.server.web.access import Keys
from inference.server.web.serving import bound
from tests.inference.server.fake_engine import REFUSED, FakeEngine
from tests.inference.server.parrot import CONTEXT
from tests.inference.server.running import running

ASKED = [{"role": "user", "content": "Hi"}]
HOW = {"model": "fake", "messages": ASKED, "temperature": 0, "max_tokens": 4}
KEY = "key-0123456789abcdef"


@pytest.mark.parametrize("asked, param, code", [
    ({"temperature": 3}, "temperature", "invalid_value"), ({"n": 0}, "n", "invalid_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": [{"role": "x", "content": "a"}]}, "messages[0].role", "invalid_value"),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"messages": [{"role": "user", "content": "a" * CONTEXT}]}, "messages",
     "context_length_exceeded"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported"),
    ({"response_format": {"type": "json_schema", "json_schema": {
        "name": "x", "schema": {"$ref": "#/y"}}}}, "response_format", "invalid_value"),
])  # fmt: skip
def test_bad_requests(client, asked, param, code):
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(**HOW | asked)
    error = found.value
    assert error.status_code == 400 and error.param == param and error.code == code
    assert error.type == "invalid_request_error" and error.request_id
    assert client.chat.completions.create(**HOW).choices  # the next is served


def test_another_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(**HOW | {"model": "other"})
    assert found.value.code == "model_not_found" and "fake" in found.value.message


def test_what_the_engine_refuses(client):
    with pytest.raises(openai.BadRequestError, match="every token is banned"):
        client.completions.create(model="fake", prompt=[1, REFUSED])


def test_keys():
    with running(keys=Keys([KEY])) as server:
        for key, kind in ((KEY, None), ("wrong-0123456789abc", openai.AuthenticationError)):
            with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
                if kind is None:
                    assert client.models.list().data[0].id == "fake"
                    continue
                with pytest.raises(kind) as found:
                    client.models.list()
                assert found.value.status_code == 401 and found.value.code == "invalid_api_key"


def test_a_foreign_host_is_denied(perch):
    how = {"base_url": f"{perch.url}/v1", "api_key": "none", "max_retries": 0}
    foreign = openai.OpenAI(**how, default_headers={"host": "evil.example"})
    with foreign as client, pytest.raises(openai.PermissionDeniedError):
        client.models.list()


def test_a_stream_that_fails_raises(client, parrot):
    parrot.breaks_at = 5
    with pytest.raises(openai.APIError, match="could not be generated") as found:
        for chunk in client.chat.completions.create(**HOW | {"max_tokens": 9}, stream=True):
            assert chunk.choices
    assert found.value.body["code"] == "model_error"


def test_an_answer_that_fails_raises(client, parrot):
    parrot.breaks_at = 2
    with pytest.raises(openai.InternalServerError) as found:
        client.chat.completions.create(**HOW)
    assert found.value.status_code == 500 and found.value.code == "model_error"


def test_constraints_that_leave_no_token_are_the_requests_fault(client, parrot, perch):
    parrot.breaks_at, parrot.failure = 3, "its grammar permits nothing here"
    with pytest.raises(openai.BadRequestError, match="its grammar permits nothing here") as found:
        client.chat.completions.create(**HOW)
    assert found.value.code == "grammar_failed"
    with pytest.raises(openai.APIError, match="its grammar permits nothing here"):
        list(client.completions.create(model="fake", prompt="a", max_tokens=9, stream=True))
    text = perch.post("/v1/responses", input="a", stream=True).text
    assert '"code":"invalid_prompt"' in text.rpartition("event:")[2]


def test_bodies_that_are_too_large():
    with running(limits=Limits(body_bytes=1000)) as server:
        how = {"base_url": f"{server.url}/v1", "api_key": "none", "max_retries": 0}
        with openai.OpenAI(**how) as client, pytest.raises(openai.APIStatusError) as found:
            client.completions.create(model="fake", prompt="a" * 2000)
        assert found.value.status_code == 413


def test_answers_that_take_too_long():
    with running(FakeEngine(step_s=0.05), limits=Limits(request_s=0.3)) as server:
        how = {"base_url": f"{server.url}/v1", "api_key": "none"}
        with openai.OpenAI(**how) as client:
            with pytest.raises(openai.APIStatusError) as found:  # and is not tried again
                client.chat.completions.create(**HOW | {"max_tokens": 100})
            assert found.value.status_code == 408 and found.value.code == "timeout"
            with pytest.raises(openai.APITimeoutError):
                client.with_options(timeout=0.05, max_retries=0).chat.completions.create(
                    **HOW | {"max_tokens": 100}
                )


def test_nobody_is_there():
    with bound("127.0.0.1", 0) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}/v1"
    absent = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    with absent as client, pytest.raises(openai.APIConnectionError):
        client.models.list()


def test_what_passes_is_asked_for_again(perch, client, monkeypatch):
    """Where a server restarts, or another takes over at its address, users see nothing of it."""
    num_left = 1

    def check_ready():
        nonlocal num_left
        num_left -= 1
        if num_left >= 0:
            raise errors.unavailable("the server is shutting down")

    monkeypatch.setattr(perch.service, "check_ready", check_ready)
    with pytest.raises(openai.InternalServerError) as found:
        client.chat.completions.create(**HOW)
    assert found.value.status_code == 503 and found.value.code == "unavailable"
    assert found.value.response.headers["retry-after"] == "1"
    num_left, since = 1, time.monotonic()
    assert client.with_options(max_retries=2).chat.completions.create(**HOW).choices
    assert num_left < 0 and time.monotonic() - since >= 1
