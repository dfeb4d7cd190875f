"""What is computed of prompts that share a text, before they run."""

import dataclasses
import random

import pytest

from configs.engine import Config, EngineConfig
from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from inference.benchmark import measure
from inference.benchmark.requests import TimedRequest
from inference.kv_pages.radix_tree import RadixTree
from inference.planner.deployment import Deployment
from scripts.reports.architectures import serving
from tests import fakes

_CHIP = HardwareSpec("chip", 1e9, 1e9, {"float32": 1e9})
_HYBRID = fakes.hybrid()
_ALONE = dataclasses.replace(_HYBRID, pattern=_HYBRID.pattern[1:2], num_layers=2)
_MODELS = {"attention": fakes.llama("float32"), "hybrid": _HYBRID, "states alone": _ALONE}


def _config(model, max_context=2048, **changes):
    model = dataclasses.replace(model, max_context=max_context)
    sizes = dict(max_seqs=2, page_tokens=16, chunk_tokens=16, prefill_chunks=(4,), decode_rows=(2,))
    return Config(model, EngineConfig.of(**sizes | changes))


def _served(config, load):
    return measure.predict(config, load, _CHIP, concurrency=1)


def _computed(config, prompts):
    rng, text = random.Random(1), [1] * 600
    load = []
    for num_tokens, num_shared in prompts:
        own = [rng.randrange(2, 60) for _ in range(num_tokens - num_shared)]
        load.append(TimedRequest(0.0, (*text[:num_shared], *own), 2))
    counters = _served(config, load).counters
    return counters["num_prompt_tokens"] - counters["num_cached_tokens"]


@pytest.mark.quick_code
@pytest.mark.parametrize("distance", [64, 96, 500])
@pytest.mark.parametrize("name", _MODELS)
def test_what_is_computed_is_predicted_by_lengths(name, distance):
    config = _config(_MODELS[name], snapshots=64, snapshot_tokens=distance)
    rng = random.Random(distance)
    shared = [rng.randrange(0, 500) for _ in range(9)]
    prompts = [(n + rng.randrange(2, 200), n) for n in (*shared, 300, 300, 300)]
    said = serving.computed_tokens(config, prompts, _CHIP)
    assert said == _computed(config, prompts)
    assert said < sum(length for length, _ in prompts)


def test_by_hand():
    """300 shared tokens are 18 whole pages; the first prompt leaves snapshots at 128 and 256 of
    them, the second one at 288.
    """
    prompts = [(320, 300)] * 4
    config = _config(_HYBRID, snapshots=64, snapshot_tokens=128)
    assert serving.computed_tokens(config, prompts) == 4 * 320 - 256 - 2 * 288
    assert serving.computed_tokens(_config(_MODELS["attention"]), prompts) == 4 * 320 - 3 * 288


@pytest.mark.parametrize("name, computed", [
    ("attention", 288 + 32 + 32), ("hybrid", 288 + 48 + 32), ("states alone", 288 + 48 + 48),
])  # fmt: skip
def test_a_prompt_that_is_the_shared_text(name, computed):
    """Whole pages: the last is known where it is a page, and parts the next prompts; of states
    alone the second prompt is the first of which it is known.
    """
    prompts = [(288, 288), (320, 300), (320, 300)]
    config = _config(_MODELS[name], snapshots=64, snapshot_tokens=512)
    assert serving.computed_tokens(config, prompts, _CHIP) == computed
    assert _computed(config, prompts) == computed


@pytest.mark.parametrize("changes", [
    {"snapshots": 0}, {"prefix_cache": False}, {"prefix_cache": False, "preemption": "recompute"},
], ids=str)  # fmt: skip
def test_without_snapshots_all_is_computed(changes):
    config, prompts = _config(_ALONE, **changes), [(200, 150)] * 3
    assert serving.computed_tokens(config, prompts, _CHIP) == 600
    assert _computed(config, prompts) == 600
    assert (config.num_snapshots > 1) == (len(changes) == 1 and "snapshots" not in changes)


def test_the_hosts_work_grows_with_the_tokens_alone(monkeypatch):
    """Of states alone the cache has few pages: a step looks at none but its own."""
    counts, child = [], RadixTree.child

    def counted(*args):
        counts[-1] += 1
        return child(*args)

    monkeypatch.setattr(RadixTree, "child", counted)
    for length in (2048, 8192):
        counts.append(0)
        config = _config(_ALONE, length + 16, snapshots=64, snapshot_tokens=256)
        _served(config, [TimedRequest(0.0, (1,) * length, 8)])
    assert 0 < counts[1] <= 4.4 * counts[0]


@pytest.mark.parametrize("snapshots", [0, 5, None])
def test_snapshots_are_part_of_the_memory(snapshots):
    chip = catalog.get("h100")
    plain = Deployment(_HYBRID, chip).row(3, 100)
    deployment = Deployment(_HYBRID, chip, snapshots=snapshots)
    row, each = deployment.row(3, 100), deployment.snapshot_bytes
    assert each == sum(spec.bytes_per_sequence() for spec in _HYBRID.cache_specs) > 0
    count = 3 if snapshots is None else snapshots
    assert row.snapshot_bytes == count * each == row.memory_bytes - plain.memory_bytes
    assert row.chip_bytes == plain.chip_bytes + count * each
    assert row.cache_bytes == plain.cache_bytes
    engine = EngineConfig.of(max_seqs=3, snapshots=snapshots)
    assert Config(_HYBRID, engine).state_bytes(0) == (1 + count) * each


def test_the_largest_batch_leaves_room_for_them():
    model = _ALONE
    each = sum(spec.bytes_per_sequence() for spec in model.cache_specs)
    weights = Deployment(model, catalog.get("h100")).chip_weight_bytes
    chip = dataclasses.replace(catalog.get("h100"), memory_bytes=weights + 20 * each)
    found = [Deployment(model, chip, snapshots=n).largest_batch(100) for n in (0, 5, 30, None)]
    assert found == [20, 15, 0, 10]
    assert [Deployment(model, chip, snapshots=None).row(n, 100).fits for n in (10, 11)] == [
        True, False,
    ]  # fmt: skip
