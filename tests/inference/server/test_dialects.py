"""Fields of other servers: each is declared, or the table says what becomes of it, and does so."""

import json
from pathlib import Path

import pytest

from inference.server.protocol import parse
from inference.server.protocol.dialects import table
from inference.server.protocol.dialects.table import ROWS, TABLE, Fate
from inference.server.protocol.errors import ApiError
from inference.server.web.operations import OPERATIONS
from tests.inference.server.fake_engine import TEMPLATE
from tests.inference.server.parrot import Parrot
from tests.inference.server.running import running

KNOWN = json.loads((Path(__file__).parent / "known_fields.json").read_text("utf-8"))
KINDS = {each.path: each.body for each in OPERATIONS if each.body is not None}
TEXT, CHAT, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/messages"
PATHS = (
    *(CHAT, TEXT, "/v1/responses", MESSAGES, "/v1/embeddings", "/infill"),
    *("/v1/score", "/v1/rerank", "/classify"),
)
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, TEXT: {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"}, "/v1/embeddings": {"input": "Hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
    "/infill": {"input_prefix": "a", "input_suffix": "b"}, "/classify": {"input": "Hi"},
    "/v1/score": {"text_1": "a", "text_2": "b"}, "/v1/rerank": {"query": "a", "documents": ["b"]},
}  # fmt: skip
ASKED = BODIES[CHAT]
# Of fields that are obeyed, values that ask for something.
VALUES = {
    "structured_outputs.json": {"type": "object"}, "structured_outputs.regex": "a+",
    "structured_outputs.choice": ["a", "b"], "structured_outputs.grammar": 'root ::= "a"',
    "repetition_penalty": 1.1, "max_tokens": 3, "n": 2, "include_stop_str_in_output": True,
    "cache_salt": "s", "max_output_tokens": 3, "text.format": {"type": "json_object"},
    "reasoning.effort": "low", "output_config.effort": "low", "stop": ["x"],
    "stop_sequences": ["x"], "output_config.format": {"type": "json_schema", "schema": {}},
    "thinking_token_budget": 5, "separate_reasoning": False, "use_activation": False,
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip


def read(path: str, without: str = "", **fields) -> parse.Parsed:
    body = {name: value for name, value in BODIES[path].items() if name != without}
    return parse.parse(json.dumps(body | fields).encode(), KINDS[path])


def declares(path: str, name: str) -> bool:
    return name in KINDS[path].__struct_encode_fields__


def test_every_known_field_has_a_fate():
    unknown = [
        (server, path, name)
        for server, paths in KNOWN.items()
        for path, names in paths.items()
        for name in names.split()
        if not declares(path, name) and name not in ROWS
    ]
    # What another body's field of this name needs: without messages they have no effect.
    chats = {"add_generation_prompt", "continue_final_message", "chat_template_kwargs"}
    assert [each for each in unknown if each[1:] not in
            [("/v1/embeddings", name) for name in chats]] == []  # fmt: skip


def test_a_name_has_one_row():
    names = [name for row in TABLE for name in row.names]
    assert len(names) == len(set(names)) == len(ROWS)


@pytest.mark.parametrize("path", PATHS)
def test_each_field_does_what_its_row_says(path):
    for name, row in ROWS.items():
        if declares(path, name):
            continue
        for value in row.neutral:
            assert read(path, **{name: value}) == read(path), (name, value)
        choices = row.becomes.split() or [""]
        targets = [each for each in choices if declares(path, each.partition(".")[0])]
        becomes = (targets or choices)[0]
        target = becomes.partition(".")[0]
        if not declares(path, target) and target in ROWS and ROWS[target].fate is Fate.OBEYED:
            becomes = ROWS[target].becomes
            target = becomes.partition(".")[0]
        value = VALUES.get(becomes, "something")
        is_refused = target in ROWS and ROWS[target].fate is Fate.REFUSED
        if row.fate is Fate.REFUSED or (is_refused and not declares(path, target)):
            with pytest.raises(ApiError) as error:
                read(path, **{name: value})
            assert error.value.status == 400 and error.value.param == name
            assert error.value.message.startswith(f"{name} is not supported")
            assert row.why or is_refused
        elif row.fate is Fate.IGNORED or not declares(path, target):
            request, ignored, _ = read(path, **{name: value})
            assert request == read(path).request and ignored == [name]
        else:
            outer, _, part = becomes.partition(".")
            same = read(path, **{outer: {part: value} if part else value})
            request, ignored, names = read(path, without=outer, **{name: value})
            assert request == same.request != read(path).request
            assert ignored == [] and names == {target: name}


def test_unlimited_is_the_whole_context(server, engine):
    assert server.post(TEXT, prompt="Hi", n_predict=-1).status_code == 200
    assert engine.params[-1].max_new_tokens == 510


def test_the_page_shows_the_table():
    page = (Path(__file__).parents[3] / "docs" / "server.md").read_text("utf-8")
    assert table.markdown() in page


@pytest.mark.parametrize("asked, expected", [
    ({"regex": "[0-9]{2}"}, "00"), ({"guided_regex": "xy"}, "xy"), ({"ebnf": 'root ::= "q"'}, "q"),
    ({"guided_choice": ["ja"]}, "ja"), ({"grammar": 'root ::= "ab"'}, "ab"),
    ({"json_schema": SCHEMA}, '{"a":true}'), ({"guided_json": json.dumps(SCHEMA)}, '{"a":true}'),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, '{"a":true}'),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, '{"a":true}'),
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, '{"a":true}'),
    ({"response_format": {"type": "json_object", "json_schema": {"schema": SCHEMA}}},
     '{"a":true}'),
    ({"structured_outputs": {"regex": "xy", "structural_tag": None, "whitespace_pattern": None,
                             "disable_any_whitespace": False, "disable_fallback": True}}, "xy"),
])  # fmt: skip
def test_constraints_are_obeyed(server, asked, expected):
    def told(response):
        assert response.status_code == 200, response.text
        assert "x-ignored-params" not in response.headers
        text = response.json()["choices"][0]
        return text.get("text", text.get("message", {}).get("content"))

    given = told(server.post(TEXT, prompt="a", max_tokens=200, **asked))
    assert given == expected or json.loads(given).keys() == {"a"}
    assert told(server.post(CHAT, **ASKED, **asked)) == given


