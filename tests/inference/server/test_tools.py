"""Tools in chats: what the model reads of them, and what clients read of its calls."""

import json

import jsonschema
import pytest

from tests.inference.server import events
from tests.inference.server.fake_engine import tokenizer
from tests.inference.server.parrot import TEMPLATES, Control, Parrot
from tests.inference.server.running import running
from tests.inference.text.tool_calls import native

CHAT = "/v1/chat/completions"
ASKED = [{"role": "user", "content": "How is it in Zürich?"}]
CITY = {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"], "additionalProperties": False,
}  # fmt: skip
REFERRING = {
    "type": "object", "properties": {"at": {"$ref": "#/$defs/point"}}, "required": ["at"],
    "additionalProperties": False,
    "$defs": {"point": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
}  # fmt: skip


def tool(name, parameters, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters} | more}


TOOLS = [tool("weather", CITY, description="Now"), tool("map", REFERRING), tool("now", None)]
ARGUMENTS = '{"city": "Zürich 🙂", "days": 2}'
CALLS = {
    "hermes": f'Let me see.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n'
              '</tool_call>\n<tool_call>{"name": "now", "arguments": {}}</tool_call>',
    "llama3_json": f'Let me see.\n{{"name": "weather", "parameters": {ARGUMENTS}}}; '
                   '{"name": "now", "parameters": {}}',
    "json": f'Let me see.\n[{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "now"}}]',
}  # fmt: skip
FAMILIES = {"hermes": "qwen", "llama3_json": "llama3", "json": "smollm2"}


@pytest.fixture(scope="module", params=list(FAMILIES))
def format(request):
    return request.param


@pytest.fixture(scope="module")
def engine(format):
    return Parrot(TEMPLATES[FAMILIES[format]])


@pytest.fixture(scope="module")
def server(engine):
    with running(engine) as one:
        yield one


@pytest.fixture
def say(engine, server):
    """Asks, and returns what the client gets for what the model says."""

    def ask(says=None, **asked):
        engine.says = says
        response = server.post(CHAT, **{"messages": ASKED, "tools": TOOLS} | asked)
        assert response.status_code == 200, response.text
        if not asked.get("stream"):
            return response.json()["choices"][0]
        return streamed(events.choices(events.read(response.text)))

    return ask


