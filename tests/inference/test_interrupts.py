"""An interrupt at any line of a step loses nothing: the outputs are those of a run without one."""

import collections
import contextlib
import sys

import numpy as np
import pytest

from inference.request import SamplingParams
from tests import fakes
from tests.inference.test_request_state import Bytes

pytestmark = pytest.mark.quick_code

MODEL = fakes.fake_model(max_context=64)
PROMPTS = fakes.prompts((20, 3, 9, 20, 13, 2), fakes.VOCAB)
STOP = bytes(fakes.continuation(PROMPTS[0], 12)[10:12]).decode()
# Requests that end with a stop string, with their prompts, or go on as several sequences.
ASKED = (
    fakes.greedy(20, stop=(STOP,)), fakes.greedy(12),
    SamplingParams(max_new_tokens=6, n=2, beam_width=3),
    SamplingParams(max_new_tokens=9, n=2),
    SamplingParams(max_new_tokens=0),
    SamplingParams(max_new_tokens=8, n=2, best_of=3),
)  # fmt: skip


class Interrupts:
    """Raises KeyboardInterrupt before the lines of this repository's modules that have these
    numbers, of those that run within it.
    """

    def __init__(self, *numbers):
        self.numbers, self.count = set(numbers), 0

    def trace(self, frame, event, arg):
        if "/inference/" not in frame.f_code.co_filename or "/tests/" in frame.f_code.co_filename:
            return None
        if event == "line":
            self.count += 1
            if self.count in self.numbers:
                raise KeyboardInterrupt
        return self.trace

    @contextlib.contextmanager
    def active(self):
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(before)


def make():
    """Pages for less than all of it, and drafts, so that steps commit several tokens."""
    return fakes.engine(
        MODEL, shapes="one", draws=False, tokenizer=Bytes(), max_seqs=4, decode_rows=(4,),
        page_tokens=4, chunk_tokens=4, prefill_chunks=(3,), top_logprobs=6, num_drafts=2,
        cache_bytes=2400, preemption="swap", swap_bytes=1 << 20,
    )  # fmt: skip


def disturb(engine, nth):
    """Proposes right drafts to requests without a temperature; now and then preempts one."""
    running = engine.scheduler.running
    if nth % 7 == 6 and running:
        engine.scheduler.preempt(running.pop())
    for sequence in running:
        if not (sequence.is_prefilling or sequence.params.beam_width):
            sequence.drafts = tuple(fakes.continuation(sequence.tokens, 2))


def answers(engine, interrupts):
    """What requests bring, by their order and index: tokens, text and how they end; and all
    log-probabilities.
    """
    ids = [engine.add_request(*request) for request in zip(PROMPTS, ASKED, strict=True)]
    tokens, texts = collections.defaultdict(list), collections.defaultdict(str)
    ends, logprobs = collections.defaultdict(list), collections.defaultdict(list)
    for nth in range(300):
        if not engine.has_work:
            break
        outputs = []
        disturb(engine, nth)
        with contextlib.suppress(KeyboardInterrupt), interrupts.active():
            outputs = engine.step()
        for output in outputs:
            key = ids.index(output.id), output.index
            tokens[key] += output.token_ids
            texts[key] += output.text
            logprobs[key] += output.logprobs
            if output.finish_reason:
                ends[key].append((output.finish_reason, output.stopped_by))
    assert not engine.has_work and not engine._requests
    engine.scheduler.check_integrity()
    values = np.concatenate([logprobs[key] for key in sorted(logprobs)])
    return (dict(tokens), dict(texts), dict(ends)), values


def check(trials, seed):
    """Interrupts at `trials` lines spread over a run, and after half of them once more."""
    engine, whole = make(), Interrupts()
    expected, logprobs = answers(engine, whole)
    counters = engine.scheduler.counters
    assert counters.num_accepted and counters.num_preemptions and counters.num_offloaded_pages
    assert whole.count > 1000 and ("stop", STOP) in sum(expected[2].values(), [])
    rng = np.random.default_rng(seed)
    for number in rng.permutation(np.linspace(1, whole.count, trials).astype(int)).tolist():
        again = number + int(rng.integers(1, 400)) if rng.random() < 0.5 else number
        engine.rebuild()
        found, values = answers(engine, Interrupts(number, again))
        assert found == expected, f"interrupted at lines {number} and {again}"
        np.testing.assert_allclose(values, logprobs, atol=1e-4)


def test_an_interrupt_at_any_line_loses_nothing():
    check(10, seed=0)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(8))
def test_interrupts_at_very_many_lines_lose_nothing(seed):
    check(250, seed + 1)
