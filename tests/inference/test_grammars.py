"""Requests whose text has to follow a grammar, beside others that it does not touch."""

import json
import re

import pytest

from configs.errors import InputError
from configs.mesh import Mesh
from inference.request import SamplingParams
from inference.text import grammar
from tests import fakes
from tests.inference.server.fake_engine import END, VOCAB, tokenizer

pytestmark = pytest.mark.quick_code

MODEL = fakes.llama(vocab_size=VOCAB, max_context=256)
SETTINGS = {
    "max_seqs": 8, "decode_rows": (8,), "page_tokens": 8, "chunk_tokens": 16, "grammars": True,
    "prefill_chunks": (3,), "penalties": True,
}  # fmt: skip
PROMPTS = fakes.prompts((20, 3, 50, 9, 30), 256)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "ü"]},
                   "c": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["a", "b", "c"], "additionalProperties": False,
}  # fmt: skip
JSON = grammar.of_json_schema(SCHEMA)


def make(**settings):
    settings = SETTINGS | settings
    return fakes.engine(MODEL, shapes="one", tokenizer=tokenizer(), eos_ids=(END,), **settings)


def asked(**more) -> SamplingParams:
    return SamplingParams(max_new_tokens=120, grammar=JSON, **more)


def check(answer) -> None:
    found = json.loads(answer.text)
    assert found.keys() == {"a", "b", "c"} and answer.finish_reason == "stop"
    assert isinstance(found["a"], bool) and found["b"] in ("x", "ü") and 0 <= found["c"] < 1000


HOW = [
    {}, {"temperature": 1.0, "seed": 1}, {"temperature": 2.0, "seed": 2, "top_k": 5},
    {"temperature": 1.0, "seed": 3, "presence_penalty": 1.0}, {"logit_bias": {ord("}"): 50.0}},
]  # fmt: skip


@pytest.fixture(scope="module")
def alone():
    return [make().generate([prompt], asked(**how))[0] for prompt, how in
            zip(PROMPTS, HOW, strict=True)]  # fmt: skip


@pytest.mark.parametrize("overlap", [True, False])
def test_texts_follow_their_grammars_beside_others(alone, overlap):
    free = [fakes.greedy(40), SamplingParams(max_new_tokens=40, temperature=1.0, seed=9)]
    (expected, drawn) = make(grammars=False).generate(PROMPTS[:2], free)
    engine = make(overlap=overlap)
    params = [asked(**how) for how in HOW] + free
    *found, beside, drawn_beside = engine.generate([*PROMPTS, *PROMPTS[:2]], params)
    for answer, own in zip(found, alone, strict=True):
        check(answer)
        assert answer.token_ids == own.token_ids
    assert beside.token_ids == expected.token_ids and drawn_beside.token_ids == drawn.token_ids
    assert not engine._requests
    engine.scheduler.check_integrity()


def test_the_device_works_while_the_host_reads_texts(alone):
    """Each step is launched before the outputs of the one before it are made, and no row is left
    out because its mask is not known yet.
    """
    engine, free = make(), SamplingParams(max_new_tokens=200, ignore_eos=True)
    for prompt, how in zip(PROMPTS, HOW, strict=True):
        engine.add_request(prompt, asked(**how))
    engine.add_request(PROMPTS[0], free)
    nums = [len(engine.step()) for _ in range(12)]
    assert nums[-5:] == [6] * 5 and len(engine._steps) == 1
    engine.add_request(PROMPTS[1], free)
    before = engine.scheduler.counters.num_steps
    nums = [len(engine.step()) for _ in range(20)]
    assert sum(nums) >= 20 * 2 and engine.scheduler.counters.num_steps - before == 20
    fakes.drain(engine)
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("mesh", [Mesh(data=2, model=2)])
def test_texts_follow_their_grammars_on_several_chips(mesh):
    for answer in make(mesh=mesh).generate(PROMPTS, [asked(**how) for how in HOW]):
        check(answer)


def test_whatever_happens_to_the_engine(alone):
    engine = make(preemption="recompute")
    outputs: dict[int, list] = {
        engine.add_request(prompt, asked(**how)): []
        for prompt, how in zip(PROMPTS, HOW, strict=True)
    }
    for n in range(400):
        if n % 7 == 3 and engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[-1])
        if n % 40 == 30:
            engine.rebuild()
        for output in engine.step():
            outputs[output.id] += output.token_ids
        engine.scheduler.check_integrity()
    assert list(outputs.values()) == [answer.token_ids for answer in alone]


def test_an_answer_goes_on_within_its_grammar(alone):
    for prompt, how, whole in zip(PROMPTS, HOW, alone, strict=True):
        engine, outputs, known = make(), [], len(whole.token_ids) // 2
        engine.add_request(prompt, asked(**how), whole.token_ids[:known])
        while engine.scheduler.has_work:
            outputs += [token for output in engine.step() for token in output.token_ids]
        assert outputs == whole.token_ids[known:]


@pytest.mark.parametrize("settings", [
    {}, {"num_drafts": 3, "proposer": "ngram", "acceptance": "rejection"},
])  # fmt: skip
def test_several_answers_each_follow_it(settings):
    params = asked(temperature=1.5, n=3, seed=None if "acceptance" in settings else 5)
    beside = SamplingParams(max_new_tokens=60, ignore_eos=True)
    first, _ = make(**settings).generate(PROMPTS[:2], [params, beside])
    texts = [answer.text for answer in (first, *first.others)]
    for answer in (first, *first.others):
        check(answer)
    assert len(set(texts)) > 1