def streamed(pieces):
    """The choice that the pieces of a stream make."""
    message, reason = {"content": None}, None
    for piece in pieces:
        assert reason is None, "the last piece has the reason"
        delta, reason = piece["delta"], piece["finish_reason"]
        message |= {name: delta[name] for name in ("role",) if name in delta}
        if delta.get("content"):
            message["content"] = (message["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call["id"] and call["type"] == "function" and call["function"]["name"]
                calls.append({name: call[name] for name in ("id", "type", "function")})
            else:
                assert call.keys() == {"index", "function"}
                assert call["function"].keys() == {"arguments"} and call["index"] == len(calls) - 1
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return {"message": message, "finish_reason": reason}


def called(choice):
    calls = choice["message"].get("tool_calls") or []
    assert len({call["id"] for call in calls}) == len(calls)
    assert all(call["type"] == "function" for call in calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def test_what_waits_for_a_tool_is_retained(engine, say, format):
    engine.retained.clear()
    say(CALLS[format], cache_salt="mine")
    answered = engine.prompts[-1]
    say("No tool is needed.")  # after what was sent for the answer before
    ((tokens, salt),) = engine.retained
    assert salt == "/mine" and tokens[: len(answered)] == answered
    assert tokenizer().decode(tokens[len(answered) :]).startswith(CALLS[format])


@pytest.mark.parametrize("streams", [False, True])
def test_calls_come_as_calls(say, format, streams):
    choice = say(CALLS[format], stream=streams)
    assert called(choice) == [("weather", ARGUMENTS), ("now", "{}")]
    assert choice["message"]["content"] == "Let me see."
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("streams", [False, True])
def test_one_call_where_several_are_not_wanted(say, format, streams):
    choice = say(CALLS[format], stream=streams, parallel_tool_calls=False)
    assert called(choice) == [("weather", ARGUMENTS)]
    assert choice["message"]["content"] == "Let me see."


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("text", [
    "Fine.", '{"name": "unknown", "arguments": {}}', '{"a": [1, 2]}', '<tool_call>{"name": "x"}',
    "Say <tool_call>", '{"name": "weather", "arg',
])  # fmt: skip
def test_what_is_no_call_is_text(say, text, streams):
    choice = say(text, stream=streams)
    assert choice["message"]["content"] == text and not called(choice)
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("streams", [False, True])
def test_calls_that_nobody_may_make_are_text(say, format, streams):
    choice = say(CALLS[format], stream=streams, tool_choice="none")
    assert choice["message"]["content"] == CALLS[format] and choice["finish_reason"] == "stop"
    assert "tool_calls" not in choice["message"]
    one = {"type": "function", "function": {"name": "now"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [one]}}
    choice = say(CALLS[format], stream=streams, tool_choice=allowed)
    assert all(name == "now" for name, _ in called(choice))
    assert "weather" in choice["message"]["content"]


def test_a_call_that_is_cut_off_has_the_reason(say, format):
    for streams in (False, True):
        choice = say(CALLS[format], stream=streams, max_tokens=70)
        ((name, arguments),) = called(choice)
        assert name == "weather" and ARGUMENTS.startswith(arguments) and len(arguments) > 2
        assert choice["finish_reason"] == "length"


def test_a_call_is_streamed_as_it_is_written(server, engine, format):
    engine.says = CALLS[format]
    response = server.post(CHAT, messages=ASKED, tools=TOOLS, stream=True)
    pieces = events.choices(events.read(response.text))
    assert pieces[0]["delta"] == {"role": "assistant", "content": None}
    calls = [call for piece in pieces for call in piece["delta"].get("tool_calls", ())]
    arguments = [call["function"]["arguments"] for call in calls if call["index"] == 0]
    assert len(arguments) > 20 and "".join(arguments) == ARGUMENTS
    assert "\ufffd" not in response.text


SCHEMAS = {"weather": CITY, "map": REFERRING, "now": {"maxProperties": 0}}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("choice, most, names", [
    *(({"type": "function", "function": {"name": name}}, 1, [name]) for name in SCHEMAS),
    ("required", None, SCHEMAS),
    ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
        {"type": "function", "function": {"name": "now"}}]}}, None, ["now"]),
])  # fmt: skip
@pytest.mark.parametrize("how", [{}, {"n": 2}, {"parallel_tool_calls": False}])
def test_where_a_call_has_to_come_the_grammar_makes_it_one(say, streams, choice, most, names, how):
    choice = say(stream=streams, tool_choice=choice, **how)
    calls = called(choice)
    assert len(calls) == 1 or (calls and most is None and "parallel_tool_calls" not in how)
    for name, arguments in calls:
        assert name in names
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert choice["message"]["content"] is None and choice["finish_reason"] == "tool_calls"


def test_beside_a_schema_an_answer_is_of_it_or_a_call(say):
    """The engine here takes the call; that the grammar permits both, another test says."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
    ((name, arguments), *_) = called(say(response_format=form, tools=TOOLS[:1]))
    assert name == "weather"
    jsonschema.validate(json.loads(arguments), CITY)


def test_a_schema_holds_for_no_call_that_has_to_come(say):
    """Agents send the schema of their last answer with every request."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}
    choice = say(response_format=form, tools=TOOLS[:1], tool_choice="required")
    ((_, arguments), *_) = called(choice)
    jsonschema.validate(json.loads(arguments), CITY)
    assert choice["message"]["content"] is None


def test_log_probabilities_and_ids_go_on_beside_calls(server, engine, format):
    engine.says = CALLS[format]
    asked = {"messages": ASKED, "tools": TOOLS, "logprobs": True, "return_token_ids": True}
    (whole,) = server.post(CHAT, **asked).json()["choices"]
    ids = whole["token_ids"]
    assert bytes(id for id in ids if id < 256).decode() == CALLS[format]
    pieces = events.choices(events.read(server.post(CHAT, **asked, stream=True).text))
    assert [id for piece in pieces for id in piece.get("token_ids", ())] == ids
    told = [t for piece in pieces for t in (piece["logprobs"] or {}).get("content", ())]
    assert told == whole["logprobs"]["content"] and len(told) == len(ids)


