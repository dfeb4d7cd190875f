"""Calls in the formats of families: whole, cut at every character, and against a plain reading."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.text.tool_calls.formats import FORMATS
from inference.text.tool_calls.parser import Parser
from tests.inference.text.tool_calls import native
from tests.inference.text.tool_calls.test_parser import whole

ZURICH = ("weather", {"city": "Zürich 🙂", "days": 2})
NOW = ("now", {})
QUOTES = ("weather", {"city": 'a "b" \'c\' \\ \\n {"d": "e"}', "is_long": True})
LINES = ("web-search", {"query": "one\n  two\n\nthree\t"})
NESTED = ("web-search", {"filter": {"a": [1, {"b": '}"]', "c": None}], "ü": -1.5e3}, "tags": ["x"]})
LIKE_JSON = ("weather", {"city": '{"a": [1, null]}'})
CONVERSATIONS = {
    "no call": ("Plain text.",), "one call": (ZURICH,), "no arguments": (NOW,),
    "text before": ("Let me see.\n\n", ZURICH), "text after": (ZURICH, "\n\nDone."),
    "text around": ("First this:\n", NOW, "\nand that."), "several": ((ZURICH, NOW, QUOTES),),
    "several blocks": (ZURICH, "\n", NOW, "\n", QUOTES), "text between": (ZURICH, " So. ", NOW),
    "the same twice": ((NOW, NOW),), "quotes": (QUOTES,), "lines": (LINES,),
    "nested": (NESTED,), "text like JSON": (LIKE_JSON,),
    "text like a number": (("weather", {"city": "123"}),),
    "text like a word of JSON": (("weather", {"city": "null"}),),
    "an empty text": (("weather", {"city": ""}),), "blanks": (("weather", {"city": "  a  "}),),
    "tags in a text": (("weather", {"city": "<b>x</b> <think> a < b > c </"}),),
    "a text or null": (("web-search", {"after": None, "query": "q"}),),
    "a text, not null": (("web-search", {"after": "5 o'clock"}),),
    "any value": (("web-search", {"any": {"a": [True]}}), NOW),
    "an unknown parameter": (("weather", {"city": "a", "more": [1, "b"]}),),
    "unicode": (("weather", {"city": "東京 é \u2028 \U0001f600"}),),
    "a long text": (("weather", {"city": "ab<c\\\"" * 200}),),
    "unknown": (("nope", {"a": 1}),), "unknown, then known": (("nope", {"a": 1}), "\n", NOW),
    "known, then unknown": (ZURICH, "\n", ("nope", {"a": 1})),
    "blanks around": ("\n\n ", NOW, "\n \n"), "thought": ("<think>", ZURICH, "</think>Well."),
    "thought, then called": ("<think>\nOr ", NOW, "?\n</think>\n\n", ZURICH),
    "a thought without an end": ("<think>\n", ZURICH),
    "code": ("if (a < b) { return [1]; }\n", NOW, "\n```\nx\n```"),
}  # fmt: skip


def read(format: str, *pieces: str, schemas=native.SCHEMAS):
    parser = Parser(FORMATS[format], schemas)
    parts = [part for piece in pieces for part in parser.push(piece)] + parser.finish()
    assert all(part.text or part.name is not None for part in parts)
    text, calls = whole(parts)
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


def written(format: str, conversation) -> str:
    return "".join(
        piece if isinstance(piece, str)
        else native.FORMATS[format].write(*(piece if isinstance(piece[0], tuple) else [piece]))
        for piece in conversation
    )  # fmt: skip


@pytest.mark.parametrize("format", native.FORMATS)
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation(format, name):
    conversation = CONVERSATIONS[name]
    text = written(format, conversation)
    expected = native.read(format, text)
    assert read(format, text) == read(format, *text) == expected
    calls = [piece for piece in conversation if not isinstance(piece, str)]
    is_in_lines = format != "pythonic" or name != "text between"
    if "thought" not in name and "unknown" not in name and is_in_lines:
        assert expected[1] == [
            call for one in calls for call in (one if isinstance(one[0], tuple) else [one])
        ]  # fmt: skip


@pytest.mark.parametrize("format", native.FORMATS)
def test_a_call_that_is_cut_off_leaves_no_marks(format):
    """Once it has begun; before, it is text."""
    text = written(format, [ZURICH])
    has_begun = False
    for size in range(len(text)):
        parser = Parser(FORMATS[format], native.SCHEMAS)
        content, calls = whole(parser.push(text[:size]) + parser.finish())
        has_begun |= bool(calls)
        if not has_begun:
            assert content == text[:size]
        elif not calls[0][1].endswith("}"):
            assert not content
            assert '{"city": "Zürich 🙂", "days": 2}'.startswith(calls[0][1])
    assert has_begun


@pytest.mark.parametrize("format", native.FORMATS)
@pytest.mark.parametrize("before", ["", "a "])
def test_what_is_malformed_is_text(format, before):
    opening = FORMATS[format].opening
    text = written(format, [NOW])
    for wrong in (
        opening, f"{opening} and {opening}", opening[:-1], text.replace("now", ""),
        text.replace("now", "no w"), text.replace("now", "x" * 600), f"{opening}{opening}\n",
    ):  # fmt: skip
        assert read(format, before + wrong) == read(format, *before, *wrong) == (before + wrong, [])
        _, calls = read(format, *before, *wrong, "\n", *text)
        assert calls == [NOW]


@pytest.mark.parametrize("format", ["qwen3_coder", "glm45", "minimax_m2", "seed_oss"])
def test_a_text_is_streamed_as_it_comes(format):
    parser = Parser(FORMATS[format], native.SCHEMAS)
    before, behind = written(format, [("weather", {"city": "@"})]).split("@")
    (part,) = parser.push(before + 'a "quoted" text')
    assert (part.name, part.text) == ("weather", '{"city": "a \\"quoted\\" text')
    (part,) = parser.push("\nof two lines <")
    assert part.text == "\\nof two lines "
    (part,) = parser.push("b" + behind)
    assert part.text == '<b"}' and not parser.finish()


@pytest.mark.parametrize("format, text", [
    ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}"),
    ("kimi_k2", "<|tool_calls_section_begin|>\n<|tool_call_begin|>now:12\n"
                "<|tool_call_argument_begin|> {}<|tool_call_end|>\n<|tool_calls_section_end|>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now"
                "<|tool_call_argument_begin|>{}"),
    ("cohere", '<|START_ACTION|>[\n {"tool_call_id": "0", "tool_name": "now", "parameters": {}}\n]'
               "<|END_ACTION|>"),
    ("granite", '<tool_call>[{"name": "now", "arguments": {}}]'),
    ("qwen3_coder", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    ("qwen3_coder", "<tool_call><function=now></function></tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=now>\n</tool_call>"),
    ("glm45", "<tool_call>now</tool_call>"), ("pythonic", "[ now( ) ]"),
    ("lfm2", '<|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>'),
    ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
                    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
])  # fmt: skip
def test_other_spellings(format, text):
    assert read(format, text) == read(format, *text) == ("", [NOW])


@pytest.mark.parametrize("value, expected", [
    ("'a\\n\\x41\\u00e9\\'\\q'", "a\nA\u00e9'\\q"), ('"a\nb"', "a\nb"), ("(1, -2.5, )", [1, -2.5]),
    ("{'a': [True, None, {}], \"b\": ()}", {"a": [True, None, {}], "b": []}),
    ("__import__('os')", "__import__('os')"), ("1 + 1", "1 + 1"), ("01", "01"),
    ("'\\ud83d\\ude00'", "\U0001f600"), ("'\\Uffffffff'", "\\Uffffffff"), ("null", None),
    ("[" * 99 + "]" * 99, "[" * 99 + "]" * 99),
])  # fmt: skip
def test_literals(value, expected):
    text = f"[weather(city={value}, days=1)]"
    calls = [("weather", {"city": expected, "days": 1})]
    assert read("pythonic", text) == read("pythonic", *text) == ("", calls)


@pytest.mark.parametrize("text, content, arguments", [
    ("[weather('a')]", "[weather('a')]", None), ("[weather(city)]", "[weather(city)]", None),
    ("[weather(city='a' 'b')]", "'b')]", {"city": "a"}), ("[weather(city='a', 5)]", " 5)]", None),
    ("[1, 2]", "[1, 2]", None), ("[now()", "", {}), ("[now() or]", "or]", {}),
    ("[weather(city=[1, days=1)]", "]", {"city": "[1, days=1)"}),
])  # fmt: skip
def test_what_is_no_call_of_literals(text, content, arguments):
    if arguments is None and not text.startswith("[weather(city='"):
        assert read("pythonic", text) == read("pythonic", *text) == (content, [])
        return
    found, ((_, given),) = read("pythonic", text)
    assert (found, [(_, given)]) == read("pythonic", *text)
    assert found.strip() == content.strip() and given == (
        {"city": "a"} if arguments is None else arguments
    )


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(native.FORMATS)), st.data())
def test_however_a_text_is_made_and_cut(format, data):
    """Of slices of calls, in any order."""
    text = written(format, [ZURICH, NESTED, "</think>\n", ("nope", {}), NOW, "<think>"])
    places = st.tuples(st.integers(0, len(text)), st.integers(0, 60))
    slices = data.draw(st.lists(places, max_size=6))
    answer = "".join(text[start : start + size] for start, size in slices)
    parsers = [Parser(FORMATS[format], native.SCHEMAS) for _ in range(2)]
    whole_parts = parsers[0].push(answer) + parsers[0].finish()
    cut_parts = [part for c in answer for part in parsers[1].push(c)] + parsers[1].finish()
    content, calls = whole(whole_parts)
    assert whole(cut_parts) == (content, calls)
    assert all(name in native.SCHEMAS for name, _ in calls)
    if not calls:
        assert content == answer
