"""Answers on channels: thoughts, texts and calls, in text and in tokens, and what forces them."""

import json
import random

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.text import channel_rules, grammar
from inference.text.end_tokens import EndTokens
from inference.text.grammar import Grammars
from inference.text.layouts import CHANNELS
from inference.text.thoughts import Stage
from inference.text.tool_calls import constrain
from inference.text.tool_calls.formats import FORMATS
from inference.text.tool_calls.parser import Parser
from tests.inference.text import harmony
from tests.inference.text.test_grammar import permitted
from tests.inference.text.tool_calls import native
from tests.inference.text.tool_calls.test_parser import whole

NEXT = "<|end|><|start|>assistant"
THINK = "<|channel|>analysis<|message|>Hm, 2 < 3."
PLAN = "<|channel|>commentary<|message|>Let me see."
FINAL = "<|channel|>final<|message|>Four."
ARGUMENTS = '{"city": "ü 🙂"}'
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}"
NOW = " to=functions.now<|channel|>commentary json<|message|>{}"
CONVERSATIONS = {
    "thought and answer": THINK + NEXT + FINAL, "answer alone": FINAL, "thought alone": THINK,
    "no header": "Plain.", "no channel": "<|message|>Hi", "nothing": "", "blanks": " \n ",
    "role again": "assistant" + FINAL, "blanks around": f"\n{THINK} \n<|end|>\n<|start|>assistant"
    "<|channel|>final<|message|>\n\n Four.", "returned": FINAL + "<|return|>",
    "two thoughts": THINK + NEXT + THINK + NEXT + FINAL,
    "plan": THINK + NEXT + PLAN + NEXT + THINK + NEXT + FINAL,
    "call": THINK + NEXT + CALL, "call and its end": THINK + NEXT + CALL + "<|call|>",
    "recipient in the role": THINK + NEXT + NOW, "call at once": NOW,
    "plan, call": PLAN + NEXT + CALL,
    "several calls": CALL + "<|call|><|start|>assistant" + NOW + "<|call|>",
    "call, then answer": CALL + NEXT + FINAL,
    "call, thought, call": CALL + NEXT + THINK + NEXT + NOW,
    "call in a thought": "<|channel|>analysis to=functions.now code<|message|>{}",
    "no type": "<|channel|>commentary to=functions.now<|message|>{}",
    "type without blank": "<|channel|>commentary to=functions.now<|constrain|>json<|message|>{}",
    "bare name": "<|channel|>commentary to=now <|constrain|>json<|message|>{}",
    "no arguments": "<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
    "tool of its own": "<|channel|>analysis to=browser.search code<|message|>{}" + NEXT + FINAL,
    "text of a type": "<|channel|>final <|constrain|>json<|message|>{\"a\": 1}",
    "quotes": CALL.replace("ü", "a \\\"b\\\" }] \\\\ <b>"),
    "for the user": "<|channel|>commentary to=user<|message|>Hi",
    "behind arguments": CALL + " Done.", "two texts": FINAL + NEXT + FINAL,
    "no start": THINK + "<|end|>" + FINAL, "no end": THINK + "<|start|>assistant" + FINAL,
    "unicode": "<|channel|>final<|message|>東京 \u2028 \U0001f600",
    "like a mark": FINAL + " <|x|> <|en",
    "JSON": "<|channel|>final<|message|>{\"name\": \"now\", \"arguments\": {}}",
}  # fmt: skip


def divided(*pieces: str, stage=Stage.BEFORE, divides=True):
    """Thoughts, text and calls of an answer in pieces."""
    reader, thinks = CHANNELS.reader(stage, divides), stage is Stage.WITHIN and not divides
    parser = Parser(FORMATS["openai"], native.SCHEMAS, thinks, CHANNELS)
    thought, parts = "", []
    for segment in [s for piece in pieces for s in reader.push(piece)] + reader.finish():
        thought += segment.text * segment.is_thought
        parts += [] if segment.is_thought else parser.push(segment.text)
    text, calls = whole(parts + parser.finish())
    return thought, text, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_conversation(name):
    answer = CONVERSATIONS[name]
    due = harmony.read(answer)
    thought, text, calls = divided(answer)
    assert (thought, text.strip(), calls) == due
    assert divided(*answer) == (thought, text, calls)
    for at in range(len(answer)):
        assert divided(answer[:at], answer[at:]) == (thought, text, calls)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_an_answer_that_is_not_divided_has_its_marks(name):
    answer = CONVERSATIONS[name]
    _, text, calls = divided(answer, divides=False)
    assert calls == harmony.read(answer)[2]
    if not calls:
        assert text == answer


def test_a_call_ends_the_thought_of_an_answer_that_is_not_divided():
    answer = "Hm" + NEXT + NOW
    assert divided(*answer, stage=Stage.WITHIN, divides=False)[1:] == ("Hm<|end|>", [("now", {})])


