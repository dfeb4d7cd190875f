"""What is wrong is named, whatever it is, and the next request is served."""

import json
import random
import re

import msgspec
import pytest

from inference.request import MAX_BIASES
from inference.server.protocol import fields
from inference.server.protocol.dialects.table import ROWS
from tests.inference.server.fake_engine import MAX_CONTEXT, MAX_SEQS, REFUSED, VOCAB

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED = [{"role": "user", "content": "Hi"}]
BODIES = {TEXT: {"prompt": "Hi"}, CHAT: {"messages": ASKED}}
PRIVATE = re.compile(r"0x[0-9a-f]{3,}|(?<!/v1)/[a-z]+/|\.py\b|Traceback", re.IGNORECASE)
BIG = 2**63
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
NAMED = {"type": "function", "function": {"name": "f"}}
NESTED: dict = {"type": "object"}
for _ in range(70):
    NESTED = {"properties": {"a": NESTED}}


def tool(name, parameters=SCHEMA):
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOL = tool("f")


@pytest.fixture(autouse=True)
def the_next_request_is_served(server):
    yield
    assert server.post(TEXT, prompt="a", max_tokens=1).status_code == 200


def error_of(response, status=400):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    if body.pop("type", "") == "error":  # of Anthropic's shape, whose messages name the field
        assert body.pop("request_id") == response.headers["request-id"]
        place = re.match(r"[\w.\[\]]*", body["error"]["message"])[0]
        body["error"] |= {"param": place, "code": None}
    (name, found), = body.items()  # fmt: skip
    assert name == "error" and found.keys() == {"message", "type", "param", "code"}
    assert found["message"] and len(found["message"]) < 400 and not PRIVATE.search(found["message"])
    return found


