"""Many answers where memory is short: beams that wait for others, prompts on the host."""

import contextlib
import dataclasses
import random

import numpy as np
import pytest

from configs.cache import CacheSpec
from configs.errors import InputError
from configs.model import LayerSpec
from inference.outputs import Update
from inference.request import SamplingParams, Sequence
from inference.scheduling.sequence_group import Beams
from tests import fakes
from tests.inference.scheduling.test_policies import CONTEXT, scheduler
from tests.inference.scheduling.test_scheduler import fake_output

NUM_TOP = 6


def searched(plan, rng):
    """What a device would say of a plan: random candidates."""
    output = fake_output(plan)
    shape = (*output.tokens.shape, NUM_TOP)
    output.top_ids, output.top_logprobs = np.zeros(shape, int), np.zeros(shape)
    for row in range(shape[0]):
        output.top_ids[row, 0] = rng.sample(range(1, 10), NUM_TOP)
        output.top_logprobs[row, 0] = sorted(-3 * rng.random() for _ in range(NUM_TOP))[::-1]
    return output


@pytest.mark.parametrize("seed", range(150))
def test_searches_side_by_side_all_end(seed):
    """Whoever makes room, somebody gets along."""
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
            cache_key="shared",
        )  # fmt: skip
        with contextlib.suppress(InputError):  # one that would not find room even alone
            one.add(first)
        search = Beams(one, first, CONTEXT, lambda sequence: "")
        searches |= dict.fromkeys(search.ids, search)
    flights = []
    for _ in range(600):
        if not one.has_work:
            return
        plan = one.schedule()
        flights += [plan] if plan else []
        if len(flights) > (plan is not None and overlap):
            plan = flights.pop(0)
            for sequence, tokens in one.commit(plan, searched(plan, rng)):
                if not searches[sequence.id].is_finished:
                    searches[sequence.id].take(Update(sequence.id, tokens, "", None))
        one.check_integrity()
    raise AssertionError("nobody gets along")


@pytest.mark.quick_code
@pytest.mark.parametrize("length", [32, 33, 34])
def test_a_prompt_comes_back_from_the_host_for_all_its_answers(length):
    model = fakes.fake_model()
    pattern = (LayerSpec("paged", cache=CacheSpec(fakes.ELEMENTS)),)
    model = dataclasses.replace(model, pattern=pattern, num_layers=1)
    size = sum(group.bytes_per_page(model.dtype, 4) for group in model.page_groups)
    first, second = fakes.prompts([length, 70])
    tokens = []
    for n in (1, 2):
        engine = fakes.engine(
            model, page_tokens=4, cache_bytes=24 * size, max_seqs=3, tile_tokens=8,
            prefill_tiles=(1, 2), decode_rows=(3,), preemption="swap", swap_bytes=1 << 20,
        )  # fmt: skip
        for prompt in (first, second):
            engine.generate([prompt], fakes.greedy(6))
        params = dataclasses.replace(fakes.greedy(6), n=n)
        (found,) = engine.generate([first], params)
        tokens += [found.token_ids, *(other.token_ids for other in found.others)]
        assert engine.scheduler.pages.prefix.num_restored_pages
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_search_that_failed_says_so():
    """Though it had found a hypothesis before."""
    one, rng = scheduler(num_tokens=400), random.Random(0)
    params = SamplingParams(max_new_tokens=8, beam_width=2, stop_ids=(5,))
    first = Sequence(1, params, [1, 2, 3], 3, needs_commit=True, cache_key="shared")
    one.add(first)
    search = Beams(one, first, CONTEXT, lambda sequence: "")
    for at in range(3):
        plan = one.schedule()
        output = searched(plan, rng)
        output.top_ids[:, 0], output.top_logprobs[:, 0] = [1, 5, 2, 3, 4, 6], -np.arange(1.0, 7)
        output.finite[:] = at < 2
        for sequence, tokens in one.commit(plan, output):
            if not search.is_finished:
                search.take(Update(sequence.id, tokens, "", None))
    assert search.is_finished and search.completion().finish_reason == "error"
