"""An engine in any order of requests, aborts, preemptions, interrupts and faults: whatever is not
aborted or at fault gets the answer that it gets alone.
"""

import collections
import contextlib
import dataclasses
import functools

import jax
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inference.request import SamplingParams
from inference.runtime.model_runner import ModelRunner
from inference.scheduling.page_manager import PageManager
from inference.text import grammar
from inference.text.detokenizer import Detokenizer
from inference.text.grammar import Grammar, GrammarError
from tests import fakes
from tests.inference.test_interrupts import Interrupts
from tests.inference.test_request_state import STAGES, Bytes, PanicException

pytestmark = pytest.mark.quick_code

MODEL = fakes.fake_model(max_context=64)
END = 1
SHARED, *_ = fakes.prompts((20,), seed=1)
PROMPTS = [
    SHARED[:20], SHARED[:13], [*SHARED[:16], 7, 8, 9], [*SHARED[:8], 5], SHARED[4:7], [3],
]  # fmt: skip
STOP = bytes(fakes.continuation(PROMPTS[0], 9)[7:9]).decode()
PARAMS = [
    fakes.greedy(9),
    fakes.greedy(20, stop=(STOP, "never there"), ignore_eos=True),
    fakes.greedy(16, priority=-1, stop_token_ids=(5, 17, 30)),
    SamplingParams(max_new_tokens=14, temperature=20.0, seed=1, priority=3, cache_salt="a"),
    SamplingParams(max_new_tokens=12, temperature=20.0, top_k=5, seed=2, n=2, min_tokens=4),
    SamplingParams(max_new_tokens=8, temperature=20.0, seed=3, n=2, best_of=3),
    SamplingParams(max_new_tokens=6, n=2, beam_width=3),
    SamplingParams(max_new_tokens=10, grammar=grammar.of_regex("[0-9]{3,8}[!?]")),
    SamplingParams(max_new_tokens=14, temperature=20.0, seed=4, n=2, grammar=grammar.of_json_schema(
        {"type": "integer", "minimum": 100, "maximum": 99_999})),
    SamplingParams(max_new_tokens=0),
]  # fmt: skip


class Tokenizer(Bytes):
    """That of the model, for grammars too."""

    vocab_size = fakes.VOCAB

    def encode(self, text, add_special=True):
        return list(text.encode())


class TwoDrafts:
    """In place of `AdaptiveDrafts`."""

    def choose(self, decoding, num_rows, is_alone):
        return 2

    def verified(self, sequence, num_asked, num_accepted):
        pass

    def took(self, shape, seconds):
        pass


def make(**settings):
    """Pages for three beams of the longest prompt, less than four requests may take."""
    engine = fakes.engine(
        MODEL, shapes="one", tokenizer=Tokenizer(), eos_ids=(END,), max_seqs=4, decode_rows=(4,),
        page_tokens=4, chunk_tokens=4, prefill_chunks=(3,), top_logprobs=6, num_drafts=2,
        cache_bytes=3400, swap_bytes=1 << 20, grammars=True, **settings,
    )  # fmt: skip
    engine.scheduler.draft_policy = TwoDrafts()
    return engine


@dataclasses.dataclass
class Answer:
    """What was read of one answer of a request."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    text: str = ""
    reasons: list[str] = dataclasses.field(default_factory=list)

    def add(self, output):
        self.tokens += output.token_ids
        self.text += output.text
        self.reasons += [output.finish_reason] if output.finish_reason else []


@functools.cache
def lone_engine():
    return make()


@functools.cache
def alone(prompt, params):
    """A request's answers where nothing runs beside it, on an empty cache."""
    engine, answers = lone_engine(), collections.defaultdict(Answer)
    engine.rebuild()
    engine.add_request(PROMPTS[prompt], PARAMS[params])
    while engine.has_work:
        for output in engine.step():
            answers[output.index].add(output)
    return dict(answers)


# What works on one sequence, and which of its arguments says on which.
PLACES = STAGES | {
    "mask": (Grammar, "mask", lambda self: self),
    "accept": (Grammar, "accept", lambda self, token: self),
    "drafts": (TwoDrafts, "verified", lambda self, sequence, *_: sequence),
    "detokenizer": (Detokenizer, "push", lambda self, ids: self),
}
KINDS = {"error": ValueError, "panic": PanicException, "grammar": GrammarError}