def test_what_the_model_reads(say, engine, format):
    function = {"name": "f", "arguments": '{"a": "ü", "b": 1}'}
    call = {"id": "1", "type": "function", "function": function}
    messages = [
        {"role": "system", "content": "Be brief."}, *ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4 degrees"},
    ]  # fmt: skip
    say("Yes", messages=messages)
    prompt = engine.prompt
    for part in ("Be brief.", '"weather"', '"Now"', '"city"', "4 degrees", ASKED[0]["content"]):
        assert part in prompt, part
    written = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "ü", "b": 1}}\n</tool_call>',
        "llama3_json": '{"name": "f", "parameters": {"a": "ü", "b": 1}}',
        "json": '{"name": "f", "arguments": {"a": "ü", "b": 1}}',
    }[format]
    assert written in prompt
    if format == "json":
        system = prompt.split("<|im_end|>")[0]
        assert system.startswith("<|im_start|>system\nBe brief.\n\nYou can call functions:\n")
        assert 'with JSON alone: {"name": ' in system
    say("Yes", tool_choice="none")
    assert '"city"' not in engine.prompt


def test_tokens_of_a_conversation_are_those_of_a_chat(server, engine):
    how = {
        "messages": [*ASKED, {"role": "assistant", "content": "It is "}],
        "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False, "date_string": "today"},
        "continue_final_message": True,
    }  # fmt: skip
    engine.says = "cold."
    for asked in (how, how | {"continue_final_message": False}, {"messages": ASKED}):
        found = server.post("/tokenize", **asked)
        assert found.status_code == 200, found.text
        assert server.post(CHAT, **asked).status_code == 200
        assert found.json()["tokens"] == engine.prompts[-1]


def test_a_message_goes_on_where_it_ends(say, engine):
    for start in ("The answer is ", "", "a <|end|> b <", "```\n"):
        messages = [*ASKED, {"role": "assistant", "content": start}]
        choice = say("42.", messages=messages, tools=None, continue_final_message=True)
        assert choice["message"]["content"] == "42."
        assert engine.prompt.endswith(start) and engine.prompts[-1].count(257) == 0
    say("x", add_generation_prompt=False, tools=None)
    assert not engine.prompt.rstrip().endswith("assistant")


@pytest.mark.parametrize("format", ["hermes", "llama3_json"], indirect=True, scope="module")
def test_variables_reach_the_template(say, engine, format):
    given = {"enable_thinking": False, "date_string": "a <|end|> day"}
    say("x", chat_template_kwargs=given, tools=None)
    expected = {"hermes": "<think>\n\n</think>", "llama3_json": "Today: a <|end|> day\n"}[format]
    assert expected in engine.prompt and 257 not in engine.prompts[-1]


def test_the_format_can_be_named():
    engine = Parrot(TEMPLATES["smollm2"])
    engine.says = CALLS["hermes"]
    with running(engine, tool_call_parser="hermes") as server:
        (choice,) = server.post(CHAT, messages=ASKED, tools=TOOLS).json()["choices"]
        assert len(called(choice)) == 2


@pytest.mark.parametrize("streams", [False, True])
def test_what_the_prompt_began_to_think_is_no_call(streams):
    engine = Parrot(TEMPLATES["qwen"] + "{{ '<think>\n' }}")
    thought = f"Or <tool_call>{{}}</tool_call>?\n{CALLS['hermes']}"
    engine.says = f"{thought}</think>\n{CALLS['hermes']}"
    with running(engine) as server:
        for asked, number in ({"tool_choice": "auto"}, 2), ({"tool_choice": "required"}, 1):
            body = {"messages": ASKED, "tools": TOOLS, "stream": streams} | asked
            response = server.post(CHAT, **body)
            found = events.choices(events.read(response.text)) if streams else None
            choice = streamed(found) if found else response.json()["choices"][0]
            assert len(called(choice)) == number
            assert "x-unread-tool-format" not in response.headers


