"""Answers of a form that the request describes."""

import json
import threading

import pytest

from tests.inference.server import events
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.running import running, wait_until

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Hi"}]}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"type": "array", "items": {"type": "string"}}},
    "required": ["a", "b"], "additionalProperties": False,
}  # fmt: skip
STRICT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


def is_of_schema(text: str) -> bool:
    found = json.loads(text)
    return found.keys() == {"a", "b"} and isinstance(found["a"], bool)


@pytest.mark.parametrize("asked, is_right", [
    ({"response_format": STRICT}, is_of_schema),
    ({"response_format": {"type": "json_object"}}, lambda text: isinstance(json.loads(text), dict)),
    ({"structured_outputs": {"json": SCHEMA}}, is_of_schema),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_of_schema),
    ({"structured_outputs": {"regex": "[0-9]{3}"}}, lambda text: text.isdigit() and len(text) == 3),
    ({"structured_outputs": {"choice": ["ja", "nein"]}}, lambda text: text in ("ja", "nein")),
    ({"structured_outputs": {"json_object": True}}, lambda text: text[0] == "{"),
    ({"structured_outputs": {"grammar": 'start: "a" "b"~3'}}, lambda text: text == "abbb"),
    ({"structured_outputs": {"grammar": 'root ::= "a" [0-9] | "b"'}}, lambda text: text == "a0"),
])  # fmt: skip
def test_answers_have_the_form(server, asked, is_right):
    given = server.post(TEXT, prompt="a", max_tokens=200, **asked).json()
    (choice,) = given["choices"]
    assert is_right(choice["text"]) and choice["finish_reason"] == "stop", choice
    given = server.post(CHAT, **ASKED, n=2, **asked).json()
    assert [is_right(choice["message"]["content"]) for choice in given["choices"]] == [True, True]
    stream = events.read(server.post(CHAT, **ASKED, stream=True, **asked).text)
    deltas = [choice["delta"].get("content", "") for choice in events.choices(stream)]
    assert is_right("".join(deltas))


def test_both_ways_of_asking_exclude_each_other(server):
    asked = {"response_format": STRICT, "structured_outputs": {"regex": "a"}}
    error = server.post(CHAT, **ASKED, **asked).json()["error"]
    assert error["param"] == "structured_outputs"
    for first in ({"type": "text"}, None):
        assert server.post(CHAT, **ASKED, **asked | {"response_format": first}).status_code == 200
    ignoring = server.post(TEXT, prompt="a", ignore_eos=True, response_format=STRICT)
    assert ignoring.status_code == 400 and ignoring.json()["error"]["param"] == "ignore_eos"


def test_what_an_answer_may_not_obey_is_named(server):
    """Of the schemas that its grammar has, those of tools among them."""
    words = {"type": "array", "items": {"const": "a"}, "uniqueItems": True}
    lists = {"type": "array", "items": {"enum": list("abcdefgh")}, "uniqueItems": True}
    arguments = {"type": "object", "properties": {"a": lists}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": arguments}}
    for path, body, relaxed in (
        (TEXT, {"prompt": "a", "structured_outputs": {"json": words}}, None),
        (TEXT, {"prompt": "a", "structured_outputs": {"json": lists}}, "uniqueItems"),
        (CHAT, {**ASKED, "tools": [tool], "tool_choice": "required"}, "uniqueItems"),
        (CHAT, {**ASKED, "tools": [tool]}, None),
    ):
        response = server.post(path, max_tokens=50, **body)
        assert response.status_code == 200, response.text
        assert response.headers.get("x-relaxed-schema") == relaxed


def test_without_a_tokenizer_there_are_none():
    with running(FakeEngine(has_text=False)) as server:
        response = server.post(TEXT, prompt=[1], structured_outputs={"regex": "a"})
        assert response.status_code == 400 and "not supported" in response.text


def test_compiling_stops_no_other_request():
    may_go_on = threading.Event()

    class Slow(FakeEngine):
        def prepare(self, params):
            may_go_on.wait(60)
            super().prepare(params)

    with running(Slow()) as server:
        found = []
        asked = {"prompt": "a", "structured_outputs": {"regex": "ab"}}
        thread = threading.Thread(target=lambda: found.append(server.post(TEXT, **asked)))
        thread.start()
        wait_until(lambda: server.service.client.num_sequences)
        assert server.post(TEXT, prompt="a", max_tokens=30).status_code == 200
        assert not found
        may_go_on.set()
        thread.join(60)
        assert found[0].json()["choices"][0]["text"] == "ab"


def test_a_client_that_disconnects_while_it_is_compiled_is_forgotten():
    may_go_on = threading.Event()

    class Slow(FakeEngine):
        def prepare(self, params):
            may_go_on.wait(60)

    engine = Slow()
    with running(engine) as server:
        for _ in range(3):
            with pytest.raises(Exception, match="timed out"):
                server.http.post(TEXT, json={"prompt": "a", "structured_outputs": {"regex": "a"}},
                                 timeout=0.2)  # fmt: skip
        wait_until(lambda: not server.service.client.num_sequences)
        may_go_on.set()
        assert server.post(TEXT, prompt="a", max_tokens=2).status_code == 200
        assert len(engine.prompts) == 1


def test_words_that_are_banned():
    """What the engine would say otherwise holds one."""
    form = {"regex": "Gr.{1,3}e|Hallo"}
    with running() as server:
        (choice,) = server.post(TEXT, prompt="a", max_tokens=30).json()["choices"]
        assert "Grüße" in choice["text"]
        for words in (["Grüße"], ["x", "ü"]):
            for path, asked in ((TEXT, {"prompt": "a"}), (CHAT, ASKED)):
                response = server.post(path, max_tokens=30, bad_words=words, **asked)
                assert response.status_code == 200 and "ü" not in response.text
        both = server.post(TEXT, prompt="a", bad_words=["a"], structured_outputs=form)
        assert both.status_code == 400 and both.json()["error"]["param"] == "bad_words"