class EngineMachine(RuleBasedStateMachine):
    """Requests come, run, are preempted and aborted; calls are interrupted at any line, sequences
    get faults, and the device fails.
    """

    @initialize(
        preemption=st.sampled_from(["recompute", "swap"]),
        prefix_cache=st.booleans(),
        overlap=st.booleans(),
    )
    def build(self, **settings):
        self.engine = make(**settings)
        self.requests = {}  # id -> (prompt, params)
        self.answers = collections.defaultdict(Answer)  # by id and index
        self.aborted = set()  # ids of requests
        self.faults = {}  # (place, id of a sequence) -> (exception, whether it comes first)
        self.raised = set()  # (id, place) of faults that came in the call that runs
        self.failing, self.perhaps_failing = set(), set()  # ids of sequences that had a fault
        self.is_failing_device = False
        self.patch = pytest.MonkeyPatch()
        for place, (owner, name, subject) in PLACES.items():
            works = getattr(owner, name)
            self.patch.setattr(owner, name, self.faulty(place, works, subject))
        wait = ModelRunner.wait
        self.patch.setattr(ModelRunner, "wait", lambda *args: self.check_device() or wait(*args))

    def faulty(self, place, works, subject):
        def function(*args):
            found = self.faults and self.faults.pop((place, self.id_of(subject(*args))), None)
            if not found:
                return works(*args)
            error, comes_first = found
            self.raised.add((self.id_of(subject(*args)), place))
            if not comes_first:
                works(*args)
            raise error("poison")

        return function

    def id_of(self, subject):
        """Of a sequence, or of the one that a grammar or detokenizer belongs to."""
        if isinstance(subject, Detokenizer):
            requests = self.engine._requests._requests.values()
            owned = (pair for each in requests for pair in each._detokenizers.items())
            return next((id for id, detokenizer in owned if detokenizer is subject), None)
        if isinstance(subject, Grammar):
            sequences = self.engine._requests.sequences
            return next((each.id for each in sequences if each.constraint is subject), None)
        return subject.id

    def check_device(self):
        if self.is_failing_device:
            self.is_failing_device = False
            raise jax.errors.JaxRuntimeError("the device went away")

    def step(self, *numbers):
        """A step that is interrupted at these lines."""
        interrupts, outputs, is_whole = Interrupts(*numbers), [], False
        # Of a device that fails twice in a row the caller hears; nothing is lost by that, either.
        with contextlib.suppress(KeyboardInterrupt, jax.errors.JaxRuntimeError):
            with interrupts.active() if numbers else contextlib.nullcontext():
                outputs = self.engine.step()
            is_whole = True
        self.note_faults(is_whole)
        for output in outputs:
            assert output.id in self.requests
            self.answers[output.id, output.index].add(output)

    def note_faults(self, is_whole):
        """An interrupt may come before a fault is noted, and then nothing is wrong any more; a
        sequence whose pages are freed may have all of its answer.
        """
        for id, place in self.raised:
            (self.failing if is_whole and place != "free" else self.perhaps_failing).add(id)
        self.raised.clear()

    @rule(prompt=st.integers(0, len(PROMPTS) - 1), params=st.integers(0, len(PARAMS) - 1))
    def submit(self, prompt, params):
        if not PARAMS[params].max_new_tokens and len(PROMPTS[prompt]) < 2:
            return  # a single token has no score
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "faults", {})
            alone(prompt, params)
        id = self.engine.add_request(PROMPTS[prompt], PARAMS[params])
        self.requests[id] = prompt, params

    @rule(num_steps=st.integers(1, 6))
    def run(self, num_steps):
        for _ in range(num_steps):
            self.step()

    @rule(first=st.integers(1, 2500), then=st.integers(0, 600))
    def interrupt(self, first, then):
        self.step(first, *([first + then] if then < 200 else []))

    @rule(is_right=st.booleans())
    def draft(self, is_right):
        for sequence in self.engine.scheduler.running:
            plain = not (sequence.params.beam_width or sequence.constraint or sequence.is_only_read)
            if plain and not sequence.is_prefilling:
                sequence.drafts = tuple(fakes.continuation(sequence.tokens, 2))
                sequence.drafts = sequence.drafts if is_right else sequence.drafts[::-1]

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(nth=st.integers(0, 3))
    def preempt(self, nth):
        running, faults = self.engine.scheduler.running, self.faults
        self.faults = {}  # nothing catches them here
        self.engine.scheduler.preempt(running[nth % len(running)])
        self.faults = faults

    @precondition(lambda self: len(self.engine._requests))
    @rule(nth=st.integers(0, 5))
    def abort(self, nth):
        requests = list(dict.fromkeys(self.engine._requests._requests.values()))
        id = requests[nth % len(requests)].group.id
        self.aborted.add(id)
        self.engine.abort(id)
        assert id not in self.engine._requests
        self.note_faults(is_whole=False)

    @precondition(lambda self: len(self.engine._requests))
    @rule(
        place=st.sampled_from(sorted(PLACES)), kind=st.sampled_from(sorted(KINDS)),
        comes_first=st.booleans(), nth=st.integers(0, 7),
    )  # fmt: skip
    def poison(self, place, kind, comes_first, nth):
        sequences = self.engine._requests.sequences
        fault = KINDS[kind], comes_first
        if sequences:
            self.faults[place, sequences[nth % len(sequences)].id] = fault

    @rule()
    def lose_the_device(self):
        self.is_failing_device = True

    @rule()
    def lose_the_cache(self):
        self.engine.rebuild()
        self.note_faults(is_whole=True)

    @invariant()
    def nothing_ends_twice(self):
        if self.engine._is_whole:
            self.engine.scheduler.check_integrity()
        for (id, index), answer in self.answers.items():
            expected = alone(*self.requests[id])[index]
            assert len(answer.reasons) <= 1
            if not self.is_ranked(id):
                assert answer.tokens == expected.tokens[: len(answer.tokens)]
                assert expected.text.startswith(answer.text)

    def is_ranked(self, id):
        """Whether a request's answers come in the end, best first."""
        params = PARAMS[self.requests[id][1]]
        return bool(params.beam_width or params.best_of)

    def teardown(self):
        """Every request ends, as it does alone, and every page comes back."""
        if not hasattr(self, "engine"):
            return
        try:
            for _ in range(100 * (1 + len(self.requests))):
                if not self.engine.has_work:
                    break
                self.step()
                self.nothing_ends_twice()
            assert not self.engine.has_work and not self.engine._requests
        finally:
            self.patch.undo()
        for shard in self.engine.scheduler.shards:
            shard.check_integrity()
            available = shard.pages.prefix_cache.num_available_pages
            assert available == shard.pages.pool.num_usable_pages and not shard.running
        for id in self.requests.keys() - self.aborted:
            self.check_answers(id)

    def check_answers(self, id):
        """Those of one request: as alone, but for a sequence that had a fault."""
        expected = alone(*self.requests[id])
        params = PARAMS[self.requests[id][1]]
        ids = range(id, id + max(params.num_samples, params.beam_width))
        is_faulty = any(each in self.failing | self.perhaps_failing for each in ids)
        if self.is_ranked(id) and is_faulty:
            assert all(self.answers[id, index].reasons for index in expected)
            return
        for index, answer in expected.items():
            found = self.answers[id, index]
            if found.reasons == ["error"]:
                assert id + index in self.failing | self.perhaps_failing
            else:
                assert id + index not in self.failing
                assert found == answer, f"request {id}, answer {index}"


