"""Thoughts on channels of at most so many tokens, and grammars behind them."""

import json

import pytest

from inference.request import SamplingParams
from inference.text import grammar
from inference.text.layouts import CHANNELS
from inference.text.tool_calls import constrain
from inference.text.tool_calls.formats import FORMATS
from tests import fakes
from tests.inference.test_grammars import JSON, MODEL, SETTINGS
from tests.inference.text import harmony

pytestmark = pytest.mark.quick_code

SPECIALS = harmony.tokenizer().specials_in(harmony.MARKS)
DRAFTS = {"num_drafts": 3, "proposer": "ngram"}
HOW = [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 2.0, "seed": 2, "top_k": 5}]
TO_FINAL = "<|end|>" + CHANNELS.exits[0]
ANSWER = grammar.behind(CHANNELS.answer_header, SPECIALS, JSON)
TOOL = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"],
        "additionalProperties": False}  # fmt: skip


def make(**settings):
    settings = SETTINGS | {"eos_ids": (harmony.RETURN, harmony.CALL)} | settings
    return fakes.engine(MODEL, shapes="one", tokenizer=harmony.tokenizer(), **settings)


def encoded(text: str) -> list[int]:
    return harmony.tokenizer().encode(text, add_special=False)


PROMPT = encoded("<|start|>user<|message|>Hi<|end|><|start|>assistant")
OPEN = [*PROMPT, *encoded(CHANNELS.opening)]


def tokens_of(prompt, budget, engine=None, **more) -> list[int]:
    more = {"max_new_tokens": 70, "ignore_eos": "grammar" not in more} | more
    params = SamplingParams(thinks=True, thinking_budget=budget, **more)
    return list((engine or make()).generate([prompt], params)[0].token_ids)


def answer_of(*asked, **more) -> str:
    ends = harmony.RETURN, harmony.CALL
    tokens = [token for token in tokens_of(*asked, **more) if token not in ends]
    return harmony.tokenizer().decode(tokens, skip_special=False)


@pytest.fixture(scope="module")
def free():
    """Answers without a budget, to each way to sample."""
    asked = [SamplingParams(max_new_tokens=40, ignore_eos=True, **how) for how in HOW]
    return [answer.token_ids for answer in make().generate([OPEN] * len(HOW), asked)]


@pytest.mark.parametrize("settings", [{}, {"overlap": False}, DRAFTS], ids=str)
@pytest.mark.parametrize("budget", [0, 17])
def test_a_thought_ends_with_its_budget(budget, settings, free):
    """The tokens before are those without one, and a text or a call follows."""
    engine, exits = make(**settings), [encoded("<|end|>" + text) for text in CHANNELS.exits]
    for how, before in zip(HOW, free, strict=True):
        found = tokens_of(OPEN, budget, engine, **how)
        assert found[:budget] == list(before[:budget])
        assert any(found[budget : budget + len(tokens)] == tokens for tokens in exits)
    found = tokens_of(OPEN, budget, engine, logit_bias={ord("c"): 100.0})
    assert found[budget : budget + len(exits[1])] == exits[1]


def test_the_budget_is_of_all_thoughts_together():
    """The model here thinks again and again."""
    bias = {SPECIALS["<|end|>"]: 30.0}
    text = answer_of(PROMPT, 4, grammar=ANSWER, max_new_tokens=200,
                     logit_bias=bias | {ord("a"): 29.0})  # fmt: skip
    assert text.count(CHANNELS.opening) > 1
    thoughts = text.split("<|channel|>final<|message|>")[0].split("<|message|>")[1:]
    assert sum(len(encoded(thought.split("<|end|>")[0])) for thought in thoughts) <= 4


@pytest.mark.parametrize("settings", [{}, DRAFTS], ids=str)
@pytest.mark.parametrize("budget", [0, 7])
def test_a_grammar_is_of_what_follows(budget, settings):
    engine = make(**settings)
    for how in HOW:
        text = answer_of(OPEN, budget, engine, grammar=ANSWER, max_new_tokens=100, **how)
        thought, header, behind = text.partition(TO_FINAL)
        assert header and json.loads(behind).keys() == {"a", "b", "c"}
        for mark in ("<|start|>", "<|channel|>", "<|message|>"):
            assert mark not in thought


@pytest.mark.parametrize("letter, begins", [
    ("a", CHANNELS.opening + "aaa<|end|><|start|>assistant<|channel|>"),
    ("f", CHANNELS.answer_header), ("c", "<|channel|>commentary to=functions.f "),
])  # fmt: skip
def test_a_thought_a_text_or_a_call_may_come_first(letter, begins):
    """All three begin with the same token."""
    calls = constrain.of_calls(
        FORMATS["openai"], {"f": TOOL}, True, JSON, SPECIALS, CHANNELS.answer_header
    )
    text = answer_of(PROMPT, 3, grammar=calls, max_new_tokens=200, logit_bias={ord(letter): 60.0})
    assert text.startswith(begins)
    last = json.loads(text.rpartition("<|message|>")[2])
    assert last.keys() == {"a", "b", "c"} or last == {"n": 7}


def test_an_answer_goes_on_where_it_was():
    """From any of its tokens on, as after a restart."""
    params = SamplingParams(thinks=True, thinking_budget=3, grammar=ANSWER, max_new_tokens=100)
    whole = make().generate([OPEN], params)[0].token_ids
    engine = make()
    for size in range(0, len(whole) - 1, 3):
        outputs = []
        engine.add_request(OPEN, params, whole[:size])
        while engine.scheduler.has_work:
            outputs += [token for output in engine.step() for token in output.token_ids]
        assert [*whole[:size], *outputs] == [*whole]
