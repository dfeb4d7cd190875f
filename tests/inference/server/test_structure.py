"""Answers of a form that the request describes."""

import json
import threading

import pytest

from inference.text.grammar import Grammars
from tests.inference.server import events
from tests.inference.server.fake_engine import END, FakeEngine, tokenizer
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


GET = {"begin": "<f=get>", "schema": SCHEMA, "end": "</f>"}
TAG = {"type": "tag", "begin": "<f=get>", "end": "</f>",
       "content": {"type": "json_schema", "json_schema": SCHEMA}}  # fmt: skip
CALLS = {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG], "at_least_one": True}


@pytest.mark.parametrize("asked", [
    {"response_format": {"type": "structural_tag", "format": CALLS}},
    {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag",
                                                          "format": CALLS})}},
])  # fmt: skip
def test_structural_tags(server, asked):
    def is_right(text):
        return text.startswith("<f=get>") and is_of_schema(
            text[len("<f=get>") : text.index("</f>")]
        )

    text = server.post(TEXT, prompt="a", max_tokens=200, **asked).json()["choices"][0]["text"]
    assert is_right(text)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for more in (
        {"n": 2},
        {"tools": [tool]},
        {"stop": ["</f>"], "include_stop_str_in_output": True},
    ):
        body = server.post(CHAT, **ASKED, **asked, **more).json()
        assert all(is_right(choice["message"]["content"]) for choice in body["choices"]), body
    stream = events.read(server.post(CHAT, **ASKED, stream=True, **asked).text)
    deltas = [choice["delta"].get("content", "") for choice in events.choices(stream)]
    assert is_right("".join(deltas))


def test_structures_with_triggers_leave_other_text_free(server, engine):
    """The older form of structural tags; marks that are special tokens are shown."""
    asked = {"type": "structural_tag", "structures": [GET], "triggers": ["<f="]}
    assert server.post(CHAT, **ASKED, response_format=asked).status_code == 200
    state = Grammars(tokenizer(), [END]).start(engine.params[-1].grammar)
    for token in b"Any <text. <f=get>":
        state.accept(token)
    assert not state.has_failed
    state.accept(ord("x"))
    assert state.has_failed
    special = {**asked, "structures": [{**GET, "begin": "[TOOL_CALLS]get"}],
               "triggers": ["[TOOL_CALLS]"]}  # fmt: skip
    assert server.post(CHAT, **ASKED, response_format=special).status_code == 200
    assert engine.params[-1].shown_special_ids == (
        tokenizer().specials_in(["[TOOL_CALLS]"])["[TOOL_CALLS]"],
    )


@pytest.mark.parametrize("tag, param, words", [
    ({}, "response_format", "with a format, or with structures and triggers"),
    ({"structures": [GET]}, "response_format", "with structures and triggers"),
    ({"structures": [GET], "triggers": ["<g="]}, "response_format",
     "triggers: exactly one of them has to begin the tag '<f=get>', not 0"),
    ({"structures": [{"begin": "a"}], "triggers": ["a"]}, "response_format.structures[0].schema",
     "is required"),
    ({"structures": [GET], "triggers": []}, "response_format.triggers", "length from 1"),
    ({"format": {"type": "token", "token": 3}}, "response_format.format.type",
     "is one of any_text, const_string, grammar, json_schema, optional, or, plus"),
    ({"format": {**CALLS, "tags": [{**TAG, "begin": 3}]}}, "response_format.format.tags[0].begin",
     "expected a text, got a whole number"),
    ({"format": {**TAG, "content": {"type": "any_text", "max_tokens": 3}}},
     "response_format.format.content", "unknown field max_tokens"),
    ({"format": CALLS, "schema": SCHEMA}, "response_format", "schema"),
    ({"format": {**TAG, "content": {"type": "json_schema", "json_schema": {"type": "x"}}}},
     "response_format", "'x'"),
    ({"format": {"type": "regex", "pattern": "(("}}, "response_format", "invalid regular"),
    ({"format": {"type": "json_schema", "json_schema": {}, "style": "xml"}},
     "response_format.format.style", "is one of json, qwen_xml, minimax_xml, glm_xml"),
])  # fmt: skip
def test_a_structural_tag_that_is_not_valid_is_named(server, tag, param, words):
    asked = {"type": "structural_tag", **tag}
    error = server.post(CHAT, **ASKED, response_format=asked).json()["error"]
    assert error["param"] == param and words in error["message"], error
    if "schema" not in tag:
        place = "structured_outputs.structural_tag"
        outputs = {"structural_tag": json.dumps(asked)}
        error = server.post(CHAT, **ASKED, structured_outputs=outputs).json()["error"]
        assert error["param"] == param.replace("response_format", place)


def test_other_fields_exclude_a_structural_tag(server):
    tag = {"type": "structural_tag", "format": CALLS}
    for asked, param in (
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag.type",
        ),
        ({"response_format": tag, "structured_outputs": {"regex": "a"}}, "response_format"),
        (
            {"structured_outputs": {"structural_tag": json.dumps(tag), "regex": "a"}},
            "structured_outputs",
        ),
        (
            {"response_format": tag, "structured_outputs": {"structural_tag": json.dumps(tag)}},
            "structured_outputs",
        ),
        ({"response_format": {**tag, "type": "json_object"}}, "response_format.type"),
        ({"response_format": tag, "bad_words": ["a"]}, "response_format"),
    ):
        error = server.post(CHAT, **ASKED, **asked).json()["error"]
        assert error["param"] == param, error


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