class TestEngine(EngineMachine.TestCase):
    settings = settings(
        max_examples=12, stateful_step_count=20, deadline=None,
        phases=(Phase.reuse, Phase.generate, Phase.shrink),
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(900)
class TestEngineAtLength(EngineMachine.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=30, deadline=None)


# --- single faults --------------------------------------------------------------------------------


def answers_of(engine, requests):
    """Their answers, whatever single steps raise."""
    ids = [engine.add_request(PROMPTS[prompt], PARAMS[params]) for prompt, params in requests]
    answers, raised = collections.defaultdict(dict), []
    while engine.has_work:
        try:
            outputs = engine.step()
        except ZeroDivisionError as error:
            raised.append(error)
            continue
        for output in outputs:
            answers[ids.index(output.id)].setdefault(output.index, Answer()).add(output)
    engine.scheduler.check_integrity()
    return [answers[nth] for nth in range(len(requests))], raised


REQUESTS = [(0, 0), (1, 4), (2, 1), (0, 7), (3, 3)]


@pytest.mark.parametrize("name", ["choose", "took"])
def test_a_draft_policy_that_raises_loses_nothing(name, monkeypatch):
    """It judges all sequences at once, so no one of them is at fault: the caller hears of it."""
    works, calls = getattr(TwoDrafts, name), []
    expected = [alone(*request) for request in REQUESTS]

    def fail_once(*args):
        calls.append(args)
        return 1 // 0 if len(calls) == 5 else works(*args)

    monkeypatch.setattr(TwoDrafts, name, fail_once)
    answers, raised = answers_of(make(), REQUESTS)
    assert answers == expected and len(raised) == 1


def test_pages_freed_twice_give_no_wrong_token(monkeypatch, caplog):
    expected, free = [alone(*request) for request in REQUESTS], PageManager.free

    def free_twice(manager, sequence):
        pages = [list(group) for group in sequence.pages]
        free(manager, sequence)
        if sequence.num_prompt_tokens == len(PROMPTS[2]):
            sequence.pages = pages
            free(manager, sequence)

    monkeypatch.setattr(PageManager, "free", free_twice)
    assert answers_of(make(), REQUESTS) == (expected, [])
    assert "is freed twice" in caplog.text


@pytest.mark.parametrize(
    "place, num_steps, reason", [("allocate", 0, "error"), ("free", 6, "length")]
)
@pytest.mark.parametrize("comes_first", [True, False])
def test_a_search_with_a_fault_ends_each_answer_once(place, num_steps, reason, comes_first):
    """Before it has beams, and where it has all of its hypotheses."""
    machine = EngineMachine()
    machine.build(preemption="recompute", prefix_cache=False, overlap=False)
    machine.submit(prompt=0, params=6)
    machine.submit(prompt=1, params=0)
    machine.run(num_steps)
    machine.poison(place, "error", comes_first, nth=0)
    machine.teardown()
    search, beside = machine.requests
    assert [machine.answers[search, index].reasons for index in range(2)] == [[reason]] * 2
    assert machine.answers[beside, 0].reasons == ["length"]