@pytest.mark.parametrize("streams", [False, True])
def test_a_format_that_is_not_read_is_said(streams, caplog):
    engine = Parrot("{{ tools }}<|action_start|>{{ tool_calls }}")
    engine.says = '<|action_start|><|plugin|>[{"tool": "weather"}]<|action_end|>'
    with running(engine) as server:
        body = {"messages": ASKED, "stream": streams}
        response = server.post(CHAT, **body, tools=TOOLS)
        assert response.headers["x-unread-tool-format"] == "internlm"
        found = events.choices(events.read(response.text)) if streams else None
        choice = streamed(found) if found else response.json()["choices"][0]
        assert choice["message"]["content"] == engine.says and not called(choice)
        assert "x-unread-tool-format" not in server.post(CHAT, **body).headers
        given = [{"type": "function", **one["function"]} for one in TOOLS]
        other = server.post("/v1/responses", input="a", tools=given, stream=streams)
        assert other.headers["x-unread-tool-format"] == "internlm"
    (line,) = [one for one in caplog.messages if one.startswith("tool calls:")]
    assert "internlm, is not read" in line


NATIVE = {
    "<tool_call>\n<function=": "qwen3_coder", "<tool_call><arg_key>": "glm45",
    "<minimax:tool_call>": "minimax_m2",
    "<seed:tool_call>\n<function=": "seed_oss",
}  # fmt: skip


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("marks", NATIVE)
def test_calls_in_the_formats_of_families(streams, marks):
    engine = Parrot(f"{{{{ tools }}}}{{{{ tool_calls }}}}{marks}")
    written = native.FORMATS[NATIVE[marks]].write(("weather", json.loads(ARGUMENTS)))
    engine.says = f"Let me see.\n{written}"
    with running(engine) as server:
        for asked in ({}, {"tool_choice": "required"}):
            body = {"messages": ASKED, "tools": TOOLS[:1], "stream": streams} | asked
            response = server.post(CHAT, **body)
            found = events.choices(events.read(response.text)) if streams else None
            choice = streamed(found) if found else response.json()["choices"][0]
            ((name, arguments), *_) = called(choice)
            jsonschema.validate(json.loads(arguments), CITY)
            assert name == "weather" and choice["finish_reason"] == "tool_calls"
            assert asked or (arguments, choice["message"]["content"]) == (ARGUMENTS, "Let me see.")
            assert "x-unread-tool-format" not in response.headers


@pytest.mark.parametrize("streams", [False, True])
def test_marks_that_are_special_tokens(streams):
    engine = Control("{{ tools }}{{ tool_calls }}[TOOL_CALLS][ARGS]")
    engine.says = f"Let <|start|>me see.[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"
    marks = tuple(tokenizer().encode("[TOOL_CALLS][ARGS]"))
    assert len(marks) == 2
    with running(engine) as server:
        for asked in ({}, {"tool_choice": "required"}, {"tool_choice": "none"}):
            body = {"messages": ASKED, "tools": TOOLS[:1], "stream": streams} | asked
            response = server.post(CHAT, **body, return_token_ids=True)
            found = events.choices(events.read(response.text)) if streams else None
            choice = streamed(found) if found else response.json()["choices"][0]
            if asked.get("tool_choice") == "none":
                assert choice["message"]["content"] == f"Let me see.weather{ARGUMENTS}"
                assert engine.params[-1].shown_special_ids == ()
                continue
            ((name, arguments), *_) = called(choice)
            jsonschema.validate(json.loads(arguments), CITY)
            assert name == "weather" and engine.params[-1].shown_special_ids == marks
            assert asked or (arguments, choice["message"]["content"]) == (ARGUMENTS, "Let me see.")
            pieces = found or [choice]
            assert [id for piece in pieces for id in piece.get("token_ids", ()) if id in marks] == [
                *marks
            ]


WANTS_TEXTS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + '(' + c.function.arguments + ')' }}"
    "{% endfor %}{% endfor %}{{ tools }}"
)


def test_templates_that_want_arguments_as_text_get_them():
    engine = Parrot(WANTS_TEXTS)
    engine.says = "x"
    call = {"id": "1", "function": {"name": "f", "arguments": {"a": "ü"}}}
    messages = [*ASKED, {"role": "assistant", "tool_calls": [call]}]
    with running(engine) as server:
        assert server.post(CHAT, messages=messages).status_code == 200
        assert 'f({"a": "ü"})' in engine.prompt