def test_an_answer_that_is_cut_off_has_no_marks():
    """Behind any token."""
    tokens = tokens_of(THINK + NEXT + PLAN + NEXT + CALL)
    header = CALL.partition("{")[0]
    for size in range(len(tokens)):
        reader = CHANNELS.reader(Stage.BEFORE)
        begun = harmony.tokenizer().decode(tokens[:size], skip_special=False)
        parts = reader.push(begun) + reader.finish()
        thought = "".join(part.text for part in parts if part.is_thought)
        text = "".join(part.text for part in parts if not part.is_thought)
        text, _, arguments = text.partition(header)
        assert "Hm, 2 < 3.".startswith(thought) and "Let me see.".startswith(text)
        assert ARGUMENTS.startswith(arguments.rstrip("\ufffd")) or begun.endswith(header)


@pytest.mark.parametrize("text", [
    "a <|end|> b", "<|end|>", "<|start|>", "<|start|>assistant is", "<|end|><|end|> c", "to=x",
    "<|channel|>final", "<|start|>assistant<|channel|>\n<|message|>", "<|start|>a b<|message|>",
])  # fmt: skip
def test_marks_without_a_header_are_text(text):
    for answer in (FINAL + text + ".", THINK + text + "." + NEXT + FINAL):
        found = divided(answer)
        assert found == divided(*answer) and text in found[0] + found[1]


@pytest.mark.parametrize("header, raw", [
    ("<|channel|>commentary to=functions.nope <|constrain|>json<|message|>", "{}"),
    ("<|channel|>commentary to=functions.now <|constrain|>json<|message|>", "no JSON"),
    ("<|channel|>commentary to=functions.now <|constrain|>json<|message|>", "[1]"),
])  # fmt: skip
def test_a_call_that_is_none_is_text(header, raw):
    assert divided(header + raw) == divided(*header, *raw) == ("", header + raw, [])


def test_long_answers_take_linear_time():
    """Otherwise this takes more than a test may: one blank or one role by another."""
    blanks, roles = " " * 500_000, ("<|start|>a" + "to=" * 400) * 80
    text = f"a{blanks}b{roles}"
    assert divided(*text, stage=Stage.BEHIND) == ("", text, [])


@pytest.mark.parametrize("stage, answer, due", [
    (Stage.WITHIN, "a" + NEXT + FINAL, ("a", "Four.", [])), (Stage.BEHIND, "42.", ("", "42.", [])),
    (Stage.BEHIND, "42 " + NEXT + NOW, ("", "42", [("now", {})])),
])  # fmt: skip
def test_how_an_answer_begins(stage, answer, due):
    assert divided(answer, stage=stage) == divided(*answer, stage=stage) == due


@pytest.mark.parametrize("end, stage", [
    ("<|start|>assistant", Stage.BEFORE), (CHANNELS.opening, Stage.WITHIN), ("Hi", Stage.BEFORE),
    (CHANNELS.answer_header, Stage.BEHIND),
])  # fmt: skip
def test_where_a_prompt_ends(end, stage):
    own = harmony.tokenizer()
    assert CHANNELS.stage_after(own, own.encode("<|start|>user<|message|>Hi" + end)) is stage


PIECES = st.sampled_from([
    *harmony.MARKS, "assistant", "analysis", "final", "commentary", " to=functions.now", " json",
    "{}", THINK, NEXT, FINAL, CALL, NOW, " ", "\n", "<", "|", "a", "ü", "to=",
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=12), st.booleans())
def test_however_an_answer_is_made_and_cut(pieces, divides):
    found = divided("".join(pieces), divides=divides)
    assert found == divided(*"".join(pieces), divides=divides) == divided(*pieces, divides=divides)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("thought", ["", "a", "abc <|en", "ü" * 9, "a" * 31])
def test_tokens_of_thoughts_are_counted(thought, size):
    """Of so many bytes each; marks are tokens of their own, but for the last answer."""
    cut = [thought.encode()[at : at + size] for at in range(0, len(thought.encode()), size)]
    before = [b"<|channel|>", b"analysis", b"<|message|>"]
    after = [b"<|end|>", b"<|start|>", b"assistant"]
    progress = CHANNELS.progress(Stage.BEFORE)
    for times in (1, 2):
        for token in (*before, *cut):
            assert progress.stage is Stage.BEFORE or progress.num_tokens >= (times - 1) * len(cut)
            progress.accept(token)
        assert progress.stage is Stage.WITHIN and progress.num_tokens == times * len(cut)
        for token, due in zip(after, ("<|start|>assistant", "assistant", ""), strict=True):
            progress.accept(token)
            assert progress.stage is Stage.BEFORE and progress.due == due
        assert progress.num_tokens == times * len(cut)
    for token in (b"<|channel|>", b"final", b"<|message|>", b"Four", b"<|end|>"):
        progress.accept(token)
    assert progress.stage is Stage.BEFORE and progress.num_tokens == 2 * len(cut)
    progress.reset()
    for byte in f"{CHANNELS.opening}{thought}{NEXT}{FINAL}".encode():
        progress.accept(bytes([byte]))
    assert progress.num_tokens == len(thought.encode())