# Of each field the values at its limits, and those past them or of another type.
BOTH = {
    "temperature": ([0, 2, 0.5], [-0.01, 2.01, "0", True, [1], {}]),
    "top_p": ([1, 1e-6], [0, -1, 1.01, "x"]),
    "top_k": ([-1, 0, 2**31 - 1, 4.0], [-2, 2**31, 1.5, "1"]),
    "min_p": ([0, 1], [-0.1, 1.1]),
    "epsilon_cutoff": ([0, 1], [-0.1, 1.1]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1, "x"]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "repetition_penalty": ([0.01, 2], [0, -1, 2.1]),
    "logit_bias": (
        [{}, {"0": -100, str(VOCAB - 1): 100}, {str(n): 1 for n in range(VOCAB)}],
        [{"0": 100.1}, {"0": "x"}, {"a": 1}, {"-1": 1}, {str(VOCAB): 1}, {"٣": 1}, [],
         {str(n): 1 for n in range(MAX_BIASES + 1)}],
    ),
    "allowed_token_ids": ([[0], [VOCAB - 1]], [[], [VOCAB], [-1], ["a"], 3]),
    "n": ([1, MAX_SEQS], [0, -1, MAX_SEQS + 1, 17, 10**9, 1.5, "1", True]),
    "min_tokens": ([0, 1], [-1, 2, 2**31, 1.5]),
    "stop": (["a", ["a"] * 64, "a" * 256], ["", [""], ["a"] * 65, "a" * 257, 3, [3], {}]),
    "stop_token_ids": (
        [[], list(range(128)), [VOCAB - 1], [1.0]], [list(range(129)), [VOCAB], [-1], 3],
    ),
    "ignore_eos": ([True, False], [1, "true"]),
    "seed": ([0, -BIG, BIG - 1], [BIG, -BIG - 1, 1.5, "1", 2**70]),
    "priority": ([-(2**31), 2**31 - 1], [2**31, 2**70, "x"]),
    "speculate": ([True, False], ["no"]),
    "cache_salt": (["s", "s" * 256], ["", "s" * 257, 3, ["s"]]),
    "stream": ([False], ["yes", 1]),
    "stream_options": ([], [{"include_usage": True}, {}, "x"]),
    "user": (["u" * 512], ["u" * 513, 3]),
    "metadata": ([{"a": "b"}], [{"a": 1}, [], "x"]),
    "response_format": (
        [{"type": "text"}, {"type": "json_object"}, {"type": "text", "json_schema": None},
         {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": True}}],
        [{"type": "x"}, {}, "text", {"type": "json_schema"}, 3,
         {"type": "json_schema", "json_schema": {"name": "x"}},
         {"type": "json_schema", "json_schema": {"schema": None}},
         {"type": "json_schema", "json_schema": {"schema": False}},
         {"type": "json_schema", "json_schema": {"schema": {"type": "stsring"}}},
         {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/a"}}},
         {"type": "json_schema", "json_schema": {"schema": NESTED}},
         {"type": "json_schema", "json_schema": {"schema": {"enum": ["a" * 70_000]}}}],
    ),
    "structured_outputs": (
        [{"json": {}}, {"json": '{"type": "null"}'}, {"regex": "a+"}, {"choice": ["a"]},
         {"json_object": True}, {"grammar": 'start: "a"'}, {"grammar": 'root ::= "a" | [0-9]+'},
         {"grammar": 'start: "a"\n' + "".join(f"r{n}: start\n" for n in range(511))}],
        [{}, {"regex": ""}, {"regex": "(("}, {"choice": []}, {"choice": [""]}, {"choice": "a"},
         {"json": "x"}, {"json": "[1]"}, {"json": 3}, {"json": {}, "regex": "a"}, {"grammar": "a"},
         {"json": {"minimum": 2**53 + 1}}, {"regex": "a{70000}"}, {"regex": "a" * 70_000},
         {"grammar": ""}, {"grammar": 3}, {"grammar": "root ::= ("}, {"grammar": "start: b"},
         {"grammar": "root ::= " + "(" * 5000}, {"grammar": "start: " + "(" * 5000},
         {"grammar": 'start: "' + "a" * 70_000 + '"'}, {"grammar": 'start: "a"', "regex": "a"},
         {"grammar": 'start: "a"\n' + "".join(f"r{n}: start\n" for n in range(512))},
         {"grammar": '%import "x"'}],
    ),
    "return_token_ids": ([True], ["x"]),
    "return_tokens_as_token_ids": ([True], ["x"]),
    "skip_special_tokens": ([True, False], [1]),
    "truncate_prompt_tokens": ([-1, 0, 1, 2**31 - 1, None], [-2, 2**31, "x", 1.5]),
    "truncation_side": (["left", "right", None], ["middle", 3]),
    "prompt_logprobs": ([0, 20, None], [-1, 21, "x", True]),
    "include_stop_str_in_output": ([True], [0]),
    "chat_template": ([None, ""], ["{{ x }}"]),
    "guided_json": ([None, {"type": "object"}, "{}"], [{"type": "x"}, 3, "x"]),
    "typical_p": ([None, 1, 1.0], [0.5, "x"]),
    "bad_words": (
        [[], ["a"], ["a" * 256], [f"w{n}" for n in range(64)], ["(?i).*\\ \n", "🙂"]],
        [[""], ["a" * 257], ["a"] * 65, "a", [3], {}],
    ),
}  # fmt: skip
OWN = {
    TEXT: {
        "prompt": (
            ["a", ["a"] * 16, [1], [[1]], [1.0], [[1.0]], "a" * (MAX_CONTEXT - 1),
             [1] * (MAX_CONTEXT - 1)],
            ["", [], [""], [[]], None, 3, True, {}, [1, "a"], ["a", 1], [1.5], [True], [-1],
             [VOCAB], [2**31], [2**63], [["a"]], ["a"] * 21, ["a"] * 2049,
             [1] * MAX_CONTEXT, "a" * MAX_CONTEXT, "a" * (16 * MAX_CONTEXT + 1)],
        ),
        "max_tokens": ([0, 1, 2**31 - 1], [-1, 2**31, 2**63, 1.5, "inf"]),
        "logprobs": ([0, 20], [-1, 21, "x", True]),
        "best_of": ([1, MAX_SEQS], [0, MAX_SEQS + 1, "x"]),
        "echo": ([True, False], ["x", 1]),
        "suffix": (["", None, "end"], [1, ["end"]]),
        "suffix_first": ([None], [True, False, "x"]),
    },
    CHAT: {
        "messages": (
            [ASKED * 20, [{"role": "assistant", "tool_calls": [CALL]}],
             [{"role": "assistant", "content": "a", "tool_calls": [
                 {"function": {"name": "n" * 256, "arguments": {}}},
                 {"function": {"name": "f", "arguments": "[1"}}]}]],
            [None, [], "Hi", [3], [{}], [{"role": "user"}], [{"role": "user", "content": None}],
             [{"role": "robot", "content": "a"}], [{"role": None, "content": "a"}],
             [{"role": "user", "content": 3}], [{"role": "user", "content": [{"text": "a"}]}],
             [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}],
             [{"role": "user", "content": "a" * MAX_CONTEXT}],
             [{"role": "user", "content": "a" * (16 * MAX_CONTEXT + 1)}], ASKED * 2049,
             [{"role": "user", "content": "a", "reasoning_content": "a" * (16 * MAX_CONTEXT)}],
             [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments":
                                                                     "a" * (16 * MAX_CONTEXT)}}]}],
             *([{"role": "assistant", "tool_calls": [call]}] for call in (
                 {}, {"id": "1"}, {"function": {}}, {"function": {"name": "f"}}, CALL | {"id": 3},
                 CALL | {"id": "a" * 513}, CALL | {"type": "x"},
                 {"function": {"name": "", "arguments": ""}},
                 {"function": {"name": "a" * 257, "arguments": ""}},
                 {"function": {"name": "f", "arguments": 3}})),
             [{"role": "assistant", "tool_calls": [CALL] * 65}]],
        ),
        "max_tokens": ([1, 2**31 - 1], [0, -1, 2**31, "x"]),
        "max_completion_tokens": ([1, MAX_CONTEXT], [0]),
        "documents": ([None, []], ["x", [{"a": 1}]]),
        "reasoning_effort": ([None, "medium"], ["none", "high", "x", 0.5]),
        "logprobs": ([True, False], [1, "x"]),
        "top_logprobs": ([], [1, 21, -1]),
        "tools": (
            [None, [TOOL], [tool("n" * 64)],
             [tool("aZ_-9", None)], [tool("f", {})], [TOOL, tool("g", SCHEMA)]],
            [[], [{"type": "function"}], "x", [{"type": "custom", "custom": {"name": "f"}}],
             [tool("")], [tool("n" * 65)], [tool("a b")], [tool("ü")], [tool("f\n")], [TOOL, TOOL],
             [tool(f"f{n}") for n in range(65)], [tool("f", [])], [tool("f", {"type": "array"})],
             [TOOL | {"function": {"name": "f", "description": 3}}]],
        ),
        "tool_choice": ([None, "none"], ["auto", "required", "x", 3, ["none"], {}, NAMED]),
        "parallel_tool_calls": ([True, False, None], ["x", 1]),
        "chat_template_kwargs": (
            [{}, {"v" * 64: "x" * 512}, {f"n{n}": n for n in range(16)},
             {"a": True, "b": None, "c": 0.5, "d": -BIG}],
            [{"v" * 65: 1}, {"_a": 1}, {"a b": 1}, {"a": "x" * 513}, {"a": []}, {"a": {"b": 1}},
             {f"n{n}": n for n in range(17)}, {"messages": "x"}, {"tools": 1}, {"": 1}, [], "x",
             {"chat_template": "{{ 1 }}"}, {"add_generation_prompt": False}],
        ),
        "add_generation_prompt": ([True, False, None], ["x"]),
        "continue_final_message": ([True, False, None], ["x", 1]),
    },
}  # fmt: skip
GOOD = [(path, name, value) for path in BODIES
        for name, (good, _) in (BOTH | OWN[path]).items() for value in good]  # fmt: skip
