"""Tools and calls as templates read them, and which format a template asks for."""

import pytest

from configs.errors import InputError
from inference.text.tool_calls import constrain, formats, prompting
from tests.inference.server.parrot import TEMPLATES

USER = {"role": "user", "content": "Hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": "{x}", "parameters": {}}}
LLAMA31 = (
    '{%- if tools is not none %}{{- \'Respond in the format {"name": function name, '
    '"parameters": dictionary of argument name and its value}.\' }}{%- endif %}'
)


def calling(arguments, **more):
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "function": function}], **more}


@pytest.mark.parametrize("template, name", [
    (None, "json"), ("", "json"), *((TEMPLATES[family], name) for family, name in {
        "qwen": "hermes", "llama3": "llama3_json", "smollm2": "json", "mistral": "json",
        "gemma": "json"}.items()),
    (LLAMA31, "llama3_json"), ("{{ tools }}<|python_tag|>", "llama3_json"),
    ("<tool_call>", "json"), ("{{ tools }} <tool_call>", "hermes"),
])  # fmt: skip
def test_the_format_of_a_template(template, name):
    assert formats.by_name("auto", template).name == name
    assert formats.by_name("hermes", template).name == "hermes"
    with pytest.raises(InputError, match="one of auto, hermes, llama3_json, json, .*, not 'nope'"):
        formats.by_name("nope", template)


SHOWS = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for c in message.tool_calls %}"
READ = {
    "lfm2": "<|tool_call_start|>[{{ c.name }}({{ arguments }})]<|tool_call_end|>",
    "pythonic": "the format [func_name1(params_name1=params_value1)]",
    "qwen3_coder": "<tool_call>\n<function={{ c.name }}>\n<parameter={{ key }}>\n{{ value }}",
    "seed_oss": "<seed:tool_call>\n<function={{ c.name }}>\n<parameter={{ key }}>{{ value }}",
    "glm45": "<tool_call>{{ c.name }}\n<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value }}",
    "mistral": "[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}",
    "deepseek_v3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n",
    "deepseek_v31": "<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments }}",
    "granite": "<|tool_call|>{{ message.tool_calls | tojson }}",
    "phi4": 'functools[{"name": ',
    "jamba": "<tool_calls>",
    "nemotron": "<TOOLCALL>",
    "deepseek_v32": '<{{ dsml }}invoke name="{{ c.name }}">{% set dsml = "｜DSML｜" %}',
    "olmo3": "<function_calls>{{ function_calls }}</function_calls>",
    "cohere": "<|START_ACTION|>",
    "gemma4": "<|tool_call>call:{{ c.name }}{",
    "functiongemma": "<start_function_call>call:{{ c.name }}{",
    "openai": "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="{{ c.name }}">',
}
UNREAD = {
    "internlm": "<|action_start|><|plugin|>",
    "unknown": "CALL {{ c.name }} WITH {{ c.arguments }}",
}


@pytest.mark.parametrize("name", READ)
def test_the_format_of_a_family(name):
    found = formats.of_template(SHOWS + READ[name])
    assert found is formats.FORMATS[name] and found.is_read


@pytest.mark.parametrize("name, template", [
    *((name, SHOWS + calls) for name, calls in UNREAD.items()),
])  # fmt: skip
def test_a_format_that_is_not_read_is_no_other(name, template):
    found = formats.of_template(template)
    assert (found.name, found.is_read) == (name, False)
    assert formats.by_name("hermes", template).is_read
    forced = grammar_of(found)
    assert forced == grammar_of(formats.JSON)  # as which the parser reads it


def grammar_of(format):
    return constrain.of_calls(format, {"f": {"type": "object"}}, True)


