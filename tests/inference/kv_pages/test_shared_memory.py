"""Many answers where memory is short: beams that wait for others, offloaded prompts."""

import contextlib
import dataclasses
import random

import numpy as np
import pytest

from configs.cache import CacheSpec
from configs.errors import InputError
from configs.model import LayerSpec
from inference.request import SamplingParams
from inference.scheduling.beam_search import BeamSearch
from inference.scheduling.sequence import Prefix, Sequence
from tests import fakes
from tests.inference.scheduling.test_policies import scheduler
from tests.inference.scheduling.test_scheduler import fake_output
from tests.kinds import Caching

NUM_TOP = 6


def searched(schedule, rng):
    """Outputs of a step with random candidates."""
    output = fake_output(schedule)
    shape = (*output.tokens.shape, NUM_TOP)
    output.top_ids, output.top_logprobs = np.zeros(shape, int), np.zeros(shape)
    for row in range(shape[0]):
        output.top_ids[row, 0] = rng.sample(range(1, 10), NUM_TOP)
        output.top_logprobs[row, 0] = sorted(-3 * rng.random() for _ in range(NUM_TOP))[::-1]
    return output


@pytest.mark.parametrize("seed", range(150))
def test_searches_side_by_side_all_end(seed):
    """Whichever search is preempted, all of them end."""
    rng = random.Random(seed)
    one = scheduler(
        num_tokens=rng.choice([96, 112, 128, 160]), max_seqs=rng.choice([4, 6, 8]),
        decode_rows=(8,), preemption=rng.choice(["swap", "recompute"]), swap_bytes=1 << 14,
    )  # fmt: skip
    known, overlap, searches = [rng.randint(1, 9) for _ in range(40)], rng.random() < 0.5, {}
    for number in range(rng.randint(2, 4)):
        prompt, width = known[: rng.choice([1, 3, 8, 13, 17, 25])], rng.choice([2, 3, 4])
        params = SamplingParams(max_new_tokens=rng.randint(2, 16), beam_width=width)
        first = Sequence(
            1 + 10 * number, params, list(prompt), len(prompt), needs_commit=True,
            prefix=Prefix("shared"),
        )  # fmt: skip
        with contextlib.suppress(InputError):  # one that would not find room even alone
            one.add(first)
        search = BeamSearch(first, lambda sequence: "")
        searches |= dict.fromkeys(search.ids, search)
    in_flight = []
    for _ in range(600):
        if not one.has_work:
            return
        schedule = one.schedule()
        in_flight += [schedule] if schedule else []
        if len(in_flight) > (schedule is not None and overlap):
            schedule = in_flight.pop(0)
            for commit in one.commit(schedule, searched(schedule, rng)):
                search = searches[commit.sequence.id]
                if not search.is_finished and (decisions := search.decide()):
                    one.apply(decisions)
        one.check_integrity()
    raise AssertionError("no search ends")


@pytest.mark.quick_code
@pytest.mark.parametrize("length", [32, 33, 34])
def test_a_prompt_comes_back_from_the_host_for_all_its_answers(length):
    model = fakes.fake_model()
    pattern = (LayerSpec(Caching(CacheSpec(1, fakes.ELEMENTS)), None),)
    model = dataclasses.replace(model, pattern=pattern, num_layers=1)
    size = sum(group.bytes_per_page(model.dtype, 4) for group in model.page_groups)
    first, second = fakes.prompts([length, 70])
    tokens = []
    for n in (1, 2):
        engine = fakes.engine(
            model, shapes="one", draws=False, page_tokens=4, cache_bytes=24 * size, max_seqs=3,
            chunk_tokens=8, prefill_chunks=(1, 2), decode_rows=(3,), preemption="swap",
            swap_bytes=1 << 20,
        )  # fmt: skip
        for prompt in (first, second):
            engine.generate([prompt], fakes.greedy(6))
        params = dataclasses.replace(fakes.greedy(6), n=n)
        (found,) = engine.generate([first], params)
        tokens += [found.token_ids, *(other.token_ids for other in found.others)]
        assert engine.scheduler.counters.num_restored_pages
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_search_that_failed_says_so():
    """Though it had found a hypothesis before."""
    one, rng = scheduler(num_tokens=400), random.Random(0)
    params = SamplingParams(max_new_tokens=8, beam_width=2, stop_token_ids=(5,))
    first = Sequence(1, params, [1, 2, 3], 3, needs_commit=True, prefix=Prefix("shared"))
    one.add(first)
    search = BeamSearch(first, lambda sequence: "")
    for at in range(3):
        schedule = one.schedule()
        output = searched(schedule, rng)
        output.top_ids[:, 0], output.top_logprobs[:, 0] = [1, 5, 2, 3, 4, 6], -np.arange(1.0, 7)
        output.finite[:] = at < 2
        for _ in one.commit(schedule, output):
            if not search.is_finished and (decisions := search.decide()):
                one.apply(decisions)
    assert search.is_finished and search.completion().finish_reason == "error"