BAD = [(path, name, value) for path in BODIES
       for name, (_, bad) in (BOTH | OWN[path]).items() for value in bad]  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_fields_at_their_limits(server, path):
    for own, name, value in GOOD:
        if own == path:
            asked = {"max_tokens": 1} | BODIES[path] | {name: value}
            response = server.post(path, **asked)
            assert response.status_code == 200, (name, str(value)[:80], response.text)
            assert "x-ignored-params" not in response.headers


@pytest.mark.parametrize("path", BODIES)
def test_fields_past_their_limits_are_named(server, path):
    for own, name, value in BAD:
        if own == path:
            asked = {"max_tokens": 1} | BODIES[path] | {name: value}
            found = error_of(server.post(path, **asked))
            where = (found["param"] or "").replace("[", ".").split(".")[0]
            assert where == name and name in found["message"], (name, str(value)[:80], found)
            assert found["type"] == "invalid_request_error" and found["code"]


@pytest.mark.parametrize("asked, status", [
    ({"model": "other"}, 404), ({"model": "../fake"}, 404), ({"model": "fake"}, 200),
    ({"model": 3}, 400), ({"model": "m" * 600}, 400),
])  # fmt: skip
def test_the_model(server, asked, status):
    for path, body in BODIES.items():
        response = server.post(path, max_tokens=1, **body, **asked)
        assert response.status_code == status
        if status != 200:
            found = error_of(response, status)
            assert found["param"] == "model" and (status, found["code"]) in (
                (404, "model_not_found"), (400, "invalid_value"),
            )  # fmt: skip