def test_forks_follow_their_own():
    engine = make()
    letters = tuple(range(ord("a"), ord("z") + 1))
    id = engine.add_request(
        PROMPTS[0], SamplingParams(max_new_tokens=30, allowed_token_ids=letters)
    )
    whole = engine._requests[id].group
    for _ in range(4):
        engine.step()
    with pytest.raises(InputError, match="permits nothing after"):
        engine.fork(id, asked())
    bound = SamplingParams(max_new_tokens=60, grammar=grammar.of_regex("[a-z]{1,20}[0-9]{3}!"))
    fork = engine._requests[engine.fork(id, bound)].group
    fakes.drain(engine)
    assert re.fullmatch("[a-z]{30}", whole.completion().text)
    text = fork.completion().text
    assert re.fullmatch("[a-z]{1,20}[0-9]{3}!", text) and whole.completion().text[:2] == text[:2]


def test_a_text_that_is_cut_off_has_its_reason():
    (answer,) = make().generate(PROMPTS[:1], SamplingParams(max_new_tokens=3, grammar=JSON))
    assert answer.finish_reason == "length" and len(answer.token_ids) == 3


def test_a_grammar_that_fails_ends_its_request_alone(monkeypatch):
    engine, calls = make(), []
    mask = grammar.Grammar.mask

    def fail(state):
        calls.append(state)
        state.has_failed |= calls.count(calls[0]) == 5 and state is calls[0]
        return mask(state)

    monkeypatch.setattr(grammar.Grammar, "mask", fail)
    first, second = engine.generate(PROMPTS[:2], asked())
    assert first.finish_reason == "error"
    check(second)


@pytest.mark.parametrize("more", [
    {"allowed_token_ids": (*b"{}",)}, {"allowed_token_ids": (*b"0",), "temperature": 1.0, "n": 2},
    {"banned_token_ids": (*b'"',), "n": 1, "best_of": 2, "temperature": 1.0},
])  # fmt: skip
def test_constraints_that_exclude_each_other_end_a_request_with_the_reason(more):
    engine = make()
    engine.add_request(PROMPTS[0], asked(**more))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    ends = [output for output in outputs if output.finish_reason is not None]
    assert len(ends) == more.get("n", 1) and {end.finish_reason for end in ends} == {"error"}
    why = "its grammar permits no token that the request's other constraints permit"
    assert {end.failure for end in ends} == {why}


class PanicException(BaseException):
    """As pyo3 raises it where Rust panics."""


@pytest.mark.parametrize("error", [ValueError("poison"), PanicException("poison")])
@pytest.mark.parametrize("name", ["mask", "accept"])
def test_a_grammar_that_raises_ends_its_request_alone(name, error, alone, monkeypatch, caplog):
    """Without that the others are computed again."""
    engine, works, calls = make(), getattr(grammar.Grammar, name), []

    def fail(state, *args):
        calls.append(state)
        if state is calls[0] and calls.count(state) > 5:
            raise error
        return works(state, *args)

    monkeypatch.setattr(grammar.Grammar, name, fail)
    monkeypatch.setattr(engine, "rebuild", lambda: pytest.fail("it starts over"))
    params = [asked(**how) for how in HOW]
    first, *others = engine.generate(PROMPTS, params)
    assert first.finish_reason == "error"
    assert first.token_ids == alone[0].token_ids[: len(first.token_ids)]
    assert [other.token_ids for other in others] == [answer.token_ids for answer in alone[1:]]
    assert not engine._requests and "poison" in caplog.text
    engine.scheduler.check_integrity()


def test_a_matcher_that_breaks_ends_its_request_with_the_text_so_far(alone, caplog):
    engine = make()
    ids = [engine.add_request(p, asked(**how)) for p, how in zip(PROMPTS, HOW, strict=True)]
    outputs = {id: [] for id in ids}
    state = fakes.sequence_of(engine, ids[0]).constraint

    class Broken:
        """Whose next mask is a panic."""

        def __init__(self, matcher):
            self._matcher = matcher

        def __getattr__(self, name):
            return getattr(self._matcher, name)

        def unsafe_compute_mask_ptr(self, *_):
            raise PanicException("index out of bounds")

    for n in range(300):
        if n == 8:
            state._matcher = Broken(state._matcher)
        for output in engine.step():
            outputs[output.id].append(output)
    tokens = [[t for output in each for t in output.token_ids] for each in outputs.values()]
    assert 0 < len(tokens[0]) < len(alone[0].token_ids)
    assert tokens == [alone[0].token_ids[: len(tokens[0])], *(each.token_ids for each in alone[1:])]
    first, *others = ([o.finish_reason for o in each][-1] for each in outputs.values())
    assert first == "error" and others == [each.finish_reason for each in alone[1:]]
    text = "".join(output.text for output in outputs[ids[0]])
    assert text and alone[0].text.startswith(text) and len(text.encode()) >= len(tokens[0]) - 1
    assert "GrammarError: llguidance: index out of bounds" in caplog.text
    assert not engine._requests


@pytest.mark.parametrize("params, settings, problem", [
    ({"grammar": grammar.of_regex("((")}, {}, "the grammar cannot be compiled"),
    ({"grammar": "start: nothing"}, {}, "the grammar cannot be compiled"),
    ({"grammar": JSON}, {"grammars": False}, "engine.requests.grammars=true"),
])  # fmt: skip
def test_what_is_refused(params, settings, problem):
    engine = make(**settings)
    with pytest.raises(InputError, match=problem):
        engine.add_request(PROMPTS[0], SamplingParams(**params))
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("params, problem", [
    ({"grammar": ""}, "grammar is a text"), ({"grammar": 3}, "grammar is a text"),
    ({"grammar": JSON, "ignore_eos": True}, "exclude each other"),
    ({"grammar": JSON, "beam_width": 2}, "grammar"),
])  # fmt: skip
def test_what_makes_no_sense(params, problem):
    with pytest.raises(InputError, match=problem):
        SamplingParams(**params)
