"""Thoughts of at most so many tokens: which tokens come before, at and behind the bound."""

import copy
import dataclasses
import json

import pytest

from configs.errors import InputError
from inference.request import SamplingParams
from inference.text.tokenizer import Tokenizer
from tests import fakes
from tests.inference.server.fake_engine import END, tokenizer
from tests.inference.test_grammars import JSON, MODEL, PROMPTS, SETTINGS
from tests.inference.text.test_structural_tags import written

pytestmark = pytest.mark.quick_code

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}<think>...</think>"
OPENING, CLOSING = b"<think>", b"</think>"  # a token a byte
DRAFTS = {"num_drafts": 3, "proposer": "ngram"}


def thinking() -> Tokenizer:
    own = copy.copy(tokenizer())
    own.template = TEMPLATE
    return own


def make(**settings):
    settings = SETTINGS | settings
    return fakes.engine(MODEL, shapes="one", tokenizer=thinking(), eos_ids=(END,), **settings)


def asked(budget: int | None, **more) -> SamplingParams:
    more = {"max_new_tokens": 60, "ignore_eos": True, "thinks": True} | more
    return SamplingParams(thinking_budget=budget, **more)


OPEN = [[*prompt, *OPENING, 10] for prompt in PROMPTS]
HOW = [{}, {"temperature": 1.0, "seed": 1}, {}, {"temperature": 2.0, "seed": 2, "top_k": 5}, {}]
BUDGETS = (0, 1, 5, 17, 30)


@pytest.fixture(scope="module")
def alone():
    """Answers to each prompt, one at a time, without drafts: the text of the definition."""
    return [make().generate([prompt], asked(budget, **how))[0].token_ids for prompt, how, budget in
            zip(OPEN, HOW, BUDGETS, strict=True)]  # fmt: skip


def test_a_thought_ends_with_its_budget(alone):
    """The tokens before are those of an answer without one, and those behind those that follow."""
    for prompt, how, budget, found in zip(OPEN, HOW, BUDGETS, alone, strict=True):
        free = make().generate([prompt], asked(None, **how))[0].token_ids
        assert CLOSING not in bytes(token for token in free if token < 256)
        end = budget + len(CLOSING)
        assert found[:budget] == free[:budget]
        assert found[budget:end] == [*CLOSING]
        if not how:  # greedy
            rest = SamplingParams(max_new_tokens=60 - end, ignore_eos=True)
            assert found[end:] == make().generate([[*prompt, *found[:end]]], rest)[0].token_ids


@pytest.mark.parametrize("settings", [
    {}, {"overlap": False}, DRAFTS, DRAFTS | {"preemption": "recompute"},
    {"num_drafts": 4, "proposer": "ngram", "overlap": False},
], ids=str)  # fmt: skip
def test_it_holds_to_the_token_beside_others(settings, alone):
    free = SamplingParams(max_new_tokens=50, ignore_eos=True)
    beside = make().generate([PROMPTS[0]], free)[0].token_ids
    engine = make(**settings)
    outputs: dict[int, list[int]] = {}
    for prompt, how, budget in zip(OPEN, HOW, BUDGETS, strict=True):
        outputs[engine.add_request(prompt, asked(budget, **how))] = []
    outputs[engine.add_request(PROMPTS[0], free)] = []
    for n in range(300):
        if n % 5 == 3 and "preemption" in settings and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[n % len(engine.scheduler.running)])
        for output in engine.step():
            outputs[output.id] += output.token_ids
    assert list(outputs.values()) == [*alone, beside]
    if settings.get("num_drafts"):
        assert engine.scheduler.counters.num_drafts
    engine.scheduler.check_integrity()


def test_drafts_come_up_to_the_bound():
    """And behind it; a thought that repeats is drafted well."""
    engine = make(**DRAFTS)
    prompt = [*b"abcabcabcabcabcabc", *OPENING]
    answer = engine.generate([prompt], asked(40, logit_bias={ord("a"): 100.0}))[0]
    assert answer.token_ids == [*b"a" * 40, *CLOSING, *b"a" * 12]
    assert engine.scheduler.counters.num_accepted > 20


def test_a_thought_that_the_answer_opens(alone):
    """It may come, or not: then the budget bounds nothing."""
    bias = {ord(c): 100.0 for c in "x"}
    answer = make().generate([PROMPTS[0]], asked(2, logit_bias=bias))[0]
    assert answer.token_ids == [*b"x" * 60]
    known = [*b"\n<think>"]
    for count in range(len(known) + 1):
        engine, outputs = make(), []
        engine.add_request(PROMPTS[0], asked(2, logit_bias=bias), [*known, *b"xx"][: count + 2])
        while engine.scheduler.has_work:
            outputs += [token for output in engine.step() for token in output.token_ids]
        text = bytes([*known, *b"xx"][: count + 2] + outputs)
        is_open = text.startswith(b"\n<think>")
        assert (CLOSING in text) is is_open
        if is_open:
            assert text.startswith(b"\n<think>xx</think>x")


