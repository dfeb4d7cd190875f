"""Calls of tools in texts: three formats, and what only looks like a call."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.text.tool_calls.formats import FORMATS
from inference.text.tool_calls.parser import Parser
from inference.text.tool_calls.stream import Part

NAMES: dict = {"f": {}, "get_weather": {}}
F = '{"name": "f", "arguments": {"a": [1, {"b": "}\\""}]}}'
W = '{"name": "get_weather", "arguments": {"city": "Zürich 🙂"}}'
CALLED_F, CALLED_W = ("f", '{"a": [1, {"b": "}\\""}]}'), ("get_weather", '{"city": "Zürich 🙂"}')


def read(format: str, *pieces: str, thinks: bool = False) -> list[Part]:
    parser = Parser(FORMATS[format], NAMES, thinks)
    found = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert all(part.text or part.name is not None for part in found)
    return found


def whole(parts: list[Part]) -> tuple[str, list[tuple[str, str]]]:
    """The text, and name and arguments of each call, whose index says which it is."""
    text, calls = "", []
    for part in parts:
        if part.index is None:
            text += part.text
        elif part.name is not None:
            assert part.index == len(calls)
            calls.append((part.name, part.text))
        else:
            assert part.index == len(calls) - 1
            calls[-1] = calls[-1][0], calls[-1][1] + part.text
    return text, calls


@pytest.mark.parametrize("format, text, told, calls", [
    ("hermes", f"<tool_call>\n{F}\n</tool_call>", "", [CALLED_F]),
    ("hermes", f"Well.\n\n<tool_call>{F}</tool_call>\n<tool_call>\n{W}\n</tool_call>\n", "Well.",
     [CALLED_F, CALLED_W]),
    ("hermes", f"<tool_call>[{F}, {W}]</tool_call> Done.", "Done.", [CALLED_F, CALLED_W]),
    ("hermes", f"<tool_call>\n{F}\n{W}", "", [CALLED_F, CALLED_W]),
    ("hermes", f"<tool_call><tool_call>{F}</tool_call>", "<tool_call>", [CALLED_F]),
    ("hermes", f"a </tool_call> <tool_ <tool_call>{F}", "a </tool_call> <tool_", [CALLED_F]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": [}</tool_call> x', "x",
     [("f", '{"a": [}')]),
    ("hermes", '<tool_call>{"id": "7", "type": "function", "name": "f", "parameters": {}, "x": 1}',
     "", [("f", "{}")]),
    ("hermes", '<tool_call>{"arguments": {"name": "g"}, "name": "f"}</tool_call>', "",
     [("f", '{"name": "g"}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"ü\\"}"}</tool_call>', "",
     [("f", '{"a": "ü"}')]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "f"}', "",
     [("f", "{}")] * 2),
    ("llama3_json", f"I shall.\n {F}\n\nSo.", "I shall.\n\nSo.", [CALLED_F]),
    ("llama3_json", f"[{F}]", f"[{F}]", []),
    ("json", F, "", [CALLED_F]), ("json", f"[{F},\n{W}]\n", "", [CALLED_F, CALLED_W]),
    ("json", f"[{F}]\n[{W}]", "", [CALLED_F, CALLED_W]),
    ("json", f"[\n{F}\nand so on", "and so on", [CALLED_F]),
])  # fmt: skip
def test_calls(format, text, told, calls):
    assert whole(read(format, text)) == (told, calls)
    assert whole(read(format, *text)) == (told, calls)


@pytest.mark.parametrize("format, text", [
    *((format, text) for format in FORMATS for text in (
        "", " ", "\n\n a", "Plain.\n", "{", "[", "{}", "[]", "[1, 2]", '{"name": "g"}', '{"name"}',
        '{"a": 1, "name": "f"}', '{"name": "f", "name": "f"}', '{"name": "f",}', '{"name": 3}',
        '{"name": "f", "arguments": 3}', '{"name": "f", "arguments": [1]}', '{"arguments": {}}',
        '{"arguments": {"a": }, "name": "f"}', '{"arguments": {x}, "name": "f"}',
        '{"name": "f", "arguments": "no"}', '{"name": "f", "arguments": "{\\"a\\": NaN}"}',
        '{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}', '{"name": "\\ud800"}',
        '{"' + "a" * 600 + "<tool_call>", '{"name": "f"', '{"name": "f", "arguments": nulL}',
        'if (a) { return "name"; }\n', "def f(x):\n    return {\n        'name': x}\n\n",
        '{"name": "f", "arguments": {"' [:20], '{"na', 'see {"name": "f", "arguments": {}}',
    )),
    ("hermes", F), ("hermes", "<tool_call>"), ("hermes", "<tool_call></tool_call>"),
    ("hermes", "<tool_call>\n<function=f>\n</function>\n</tool_call>"), ("hermes", "a <tool_cal"),
    ("hermes", '<tool_call>{"name": "<tool_call>"}</tool_call>'), ("json", f"<tool_call>{F}"),
    ("llama3_json", "<|python_tag|>print(1)"), ("json", "{\n[\n{\n" * 20),
])  # fmt: skip
def test_what_is_no_call_is_told_as_it_is(format, text):
    assert whole(read(format, text)) == (text, [])
    assert whole(read(format, *text)) == (text, [])


@pytest.mark.parametrize("format", ["llama3_json", "json"])
@pytest.mark.parametrize("before", [
    '{"x":\n', '{"x": [1,\n', 'Well.\n{"a": "\\"}", "x":\n  ', '{"x": {}, "y":\n\n'
])  # fmt: skip
def test_what_stands_within_other_json_is_no_call(format, before):
    text = f"{before}{F}}}"
    assert whole(read(format, text)) == whole(read(format, *text)) == (text, [])


@pytest.mark.parametrize("format", ["llama3_json", "json"])
@pytest.mark.parametrize("before", [
    '{"x": 1}', "{x:", '{"x": "a', "{ is a bracket", '{"x": {}}', "f({", '{"x": "}"} [',
])  # fmt: skip
def test_a_call_behind_what_has_ended_or_is_no_json(format, before):
    text = f"{before}\n{F}"
    assert whole(read(format, text)) == whole(read(format, *text)) == (before, [CALLED_F])


CALLED = {"hermes": f"<tool_call>{F}</tool_call>", "llama3_json": F, "json": F}


@pytest.mark.parametrize("format", CALLED)
@pytest.mark.parametrize("before, behind, thinks", [
    ("<think>\nPerhaps\n", "\n</think>", False), ("Well. <think>", "</think>", False),
    ("<think><think>", "<</think></think>", False), ("\n", "\nSo.</think>", True),
    ("a <thin<think>\n{\n", "</think> Well.\n<think>\n</think>", False),
])  # fmt: skip
def test_what_is_thought_is_no_call(format, before, behind, thinks):
    call = CALLED[format]
    thought = f"{before}{call}{behind}"
    for text, calls in ((thought, []), (f"{thought}\n\n{call}", [CALLED_F])):
        found = whole(read(format, text, thinks=thinks))
        assert found == whole(read(format, *text, thinks=thinks)) == (thought, calls)


@pytest.mark.parametrize("format", CALLED)
def test_a_thought_without_an_end_has_no_calls(format):
    for text, thinks in ((f"<think>\n{CALLED[format]}", False), (f"\n{CALLED[format]}", True)):
        assert whole(read(format, *text, thinks=thinks)) == (text, [])


@pytest.mark.parametrize("format", CALLED)
@pytest.mark.parametrize("before, behind, thinks", [
    ("The tag <think> opens one.\n", "", False), ("So</think> a <think>\n", " b", True),
    ("<think></think><think> <think>\n", "\n<think> b\n", False),
])  # fmt: skip
def test_a_tag_within_an_answer_hides_no_call_unless_its_thought_ends(
    format, before, behind, thinks
):
    call = CALLED[format]
    text, plain = f"{before}{call}{behind}\n{call}", f"{before.rstrip()}{behind.rstrip()}"
    assert whole(read(format, text, thinks=thinks)) == (plain, [CALLED_F] * 2)
    assert whole(read(format, *text, thinks=thinks)) == (plain, [CALLED_F] * 2)
    text += "\n</think>"
    for end, calls in (("", []), (f"\n{call}", [CALLED_F])):
        assert whole(read(format, text + end, thinks=thinks)) == (text, calls)
        assert whole(read(format, *text, *end, thinks=thinks)) == (text, calls)


def test_a_thought_within_an_answer_waits_from_its_first_call_on():
    parser, call = Parser(FORMATS["hermes"], NAMES), CALLED["hermes"]
    assert parser.push(f"{call} a <think> b") == [
        Part(CALLED_F[1], 0, "f"), Part("a <think> b")
    ]  # fmt: skip
    assert parser.push(f" c\n{call}") == [Part(" c")]
    assert parser.push(" d") == []
    assert parser.push("</think>") == [Part(f"\n{call} d</think>")]
    assert parser.push(call) == [Part(CALLED_F[1], 1, "f")]
    assert parser.push("<think> e" + call) == [Part("<think> e")]
    assert parser.finish() == [Part(CALLED_F[1], 2, "f")]


def test_a_call_is_told_while_it_is_written():
    parser = Parser(FORMATS["hermes"], NAMES)
    assert parser.push('Yes. <tool_call>{"name": "f", "arguments": ') == [Part("Yes.")]
    assert parser.push('{"a') == [Part('{"a', 0, "f")]
    assert parser.push('": 1') == [Part('": 1', 0)]
    assert parser.push('}}</tool_call>\n<tool_call>{"name": "f"}') == [
        Part("}", 0), Part("{}", 1, "f")
    ]  # fmt: skip
    assert parser.finish() == []


def test_text_waits_for_nothing_but_what_may_begin_a_call():
    parser = Parser(FORMATS["hermes"], NAMES)
    told = [parser.push(piece) for piece in ("a", " b", " <", "too", "l", "s>", "\n")]
    assert [[part.text for part in parts] for parts in told] == [
        ["a"], [" b"], [], [], [], [" <tools>"], []
    ]  # fmt: skip
    assert parser.finish() == [Part("\n")]


PIECES = st.sampled_from([
    F, W, "<tool_call>", "</tool_call>", "<|python_tag|>", "<think>", "</think>", "\n", " ", "{",
    "}", "[", "]", ",", ";",
    '{"name": "f", "arguments": ', '{"a": 1}', '"name": ', '"f"', '"arguments": ', "Text", "<", '"',
    '{"arguments": {"x": null}, ', '"name": "f"}', "\\", "null", ":", "1",
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(FORMATS)), st.lists(PIECES, max_size=12).map("".join), st.data())
def test_however_a_text_is_cut(format, text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    told, calls = found = whole(read(format, *pieces))
    assert found == whole(read(format, text)) == whole(read(format, *text))
    assert all(name in NAMES for name, _ in calls)
    for _, arguments in calls:
        assert arguments == "{}" or arguments in text or json.loads(arguments) is not None
    if not calls:
        assert told == text


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(CALLED)), st.text(st.characters(exclude_characters="[{"), max_size=20),
       st.dictionaries(st.text(max_size=5), st.recursive(
           st.none() | st.booleans() | st.integers() | st.text(max_size=8),
           lambda each: st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=3), each,
                                                                     max_size=3),
           max_leaves=6), max_size=3), st.booleans(), st.sampled_from([None, 2]))  # fmt: skip
def test_any_arguments_come_back(format, before, arguments, ascii, indent):
    one = FORMATS[format]
    body = {"name": "f", one.shape.key: arguments}
    call = f"\n{one.opening}{json.dumps(body, ensure_ascii=ascii, indent=indent)}{one.closing}"
    told, ((name, found),) = whole(read(format, before + call))
    assert name == "f" and json.loads(found) == arguments
    assert told == before.rstrip(" \t\r\n")


@pytest.mark.parametrize("unit", ["\n", '{"arguments":\n', "[", "<", '"', "a b"])
@pytest.mark.parametrize("start", ["", '<tool_call>\n{"arguments": {"'])
def test_a_long_answer_is_read_in_time_that_grows_with_it(unit, start):
    def seconds(size):
        text, since = start + unit * (size // len(unit)), time.process_time()
        told, calls = whole(read("hermes", *text))
        assert told == text and not calls
        return time.process_time() - since

    short, long = (sorted(seconds(size) for _ in range(3)) for size in (1000, 20_000))
    assert long[0] < 60 * short[1]  # 400 times, if each character cost all before it
