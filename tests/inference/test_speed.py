"""Speed of SmolLM2 on the machine at hand, as ratios where it can be: `make test-long`."""

import dataclasses
import statistics
import subprocess
import sys
import time

import jax
import pytest

from configs.engine import Config, EngineConfig
from inference.checkpoints import resolve
from inference.engine import Engine
from inference.request import SamplingParams
from inference.runtime import batch
from inference.runtime.model_runner import ModelRunner
from inference.scheduling.sequence import Sequence
from inference.scheduling.step_schedule import ScheduledChunk, ShardSchedule
from inference.scheduling.step_shapes import StepShape, enumerate_shapes
from layers import decoder

pytestmark = pytest.mark.long
SHAPE = StepShape((8, 1), (0, 64))


@pytest.fixture(scope="module")
def checkpoint():
    return resolve.resolve("smollm2-135m").open(None)


@pytest.fixture(scope="module")
def params(checkpoint):
    return checkpoint.load_params(decoder.param_infos(checkpoint.config), None)


def decode_seconds(runner, context=96, steps=5):
    """Seconds of decode steps of 8 rows at one context."""
    pages = -(-context // runner.config.page_tokens) + 1
    rows = []
    for slot in range(8):
        sequence = Sequence(slot, SamplingParams(), [5] * (context + 1), context, slot=slot)
        sequence.pages = [list(range(1 + slot * pages, 1 + (slot + 1) * pages))]
        rows.append(ScheduledChunk(sequence, slot, context, 0, 1, emits=True))
    arrays = batch.build_batch(SHAPE, ShardSchedule(tuple(rows)), runner.config)
    seconds = []
    for _ in range(steps):
        num_tokens = jax.numpy.full_like(runner.slots.num_tokens, context)
        runner.slots = dataclasses.replace(runner.slots, num_tokens=num_tokens)
        jax.block_until_ready(runner.slots)
        start = time.perf_counter()
        runner.cache, runner.slots, output = runner.compiled(SHAPE)(
            runner.params, runner.cache, runner.slots, arrays
        )
        jax.block_until_ready((runner.cache, output))
        seconds.append(time.perf_counter() - start)
    return seconds


def test_step_time_does_not_grow_with_the_pool(checkpoint, params):
    sizes = (64 << 20, 512 << 20)
    small, large = (
        ModelRunner(Config(checkpoint.config, EngineConfig.of(max_seqs=8, cache_bytes=n)), params)
        for n in sizes
    )
    assert large.cache_bytes / small.cache_bytes == pytest.approx(8, rel=0.02)
    small_s, large_s = [], []
    for _ in range(9):  # in turn, so that the machine's drift meets both
        small_s += decode_seconds(small)[1:]
        large_s += decode_seconds(large)[1:]
    ratio = statistics.median(large_s) / statistics.median(small_s)
    print(f"8 x the pages: {ratio:.3f} x the step time")
    assert ratio <= 1.05


def test_padding_costs_little(checkpoint, params):
    """A prompt of 8 tokens in a chunk of 64, and 8 such prompts in 8."""
    engine = Engine(Config(checkpoint.config, EngineConfig(max_seqs=8)), params)
    if engine.config.engine.kernels.linear != "ffi_cpu":
        pytest.skip("products of XLA's compute padding, too")
    one = SamplingParams(max_new_tokens=1)

    def seconds(count, length):
        for each in range(count):
            engine.add_request([100 + 7 * each + j for j in range(length)], one)
        while engine.scheduler.has_work:
            engine.step()
        engine.rebuild()  # nothing is found in the cache
        return engine.records[-1].seconds

    for count in (1, 8):
        pairs = [(seconds(count, 8), seconds(count, 64)) for _ in range(8)][1:]
        ratio = statistics.median(short / whole for short, whole in pairs)
        print(f"{count} x 8 of 64 tokens: {ratio:.3f} x the time of whole chunks")
        assert ratio <= 0.5


def test_full_sampling_keeps_most_of_the_greedy_rate(checkpoint, params):
    engine = Engine(Config(checkpoint.config, EngineConfig(max_seqs=32)), params)
    greedy = SamplingParams(max_new_tokens=24, ignore_eos=True)
    sampled = dataclasses.replace(greedy, temperature=0.8, top_p=0.95, top_k=50)
    prompts = [[100 + 7 * i + j for j in range(64)] for i in range(32)]
    rates = {greedy: [], sampled: []}
    for run in range(4):
        for each in (greedy, sampled):
            start = time.perf_counter()
            engine.generate(prompts, each)
            if run:  # the first compiles
                rates[each].append(1 / (time.perf_counter() - start))
    ratio = statistics.median(rates[sampled]) / statistics.median(rates[greedy])
    print(f"sampled / greedy rate: {ratio:.2f}")
    assert ratio >= 0.75


def test_planning_ahead_is_no_slower(checkpoint, params):
    """By turns of ten steps: whole runs differ by more than what it gains."""
    engines = {
        overlap: Engine(
            Config(checkpoint.config, EngineConfig.of(max_seqs=8, overlap=overlap)), params
        )
        for overlap in (True, False)
    }
    for engine in engines.values():
        for first in range(8):
            prompt = list(range(100 + first, 164 + first))
            engine.add_request(prompt, SamplingParams(max_new_tokens=400, ignore_eos=True))
        for _ in range(10):  # compiles, and takes the prompts in
            engine.step()
    ratios = []
    for turn in range(30):
        seconds = {}
        for overlap in (turn % 2 == 0, turn % 2 == 1):
            start = time.perf_counter()
            for _ in range(10):
                engines[overlap].step()
            seconds[overlap] = time.perf_counter() - start
        ratios.append(seconds[False] / seconds[True])
    ratio = statistics.median(ratios)
    print(f"without / with overlap: {ratio:.3f} x the step time")
    assert ratio >= 1.0


def test_a_new_process_answers_within_four_seconds(checkpoint):
    """From its start to the first word on its pipe; the first start may have had to compile."""
    command = [sys.executable, "-m", "scripts.generate", "--model=smollm2-135m"]
    command += ["--max_new_tokens=4", "--prompt=The capital of France is"]
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout.read(len(" Paris")) == b" Paris"
            seconds.append(time.perf_counter() - start)
            process.communicate()
    print(f"first start {seconds[0]:.1f} s, then {', '.join(f'{s:.2f}' for s in seconds[1:])} s")
    assert statistics.median(seconds[1:]) <= 4.0


def test_warm_up_takes_at_most_90_seconds(checkpoint, params):
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        engine = Engine(Config(checkpoint.config), params)
        start = time.perf_counter()
        engine.warm_up()
        seconds = time.perf_counter() - start
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    print(f"warm-up: {seconds:.0f} s for {len(enumerate_shapes(EngineConfig()))} shapes")
    assert seconds <= 90