@pytest.mark.parametrize("settings", [{}, DRAFTS], ids=str)
@pytest.mark.parametrize("budget", [0, 7, None])
def test_a_grammar_is_of_the_text_behind_it(budget, settings):
    """And no answer ends before that begins."""
    for how in HOW[:4]:
        params = asked(budget, grammar=JSON, ignore_eos=False, max_new_tokens=150, **how)
        params = dataclasses.replace(params, logit_bias={END: 20.0})
        answer = make(**settings).generate([OPEN[1]], params)[0]
        if budget is None:
            assert END not in answer.token_ids and len(answer.token_ids) == 150
            continue
        closing = slice(budget, budget + len(CLOSING))
        assert answer.token_ids[closing] == [*CLOSING] and answer.finish_reason == "stop"
        rest = bytes(token for token in answer.token_ids[closing.stop :] if token < 256)
        assert json.loads(rest).keys() == {"a", "b", "c"}


def test_a_structural_tag_is_of_the_text_behind_it():
    """A mark within a thought is text. Behind it a trigger begins a tag, up to a stop string."""
    truth = {"type": "json_schema", "json_schema": {"type": "boolean"}}
    tag = {"type": "tag", "begin": "<f=b>", "content": truth, "end": "</f>"}
    calls = {"type": "triggered_tags", "triggers": ["<"], "tags": [tag]}
    params = asked(9, grammar=written(calls), ignore_eos=False, max_new_tokens=99, stop=["</f>"])
    params = dataclasses.replace(params, logit_bias={ord("<"): 30.0})
    answer = make(**DRAFTS).generate([[*PROMPTS[1], *OPENING]], params)[0]
    assert answer.text in [f"{'<' * 9}</think><f=b>{value}" for value in ("true", "false")]
    assert answer.finish_reason == "stop"


def test_a_grammar_begins_at_once_where_no_thought_comes():
    """After a thought that the prompt has closed, and where the model opens none."""
    for prompt in ([*PROMPTS[0], *b"<think>\n\n</think>\n\n"], PROMPTS[0]):
        params = asked(5, grammar=JSON, ignore_eos=False, max_new_tokens=150)
        answer = make().generate([prompt], dataclasses.replace(params, logit_bias={60: -100.0}))[0]
        assert json.loads(answer.text).keys() == {"a", "b", "c"}
    biased = dataclasses.replace(params, logit_bias={60: 100.0})
    answer = make().generate([PROMPTS[0]], biased)[0]
    assert answer.text.startswith("<think>")
    assert json.loads(answer.text.partition("</think>")[2])


def test_a_grammar_that_may_begin_as_a_thought_does():
    """Of several tokens, of which the first may be either's: no thought comes."""
    biased = {ord(c): 100.0 for c in "<"} | {ord(c): 50.0 for c in "h"}
    params = asked(None, grammar='start: "<html>"', ignore_eos=False, logit_bias=biased)
    assert make().generate([PROMPTS[0]], params)[0].text == "<html>"


def test_no_token_that_stops_does_so_before_what_follows():
    params = asked(9, grammar=JSON, ignore_eos=False, max_new_tokens=150, stop_token_ids=(97,))
    params = dataclasses.replace(params, logit_bias={97: 100.0})
    answer = make().generate([OPEN[1]], params)[0]
    assert 97 not in answer.token_ids[: 9 + len(CLOSING)]


@pytest.mark.parametrize("make_engine, params, cause", [
    (lambda: make(grammars=False), asked(3), "needs an engine built with engine.requests.grammars"),
    (make, asked(257), "thinking_budget is at most the context of 256, not 257"),
    (make, asked(3, allowed_token_ids=(97, 98)), "closes a thought with the tokens .*: allow"),
    (make, asked(3, banned_token_ids=(60,)), "closes a thought with the tokens .*: allow these"),
    (make, asked(3, stop_token_ids=(60,), min_tokens=9), "closes a thought with the tokens"),
])  # fmt: skip
def test_what_is_refused(make_engine, params, cause):
    with pytest.raises(InputError, match=cause):
        make_engine().generate([PROMPTS[0]], params)


def test_what_makes_no_sense():
    with pytest.raises(InputError, match="thinking_budget goes with thinks=True"):
        SamplingParams(thinking_budget=3)
    engine = fakes.engine(MODEL, shapes="one", tokenizer=tokenizer(), eos_ids=(END,), **SETTINGS)
    with pytest.raises(InputError, match="needs a chat template that marks thoughts"):
        engine.generate([PROMPTS[0]], asked(3))