@pytest.mark.parametrize("asked, param", [
    ({"regex": "(("}, "regex"), ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_json": {"type": "x"}}, "guided_json"), ({"grammar": "root ::= ("}, "grammar"),
    ({"regex": "a", "json_schema": {}}, "regex"), ({"n_predict": "x"}, "n_predict"),
    ({"regex": "a", "response_format": {"type": "json_object"}}, "regex"),
    ({"repeat_penalty": 9}, "repeat_penalty"), ({"n_predict": 3, "max_tokens": 3}, "n_predict"),
    ({"regex": "a", "structured_outputs": {"regex": "b"}}, "regex"), ({"n_cmpl": 9}, "n_cmpl"),
    ({"response_format": {"type": "text", "schema": SCHEMA}}, "response_format.type"),
    ({"response_format": {"type": "json_object", "schema": SCHEMA, "value": SCHEMA}},
     "response_format"),
    ({"response_format": {"type": "json_object", "shape": 1}}, "response_format"),
    ({"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
     "structured_outputs.disable_any_whitespace"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
])  # fmt: skip
def test_errors_name_the_field_that_was_sent(server, asked, param):
    for path in (TEXT, CHAT):
        error = server.post(path, **BODIES[path], **asked).json()["error"]
        assert error["param"] == param and error["message"].startswith(param), (path, error)


def test_responses_take_the_same_constraints(server, engine):
    how = {"input": "Hi", "max_output_tokens": 30}
    given = server.post("/v1/responses", **how, structured_outputs={"regex": "xy"}).json()
    assert given["output"][0]["content"][0]["text"] == "xy"
    given = server.post("/v1/responses", **how, guided_regex="xy", logit_bias={"1": 2}).json()
    assert given["output"][0]["content"][0]["text"] == "xy"
    assert engine.params[-1].logit_bias == ((1, 2.0),)
    server.post("/v1/responses", **how, stop="üß", include_stop_str_in_output=True)
    assert engine.params[-1].stop == ("üß",)
    both = {"guided_regex": "a", "text": {"format": {"type": "json_object"}}}
    error = server.post("/v1/responses", **how, **both).json()["error"]
    assert error["param"] == "guided_regex"


@pytest.mark.parametrize("path", ["/v1/responses", TEXT, CHAT])
def test_no_field_that_constrains_another_endpoint_is_dropped(path, server, engine):
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict"):
        assert server.post(path, **BODIES[path], **{name: 3}).status_code == 200
        assert engine.params[-1].max_new_tokens == 3, name
    how = {"stop_token_ids": [7], "min_tokens": 2, "allowed_token_ids": [7, 8, 71]}
    assert server.post(path, **BODIES[path], **how, max_tokens=3).status_code == 200
    params = engine.params[-1]
    assert (params.stop_token_ids, params.min_tokens, params.allowed_token_ids) == (
        (7,),
        2,
        (7, 8, 71),
    )
    for how in ({"bad_words": ["x"]}, {"response_format": {"type": "json_object"}}):
        assert server.post(path, **BODIES[path], **how, max_tokens=3).status_code == 200
        assert engine.params[-1].grammar is not None, how
    schema = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    response = server.post(path, **BODIES[path], response_format=schema, max_tokens=3)
    assert (response.status_code == 200) == (path != "/v1/responses")
    if path == "/v1/responses":
        assert response.json()["error"]["param"] == "response_format"
    else:
        for how in ({"instructions": "x"}, {"text": {"format": {"type": "json_object"}}}):
            (name,) = how
            assert server.post(path, **BODIES[path], **how).json()["error"]["param"] == name


TEMPLATES = {
    "none": TEMPLATE, "switch": TEMPLATE + "{{ enable_thinking }}",
    "prose": TEMPLATE + "Think before thinking of documents.",
    "effort": TEMPLATE + "{{ reasoning_effort }}{{ thinking }}",
    "documents": "{% for d in documents %}{{ d.title }}{% endfor %}" + TEMPLATE,
}  # fmt: skip
CASES = [
    ("none", {"reasoning_effort": "medium"}, ""), ("none", {"reasoning_effort": "high"}, None),
    ("none", {"reasoning_effort": "none"}, None), ("none", {"reasoning_effort": None}, ""),
    ("prose", {"reasoning_effort": "none"}, None), ("prose", {"documents": [{"title": "T"}]}, None),
    ("switch", {"reasoning_effort": "none"}, "False"),
    ("switch", {"reasoning_effort": "low"}, None),
    ("effort", {"reasoning_effort": "low"}, "lowTrue"),
    ("effort", {"reasoning_effort": "none"}, "noneFalse"),
    ("effort", {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False}},
     "lowFalse"),
    ("none", {"documents": [{"title": "T"}]}, None), ("none", {"documents": []}, ""),
    ("documents", {"documents": [{"title": "T"}]}, "T<|start|>"),
]  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_reads_a_field_or_it_is_refused(name):
    engine = Parrot(TEMPLATES[name])
    with running(engine) as server:
        for _, asked, shown in (case for case in CASES if case[0] == name):
            response = server.post(CHAT, **ASKED, max_tokens=1, **asked)
            ((field, value), *_) = asked.items()
            if shown is None:
                error = response.json()["error"]
                assert response.status_code == 400 and error["param"] == field, asked
            else:
                assert response.status_code == 200 and shown in engine.prompt, (
                    asked,
                    response.text,
                )
            if field == "reasoning_effort":
                how = {"input": "Hi", "max_output_tokens": 1, "reasoning": {"effort": value}}
                given = server.post("/v1/responses", **how)
                same = 200 if value is None else response.status_code
                if "chat_template_kwargs" not in asked:
                    assert given.status_code == same
                if given.status_code == 200:
                    assert given.json()["reasoning"] == {"effort": value, "summary": None}


def test_special_tokens_are_shown_where_that_is_asked_for():
    engine = Parrot()
    engine.plan = lambda params, seed: [65, 256, 66, 257]
    with running(engine) as server:
        for skips, text in ((None, "AB"), (True, "AB"), (False, "A<|start|>B")):
            asked = {"max_tokens": 4, "skip_special_tokens": skips, "logprobs": 0}
            (choice,) = server.post(TEXT, prompt="a", **asked).json()["choices"]
            offsets = choice["logprobs"]["text_offset"]
            assert choice["text"].startswith(text) and offsets[2] == len(text) - 1


def test_tokens_as_token_ids(server):
    how = {"max_tokens": 3, "return_tokens_as_token_ids": True}
    (choice,) = server.post(TEXT, prompt="a", logprobs=1, **how).json()["choices"]
    assert choice["logprobs"]["tokens"] == ["token_id:71", "token_id:114", "token_id:195"]
    assert choice["logprobs"]["top_logprobs"][0] == {"token_id:71": -0.25}
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    (choice,) = server.post(CHAT, **ASKED, logprobs=True, top_logprobs=2, **how).json()["choices"]
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["bytes"]) == ("token_id:71", [71])
    assert [top["token"] for top in first["top_logprobs"]] == ["token_id:71", "token_id:72"]