def test_a_context_that_is_exceeded_is_told_in_numbers(server):
    found = error_of(server.post(TEXT, prompt="a" * 512, max_tokens=100))
    assert found["code"] == "context_length_exceeded" and found["param"] == "prompt"
    assert re.findall(r"\d+", found["message"]) == ["512", "512"]
    found = error_of(server.post(CHAT, messages=[{"role": "user", "content": "a" * 600}]))
    assert found["code"] == "context_length_exceeded" and found["param"] == "messages"
    assert "512" in found["message"] and "618" in found["message"]


@pytest.mark.parametrize("asked", [
    {"stream": False}, {"stream": True}, {"stream": True, "echo": True},
])  # fmt: skip
def test_what_the_engine_refuses_is_an_answer_and_no_stream(server, asked):
    found = error_of(server.post(TEXT, prompt=[1, REFUSED], **asked))
    assert found["message"] == "every token is banned: allow one" and found["param"] is None


def test_some_fields_go_together(server):
    for asked, param in [
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"n": 3, "best_of": 2}, "n"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"min_tokens": 600, "max_tokens": 600}, "min_tokens"),
        ({"min_tokens": 1, "stop_token_ids": list(range(9))}, "stop_token_ids"),
    ]:
        assert error_of(server.post(TEXT, **{"prompt": "a"} | asked))["param"] == param


SCHEMAS = [
    {"type": "stsring"}, {"$ref": "#/a"}, {"minimum": 2**53 + 1}, NESTED,
    {"enum": ["a" * 70_000]}, {"pattern": "(("}, {"not": {"pattern": "a"}},
]  # fmt: skip


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_schemas_of_tools_that_cannot_be_compiled_are_told_with_their_place(server, choice):
    for schema in SCHEMAS:
        asked = {"messages": ASKED, "max_tokens": 1, "tool_choice": choice}
        tools = [TOOL, tool("g", {"properties": {"a": schema}})]
        found = error_of(server.post(CHAT, **asked, tools=tools))
        assert found["param"] == "tools[1].function.parameters", (schema, found)
        assert found["message"].startswith("tools[1].function.parameters: ")
        auto = server.post(CHAT, **asked | {"tool_choice": "auto"}, tools=tools[1:])
        is_short = "a" * 70_000 not in str(schema) and schema is not NESTED
        assert auto.status_code == 200 or not is_short, auto.text


