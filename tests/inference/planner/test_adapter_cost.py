"""Adapters' bytes are those of the engine's arrays, and their products those of its shapes."""

import dataclasses

import jax
import pytest

from configs import adapters, presets
from configs.engine import Config, EngineConfig
from configs.hardware import catalog
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.model import LayerSpec, ModelConfig
from configs.settings.adapters import AdapterConfig
from inference.planner import adapter_cost
from inference.planner.calibration import verify
from inference.planner.cost import Precision, Work
from inference.planner.deployment import Deployment
from inference.runtime import adapter_stacks
from inference.runtime.adapter_stacks import AdapterStacks
from tests import fakes

CHIP = catalog.get("h100")
# Three heads and one pair of keys and values: 3 x 64 rows of queries, 64 of each of the others.
THIN = ModelConfig(
    "thin", "llama", 64, width=16, num_layers=30, max_context=8192, dtype="bfloat16",
    pattern=(LayerSpec(Attention(3, 1, 64), Gated(48)),),
)  # fmt: skip
WIDTHS = 16 + 320 + 192 + 16 + 16 + 96 + 48 + 16  # of a layer's matrices: qkv, out, gate_up, down


def stacks_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", ["smollm2-135m", "qwen2.5-0.5b", "gemma3-270m", "llama3-8b"])
@pytest.mark.parametrize("rank", [1, 16, 37])
def test_predicted_slots_are_the_allocated_ones(name, rank):
    model, room = presets.get(name).config, AdapterConfig(5, rank)
    config = Config(model, EngineConfig(adapters=room))
    plan = Deployment(model, CHIP, adapters=room)
    assert plan.adapter_bytes == stacks_bytes(adapter_stacks.abstract(config))


def test_an_engine_allocates_as_many_bytes():
    model = fakes.llama(dtype="float32")
    config = Config(model, EngineConfig.of(slots=3, rank=4))
    arrays = AdapterStacks(config).empty()
    assert stacks_bytes(arrays) == adapters.num_bytes(model, config.engine.adapters) > 0
    total, _ = verify.predicted_bytes(model, config.engine.adapters)
    assert total - verify.predicted_bytes(model)[0] == stacks_bytes(arrays)


def test_slots_are_part_of_the_memory():
    room = AdapterConfig(8, 64)
    plain, adapted = (
        Deployment(presets.get("llama3-8b").config, CHIP, adapters=slots)
        for slots in (AdapterConfig(), room)
    )
    before, after = plain.row(4, 1024), adapted.row(4, 1024)
    assert after.memory_bytes - before.memory_bytes == adapted.adapter_bytes > 2.6e9
    assert after.chip_bytes - before.chip_bytes == adapted.adapter_bytes
    lost = plain.largest_batch(1024) - adapted.largest_batch(1024)
    assert lost == pytest.approx(adapted.adapter_bytes / plain.cache_bytes(1024), abs=1)


def test_products_by_hand():
    """12 tokens with 5 adapters: the factors of each are read once, and a token's multiplied."""
    room = AdapterConfig(64, 16)
    slot_bytes = 2 * adapters.num_elements(THIN, room)
    (product,) = adapter_cost.operations(THIN, room, 12, 5, Precision.of(THIN))
    ranks = 5 * adapters.RANK_BYTES * len(adapters.adaptable(THIN))
    assert product.weight_bytes == 5 * slot_bytes
    assert adapters.num_bytes(THIN, AdapterConfig(5, 16)) == 5 * slot_bytes + ranks
    assert product.flops == 12 * slot_bytes  # two for each element of two bytes
    assert product.rows == 12 / 5
    assert product.activation_bytes == 2 * 12 * 30 * WIDTHS


def test_no_more_adapters_than_tokens_and_none_of_none():
    room, precision = AdapterConfig(64, 8), Precision.of(THIN)
    many, three, none = (
        adapter_cost.operations(THIN, room, 3, number, precision) for number in (64, 3, 0)
    )
    assert many == three and none == ()


def test_more_adapters_and_higher_ranks_take_longer():
    model = presets.get("llama3-8b").config

    def added(rank: int, number: int) -> float:
        plan = Deployment(model, CHIP, adapters=AdapterConfig(32, rank))
        return plan.adapter_seconds(Work.decode(32, 1024), number)

    assert added(16, 0) == 0
    by_number = [added(16, n) for n in (1, 2, 8, 32)]
    assert by_number == sorted(by_number) and by_number[-1] > 8 * by_number[0]
    assert added(16, 8) < added(64, 8) < 4.01 * added(16, 8)


def test_verified_steps_have_adapters_where_there_is_room():
    room = AdapterConfig(4, 8)
    points = verify.points(THIN, room)
    assert set(verify.points(THIN)) < set(points)
    added = [point for point in points if point.num_adapters]
    sizes = [(point.rows, point.num_adapters) for point in added]
    assert sizes == [(1, 1), (2, 2), (8, 4), (32, 4), (0, 1)]
    for point in added:
        operations, _ = point.sample
        plain, _ = dataclasses.replace(point, num_adapters=0).sample
        assert [operation.name for operation in operations[len(plain) :]] == ["adapters"]
        assert operations[: len(plain)] == plain and "adapters" in point.size
