"""Experts that a step visits, and how tokens reach those of other chips."""

import dataclasses
import itertools
import math

import pytest

from configs import presets
from configs.hardware import catalog
from configs.kinds.experts import Experts, Router
from configs.mesh import Mesh
from inference.planner import advise
from inference.planner.advise import Workload
from inference.planner.deployment import Deployment
from inference.planner.kinds import mixtures
from inference.planner.parallel import dispatch

_LITE = presets.get("deepseek-v2-lite").config
_ONE = Deployment(_LITE, catalog.get("h200"))
_DENSE = Deployment(presets.get("llama3-8b").config, _ONE.hardware)
_SWITCH = dataclasses.replace(_ONE, mesh=Mesh(expert=8))
_RING = dataclasses.replace(_SWITCH, hardware=catalog.get("v5e"))


def test_visited_experts_by_hand():
    found = mixtures.describe(_ONE, 1024, 256)
    assert (found.num_experts, found.top_k) == (64, 6)
    assert 2.4e9 < found.active_parameters < 2.5e9 < 15.7e9 < found.parameters
    one, eight = found.visits[:2]
    assert (one.batch, one.visited) == (1, pytest.approx(6))
    assert eight.visited == pytest.approx(64 * (1 - (58 / 64) ** 8))
    expert = 3 * 1408 * 2048 * 2  # three matrices of bfloat16
    assert eight.chip_bytes == pytest.approx(26 * eight.visited * expert)
    shared = mixtures.describe(_SWITCH, 1024, 256).visits[1]
    assert shared.visited == eight.visited and shared.chip_bytes == eight.chip_bytes / 8
    assert (
        mixtures.describe(Deployment(presets.get("llama3-8b").config, _ONE.hardware), 9, 9) is None
    )


def test_a_step_is_bound_by_experts_until_another_part_takes_longer():
    found = mixtures.describe(_ONE, 4096, 512)
    assert found.then == "cache"

    def seconds(batch: int) -> tuple[float, float]:
        operations = _ONE.decode_operations(batch, 4096 + 256)
        read = sum(each.weight_bytes for each in operations if each.by_expert)
        return read, sum(each.cache_bytes for each in operations)

    read, cached = seconds(found.bound_until)
    assert read >= cached
    read, cached = seconds(found.bound_until + 1)
    assert read < cached
    few = dataclasses.replace(_ONE.hardware, memory_bytes=_ONE.weight_bytes + 1e9)
    all_fit = mixtures.describe(dataclasses.replace(_ONE, hardware=few), 4096, 512)
    assert all_fit.then is None and all_fit.bound_until > 1


@pytest.mark.parametrize(
    ("num_experts", "top_k", "chips", "groups", "top_groups"),
    [(8, 2, 4, 1, 1), (8, 3, 2, 1, 1), (8, 2, 8, 4, 2), (8, 2, 4, 4, 2), (8, 3, 2, 4, 2)],
)
def test_who_visits_a_chip_is_counted(num_experts, top_k, chips, groups, top_groups):
    """Against all choices of groups and experts, one by one."""
    router = Router(num_groups=groups, top_groups=top_groups)
    experts = Experts(num_experts, top_k, 16, router)
    size, visited, total = num_experts // groups, 0, 0
    for chosen in itertools.combinations(range(groups), top_groups):
        eligible = [group * size + i for group in chosen for i in range(size)]
        for ids in itertools.combinations(eligible, top_k):
            total += 1
            visited += min(ids) < num_experts // chips  # the first chip's
    assert dispatch.chance_of_chip(experts, chips) == pytest.approx(visited / total)


def test_both_forms_of_exchange_by_hand():
    decode, prefill = dispatch.compare(_SWITCH, 64, 1024, 0)
    assert decode.name == "decode, batch 64"
    layers, tokens, D = 26, 8, 2048  # tokens of a chip
    row = 2 * D + 4 * D + 2 * 4 * 6  # there in bfloat16, back in float32, ids and weights
    latency = layers * 3 * 7 * _SWITCH.hardware.link_latency_s
    assert decode.gathered.bytes == pytest.approx(layers * 7 * tokens * row)
    assert decode.gathered.seconds == pytest.approx(decode.gathered.bytes / 450e9 + latency)
    share = 1 - math.comb(56, 6) / math.comb(64, 6)
    assert decode.sent.bytes == pytest.approx(layers * 7 * (tokens * share * row + 4))
    assert decode.sent.seconds == pytest.approx(decode.sent.bytes / 450e9 + latency)
    assert decode.saved == pytest.approx(
        (decode.gathered.seconds - decode.sent.seconds) / decode.step_s
    )
    assert prefill.saved > decode.saved > 0
    # Along a ring of eight a message takes up 16 / 7 links on average.
    ring = dispatch.compare(_RING, 64, 1024, 0)[0]
    slower = (ring.sent.seconds - layers * 21 * _RING.hardware.link_latency_s) * 100e9
    assert slower == pytest.approx(ring.sent.bytes * 16 / 7)
    assert ring.saved < 0


def test_advice_knows_experts_and_latents():
    found = advise.advise(_ONE, Workload(4096, 256, "latency"), 2, _ONE.formats)
    assert found.mixture.active_parameters < found.mixture.parameters / 6
    assert {each.mesh.expert > 1 for each in found.exchange} == {True}
    assert [cache.is_run for cache in found.caches] == [True, True, True, True, False]
    assert found.caches[-1].mesh.model > 1
    assert found.expanded_from == 168
    dense = Deployment(presets.get("llama3-8b").config, _ONE.hardware)
    found = advise.advise(dense, Workload(1024, 256), 2, dense.formats)
    assert (found.mixture, found.exchange, found.caches, found.expanded_from) == (
        None,
        (),
        (),
        None,
    )