def test_wrong_token_ids_are_named(server):
    biases = {"1": 1, "bad": 1, str(VOCAB): 1}
    found = error_of(server.post(TEXT, prompt="Hi", logit_bias=biases))
    assert f"not 'bad', '{VOCAB}'" in found["message"] and found["param"] == "logit_bias"
    found = error_of(server.post(TEXT, prompt=[VOCAB]))
    assert "out of vocabulary" in found["message"] and str(VOCAB) in found["message"]


def test_of_tools_and_a_schema_the_wrong_one_is_told(server):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    asked = {"messages": ASKED, "tools": [TOOL], "max_tokens": 1, "response_format": form}
    assert error_of(server.post(CHAT, **asked))["param"] == "response_format"


def test_schemas_have_one_limit_together(server):
    tools = [tool(f"f{n}", {"description": "x" * 30_000}) for n in range(3)]
    asked = {"messages": ASKED, "tools": tools, "tool_choice": "required", "max_tokens": 1}
    found = error_of(server.post(CHAT, **asked))
    assert found["param"] == "tools" and "65536 characters together" in found["message"]


def test_as_many_tools_as_there_may_be(server):
    tools = [tool(f"f{n}") for n in range(64)]
    asked = {"messages": ASKED, "tools": tools, "max_tokens": 1}
    assert server.post(CHAT, **asked, tool_choice="none").status_code == 200
    found = error_of(server.post(CHAT, **asked))
    assert found["param"] == "messages" and found["code"] == "context_length_exceeded"


def test_places_of_what_is_wrong_with_tools(server):
    function = {"type": "function", "function": {"name": "g"}}
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "auto", "tools": [NAMED, function]},
    }
    for asked, param in [
        ({"tools": [TOOL, {"type": "x"}]}, "tools[1].type"),
        ({"tools": [TOOL, tool("a b")]}, "tools[1].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
        ({"tools": [tool("f", {"type": "null"})]}, "tools[0].function.parameters.type"),
        ({"tools": [TOOL], "tool_choice": function}, "tool_choice.function.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [TOOL], "tool_choice": allowed},
         "tool_choice.allowed_tools.tools[1].function.name"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
         "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "bad_words": ["a"]}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {
            "type": "structural_tag", "format": {"type": "const_string", "value": "a"}}},
         "tool_choice"),
        ({"bad_words": ["a"], "structured_outputs": {"regex": "a"}}, "bad_words"),
        ({"bad_words": ["a"], "ignore_eos": True}, "ignore_eos"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"_a": 1}}, "chat_template_kwargs"),
    ]:  # fmt: skip
        found = error_of(server.post(CHAT, **{"messages": ASKED, "max_tokens": 1} | asked))
        assert found["param"] == param and param in found["message"], (asked, found)


def test_unknown_fields_are_accepted_counted_and_named(server):
    response = server.post(TEXT, prompt="a", max_tokens=1, no_such_field=0.5, **{"odd\r\nname": 1})
    assert response.status_code == 200
    assert response.headers["x-ignored-params"] == "no_such_field, odd??name"
    assert (
        'ridgeline:ignored_params_total{model_name="fake"} 2.0' in server.http.get("/metrics").text
    )
    many = {f"field_{n}": n for n in range(1000)}
    names = server.post(TEXT, prompt="a", max_tokens=1, **many).headers["x-ignored-params"]
    assert names.count(",") == 15
    streamed = server.post(CHAT, messages=ASKED, max_tokens=1, stream=True, no_such_field=1)
    assert streamed.headers["x-ignored-params"] == "no_such_field"


DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize("data", [
    b"", b"{", b"null", b"[]", b'"x"', b"1", b"true", b"\xef\xbb\xbf{}",
    '{"prompt": "a"}'.encode("utf-16"), b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xc0\xaf"}', b'{"temperature": NaN}', b'{"temperature": Infinity}',
    b'{"temperature": 1e999}', b'{"seed": ' + b"9" * 5000 + b"}", DEEP,
    b'{"metadata": ' + b'{"a":' * 90_000, b'{"prompt": "a"} {}', b'{"prompt": "a",}',
])  # fmt: skip
def test_bodies_that_are_no_json_objects(server, data):
    how = {"content-type": "application/json"}
    for path in (TEXT, CHAT, "/tokenize", "/detokenize"):
        found = error_of(server.http.post(path, content=data, headers=how))
        assert "body" in found["message"] or found["param"] in ("prompt", "messages", "tokens")


def test_a_name_that_is_given_twice_counts_once(server):
    how = {"content-type": "application/json; charset=utf-8"}
    data = b'{"prompt": "a", "max_tokens": 5, "max_tokens": 1}'
    response = server.http.post(TEXT, content=data, headers=how)
    assert response.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("headers", [
    {}, {"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "multipart/form-data; boundary=x"},
    {"content-type": "application/json", "content-encoding": "gzip"},
])  # fmt: skip
def test_bodies_are_json_by_their_headers(server, headers):
    data = json.dumps({"prompt": "a"}).encode()
    error_of(server.http.post(TEXT, content=data, headers=headers), 415)


@pytest.mark.parametrize("method, path, status", [
    ("GET", "/v1/nothing", 404), ("GET", "//v1/models", 404), ("GET", "/v1/models/", 404),
    ("POST", "/v1/completions/", 404), ("GET", TEXT, 405), ("POST", "/v1/models", 405),
    ("OPTIONS", CHAT, 405), ("DELETE", "/v1/models/fake", 405), ("GET", "/health;x", 404),
])  # fmt: skip
def test_paths_and_methods(server, method, path, status):
    response = server.http.request(method, path)
    assert error_of(response, status)["param"] in (None, "model")


ODD = [
    None, True, 0, 1, -1, 17, 2**31, 2**63, 2**70, 0.5, -0.0, 1e308, "", "a", "\x00", "<|end|>", [],
    [[]], [1], ["a"], [None], {}, {"a": 1}, {"0": 1}, {"type": "text"}, [[1], [2, 3]], ["a", "b"],
    [{"role": "user", "content": "x"}], {"include_usage": True}, "é" * 50,
]  # fmt: skip
KINDS = {
    TEXT: fields.CompletionRequest, CHAT: fields.ChatRequest,
    "/tokenize": fields.TokenizeRequest, "/detokenize": fields.DetokenizeRequest,
}  # fmt: skip


@pytest.mark.parametrize("path", KINDS)
def test_whatever_fields_hold_no_answer_is_a_failure(server, path):
    dice = random.Random(path)
    names = [field.name for field in msgspec.structs.fields(KINDS[path])] + list(ROWS)
    for _ in range(100):
        body = {"max_tokens": 2} | BODIES.get(path, {"prompt": "Hi"})
        body |= {name: dice.choice(ODD) for name in dice.sample(names, dice.randint(1, 4))}
        how = {"content-type": "application/json"}
        response = server.http.post(path, content=json.dumps(body).encode(), headers=how)
        if response.status_code != 200:
            assert response.status_code in (400, 404), (body, response.text)
            error_of(response, response.status_code)


@pytest.mark.parametrize("path, fields, param", [
    ("/v1/chat/completions", {"chat_template_kwargs": {"a": 2**64}}, "messages"),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {
        "name": "f", "parameters": {"maximum": 2**64}}}], "tool_choice": "required"}, None),
])  # fmt: skip
def test_numbers_that_no_frame_holds(server, path, fields, param):
    body = {"messages": [{"role": "user", "content": "a"}], **fields}
    error = error_of(server.post(path, **body), 400)
    assert param is None or error["param"] == param
    assert error["message"]