@pytest.mark.parametrize("calls, name", [
    ("""<tool_call>\n{"name": "' + c.name + '", "arguments": '""", "hermes"),
    ("[TOOL_CALLS] {{ message.tool_calls | tojson }}", "json"),
    ("{{ c.function | tojson }}", "json"), ("{{ message['tool_calls'] | tojson }}", "json"),
    ('<|python_tag|>{"name": "', "llama3_json"), (r"""{{ '{\"name\": "' }}""", "json"),
])  # fmt: skip
def test_a_format_that_is_read_is_known_by_its_json(calls, name):
    found = formats.of_template(SHOWS + calls)
    assert (found.name, found.is_read) == (name, True)


@pytest.mark.parametrize("given, read", [
    ('{"a": [1, "ü"]}', {"a": [1, "ü"]}), ("", {}), ({"a": 1}, {"a": 1}), ("{}", {}),
    ("[1]", "[1]"), ('{"a": ', '{"a": '), ("[" * 100_000, "[" * 100_000),
])  # fmt: skip
def test_arguments_are_objects_where_they_can_be(given, read):
    asked = [USER, calling(given)]
    found, tools = prompting.prepare(asked, None, TEMPLATES["qwen"])
    assert found == [USER, calling(read)] and tools is None
    assert asked == [USER, calling(given)]  # as it was
    (_, again) = prompting.with_texts(found)
    text = again["tool_calls"][0]["function"]["arguments"]
    assert isinstance(text, str) and (text == given or read == {} or isinstance(given, dict))


def test_a_template_that_knows_tools_gets_them():
    assert prompting.prepare([USER], [TOOL], TEMPLATES["qwen"]) == ([USER], [TOOL])


def test_one_that_does_not_gets_a_message():
    found, tools = prompting.prepare([USER], [TOOL], TEMPLATES["smollm2"])
    assert tools is None and found[1:] == [USER] and found[0]["role"] == "system"
    assert '{"name": "f", "description": "{x}", "parameters": {}}' in found[0]["content"]
    own = {"role": "system", "content": "Be brief."}
    again, _ = prompting.prepare([own, USER], [TOOL], TEMPLATES["smollm2"])
    assert again == [own | {"content": f"Be brief.\n\n{found[0]['content']}"}, USER]


def test_calls_are_text_where_the_template_knows_none():
    twice = calling('{"a": 1}', content="Well")
    twice["tool_calls"] *= 2
    found, _ = prompting.prepare([calling("{}"), twice], None, TEMPLATES["smollm2"])
    one = '{"name": "f", "arguments": {"a": 1}}'
    assert found == [
        {"role": "assistant", "content": '{"name": "f", "arguments": {}}'},
        {"role": "assistant", "content": f"Well\n[{one}, {one}]"},
    ]


KIMI = "{% for c in m.tool_calls %}<|tool_call_begin|>{{ c['id'] }}<|tool_call_argument_begin|>"


def test_ids_of_calls_are_those_that_the_template_reads():
    """Mistral's rejects ids that have not 9 characters, and Kimi's writes nothing but the id."""
    id = "call_0123456789abcdef01234567"
    asked = [USER, calling("{}"), {"role": "tool", "tool_call_id": "1", "content": "a"},
             calling("{}"), {"role": "tool", "tool_call_id": id, "content": "b"}]  # fmt: skip
    asked[3]["tool_calls"][0]["id"] = id

    def ids(template):
        read, _ = prompting.prepare(asked, None, template)
        calls = [call["id"] for message in read for call in message.get("tool_calls", ())]
        return calls, [message["tool_call_id"] for message in read if message["role"] == "tool"]

    calls, results = ids(TEMPLATES["mistral"])
    assert calls == results and len(set(calls)) == 2
    assert all(len(id) == 9 and id.isalnum() for id in calls)
    assert ids(KIMI) == (["functions.f:0", "functions.f:1"],) * 2
    assert ids(TEMPLATES["qwen"]) == (["1", id],) * 2
    asked[3]["tool_calls"][0]["id"] = asked[4]["tool_call_id"] = "a1b2c3d4E"
    assert ids(TEMPLATES["mistral"])[0] == [calls[0], "a1b2c3d4E"]