def test_a_closing_behind_which_no_header_comes_ends_no_thought():
    progress = CHANNELS.progress(Stage.WITHIN)
    for n, token in enumerate((b"a", b"<|end|>", b"b", b"<|end|>", b"<|end|>"), 1):
        progress.accept(token)
        assert (progress.stage is Stage.WITHIN) == (n != 2)
    assert progress.num_tokens == 5


SCHEMAS = {
    "f": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}},
          "required": ["a"], "additionalProperties": False},
    "g-1": {"type": "object", "properties": {"s": {"enum": ["<|call|>", "\"}"]}, "t": {}},
            "required": ["s"]},
}  # fmt: skip
SPECIALS = harmony.tokenizer().specials_in(harmony.MARKS)
FORMAT = FORMATS["openai"]


@pytest.fixture(scope="module")
def grammars():
    return Grammars(harmony.tokenizer(), [harmony.RETURN, harmony.CALL])


def tokens_of(text: str) -> list[int]:
    return harmony.tokenizer().encode(text, add_special=False)


def permits(state, text: str) -> bool:
    """Whether a grammar permits a whole text."""
    for token in tokens_of(text):
        if token not in permitted(state):
            return False
        state.accept(token)
    return state.is_complete or {harmony.RETURN, harmony.CALL} <= {*permitted(state)}


@pytest.mark.parametrize("is_parallel", [False, True])
def test_any_forced_answer_is_one_call(grammars, is_parallel):
    dice = random.Random(1)
    source = constrain.of_calls(FORMAT, SCHEMAS, is_parallel, None, SPECIALS, "header")
    for _ in range(25):
        state, tokens = grammars.start(source), []
        while not state.is_complete and not {harmony.RETURN, *tokens[-1:]} <= {*permitted(state)}:
            choices = permitted(state)
            ends = [token for token in b'"]}' if token in choices]
            if harmony.CALL in choices:
                break
            tokens.append(dice.choice(ends if ends and dice.random() < 0.5 else choices))
            state.accept(tokens[-1])
        answer = harmony.tokenizer().decode(tokens, skip_special=False)
        parser, reader = Parser(FORMAT, SCHEMAS), CHANNELS.reader(Stage.BEFORE)
        parts = [part for segment in reader.push(answer) for part in parser.push(segment.text)]
        text, ((name, arguments),) = whole(parts + parser.finish())
        assert not text
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])


def test_calls_or_an_answer_of_a_schema(grammars):
    other = grammar.of_json_schema({"type": "object", "properties": {"q": {"type": "integer"}}})
    header = CHANNELS.answer_header
    source = constrain.of_calls(FORMAT, SCHEMAS, True, other, SPECIALS, header)
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 7}'
    for answer, holds in (
        (f'{header}{{"q": 7}}', True), (call, True), ('{"q": 7}', False),
        (call.replace("7", "700"), False), (call.replace(".f", ".h"), False), (f"{header}7", False),
        (f"{CHANNELS.opening}a", False),
    ):  # fmt: skip
        assert permits(grammars.start(source), answer) is holds


def test_calls_of_another_format_are_in_the_answer(grammars):
    source = constrain.of_calls(FORMATS["hermes"], SCHEMAS, False, None, SPECIALS,
                                CHANNELS.answer_header)  # fmt: skip
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 7}}\n</tool_call>'
    assert permits(grammars.start(source), CHANNELS.answer_header + call)
    assert not permits(grammars.start(source), call)


def test_words_that_no_message_has(grammars):
    source = channel_rules.without(CHANNELS, SPECIALS, ["bad"], has_thoughts=True)
    for answer, holds in (
        (THINK + NEXT + FINAL, True), (FINAL, True), (THINK + NEXT + CALL, True), (NOW, True),
        (THINK + "bad" + NEXT + FINAL, False), (FINAL + " bad", False), ("Plain", False),
    ):  # fmt: skip
        assert permits(grammars.start(source), answer) is holds, answer
    behind = channel_rules.without(CHANNELS, SPECIALS, ["bad"], has_thoughts=False)
    assert permits(grammars.start(behind), FINAL) and not permits(grammars.start(behind), THINK)


def test_a_call_ends_an_answer_even_where_a_checkpoint_lists_no_such_token():
    assert {*EndTokens(harmony.tokenizer(), [harmony.RETURN])} == {harmony.RETURN, harmony.CALL}
