"""Offloading to the host against computing again."""

import dataclasses

import pytest

from configs.engine import Config, EngineConfig
from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from inference.planner import cache_policy
from inference.planner.calibration import store
from sharding import hosts
from tests import fakes

# 64 tokens of a page and chunk: what they cost to compute, and to copy, follows from these alone.
CHIP = HardwareSpec("chip", 1e9, 1e15, {"bfloat16": 1e9}, host_bandwidth=1e6)
ENGINE = EngineConfig.of(page_tokens=64, chunk_tokens=64, max_seqs=2)


def should_offload(chip, **changes):
    engine = ENGINE.replace(**changes)
    return cache_policy.page_costs(Config(fakes.llama("bfloat16"), engine), chip).should_offload


def test_a_copy_goes_at_the_link_to_the_host():
    """There and back, in no more time than the arithmetic of its tokens takes."""
    model = fakes.llama("bfloat16")
    num_bytes = sum(group.bytes_per_page("bfloat16", 64) for group in model.page_groups)
    heads, ffn = model.layers[0].mixer, model.layers[0].ffn
    rows = (2 * heads.num_heads + 2 * heads.num_kv_heads) * heads.head_width + 3 * ffn.width
    matrices = model.num_layers * 2 * 64 * model.width * rows
    slow = 2 * num_bytes / (matrices / 1e9)  # bytes a second at which a copy takes as long as those
    assert not should_offload(dataclasses.replace(CHIP, host_bandwidth=slow / 2))(64)
    assert should_offload(dataclasses.replace(CHIP, host_bandwidth=slow))(64)


def test_later_pages_cost_more_to_compute():
    """Their attention reads what came before."""
    firsts = []
    for bandwidth in (1e5, 3e4):
        told = should_offload(dataclasses.replace(CHIP, host_bandwidth=bandwidth))
        asked = [told(n) for n in range(64, 1 << 14, 64)]
        assert asked == sorted(asked)
        firsts.append(asked.index(True) if any(asked) else len(asked))
    assert 0 < firsts[0] < firsts[1]


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_other_preemption_asks_for_no_times(preemption):
    assert should_offload(dataclasses.replace(CHIP, host_bandwidth=1), preemption=preemption)(64)


def test_one_memory_needs_no_link():
    assert should_offload(dataclasses.replace(CHIP, host_bandwidth=None))(64)


def test_pages_return_by_a_copy_only_where_the_host_has_room():
    chip = dataclasses.replace(CHIP, host_bandwidth=1e12)
    for preemption, returns_at_once in (("recompute", False), ("swap", True), ("auto", True)):
        config = Config(fakes.llama("bfloat16"), ENGINE.replace(preemption=preemption))
        percent = cache_policy.page_costs(config, chip).return_percent
        assert (percent(64) < 100) == returns_at_once
        assert percent(1 << 14) > percent(64) or returns_at_once


def test_several_hosts_agree_whatever_each_measured(monkeypatch):
    config = Config(fakes.llama("bfloat16"), ENGINE.replace(preemption="recompute"))

    def percents(**measured):
        machine = dataclasses.replace(CHIP, **measured)
        monkeypatch.setattr(store, "calibration", lambda model: machine)
        costs, _ = cache_policy.of_caches(config)
        return [costs.return_percent(n) for n in range(64, 1 << 14, 1024)]

    assert percents(attention_share=0.1) != percents()
    monkeypatch.setattr(hosts, "_current", hosts.Hosts(count=2))
    assert percents(attention_share=0.1) == percents()


def test_every_accelerator_has_one():
    for chip in catalog.NAMES.values():
        assert chip.host_bandwidth is not None
        assert 1e9 < chip.host_bandwidth < chip.read_bandwidth / 5, chip.name
