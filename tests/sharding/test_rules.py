"""What each chip holds of a parameter."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from configs import presets
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.params import ParamInfo, leaves
from configs.mesh import Mesh
from configs.model import ModelConfig
from layers import params
from sharding import mesh as meshes
from sharding import rules
from tests import fakes

_HEADS = [(4, 2, 2), (9, 3, 2), (9, 3, 8), (24, 3, 8), (8, 8, 8), (16, 8, 4), (8, 1, 3), (5, 5, 4)]


@pytest.mark.parametrize("N, K, chips", _HEADS)
def test_each_query_head_lies_on_one_chip_beside_its_kv_head(N, K, chips):
    kind = Attention(num_heads=N, num_kv_heads=K, head_width=8)
    own, heads, kv_heads = (
        kind.per_chip(chips),
        *(kind.shares(axis, chips) for axis in ("heads", "kv_heads")),
    )
    assert [head for chip in heads for head in chip] == list(range(N))
    assert {head for chip in kv_heads for head in chip} == set(range(K))
    group = own.num_heads // own.num_kv_heads
    for queries, keys in zip(heads, kv_heads, strict=True):
        assert len(queries) <= own.num_heads and len(keys) <= own.num_kv_heads
        for nth, head in enumerate(queries):
            assert keys[nth // group] == head // (N // K)


@pytest.mark.parametrize(
    "model",
    [
        *(fakes.llama(), fakes.gemma(), fakes.quirks(), fakes.gemma4()),
        *(fakes.jamba(), fakes.delta(), fakes.linear(), fakes.side_by_side()),
    ],
    ids=str,
)
@pytest.mark.parametrize("chips", [2, 3, 4])
def test_parts_have_the_shapes_of_a_chip_and_hold_everything(model: ModelConfig, chips):
    declared = params.flatten(model.parameters())
    local = params.flatten(model.per_chip(chips).parameters())
    generator = np.random.default_rng(0)
    for path, info in declared.items():
        values = 1 + generator.random(info.shape, np.float32)
        parts = [
            rules.part(model, path, info, values, Mesh(model=chips), 0, chip)
            for chip in range(chips)
        ]
        assert {part.shape for part in parts} == {local[path].shape}
        is_divided = bool(rules.mesh_axes(path, info))
        held = np.unique(np.concatenate([part.ravel() for part in parts]))
        assert set(np.unique(values)) == set(held) - {0}
        if is_divided and not info.kv_heads:
            assert sum(part.sum() for part in parts) == pytest.approx(values.sum(), rel=1e-5)


@pytest.mark.parametrize("size, chips", [(18, 2), (18, 3), (34, 3)])
def test_columns_of_blocks_are_bytes(size, chips):
    """Of q4_0 and q8_0, 32 columns a block."""
    model = fakes.llama().with_kinds(width=32 * 6)
    info = params.flatten(model.parameters())["layers/0/ffn/down"]
    blocks = np.arange(24 * 6 * size, dtype=np.uint32).reshape(24, -1).astype(np.uint8)
    parts = [
        rules.part(model, "layers/0/ffn/down", info, blocks, Mesh(model=chips), 0, c)
        for c in range(chips)
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), blocks)


@pytest.mark.parametrize("name", presets.NAMES)
def test_every_declared_axis_has_a_rule(name):
    for path, info in leaves(presets.get(name).config.parameters()):
        rules.mesh_axes("/".join(path), info)


def test_a_contradiction_names_the_parameter():
    with pytest.raises(InputError, match="layers/0/x: chips would divide two of its axes"):
        rules.mesh_axes("layers/0/x", ParamInfo((2, 2), "float32", ("heads", "ffn")))
    with pytest.raises(InputError, match="layers/0/x: no rule divides the axis 'y'; known: vocab"):
        rules.mesh_axes("layers/0/x", ParamInfo((2,), "float32", ("y",)))


def test_a_spec_names_the_axes_that_chips_divide():
    mesh = meshes.of(Mesh(data=2, context=2, model=2))
    assert mesh is not None
    spec = PartitionSpec("data", None, ("model", "context"))
    array = meshes.put(mesh, spec, lambda group, chip: np.full((3, 4, 5), 4 * group + chip))
    assert array.shape == (6, 4, 20) and array.sharding.spec == spec
    rows = np.repeat(np.arange(8).reshape(2, 4), 5, axis=1)
    np.testing.assert_array_equal(array[::3, 0], rows)
    shape = meshes.spread(mesh, jax.ShapeDtypeStruct((3, 4, 5), int), spec)
    assert (shape.shape, shape.sharding) == (array.shape, array.sharding)
    alike = meshes.put(mesh, PartitionSpec(), lambda group, chip: np.arange(5))
    assert alike.shape == (5,) and alike.sharding.is_fully_replicated
    added = meshes.jitted(mesh, lambda x: x + jax.lax.axis_index("context"), (spec,), spec)(array)
    np.testing.assert_array_equal(added[::3, 0], rows + rows % 2)
    assert added.sharding == array.sharding


def test_a_mesh_needs_its_chips():
    with pytest.raises(InputError, match="mesh model=9 takes 9 chips, here are 8"):
        meshes.of(Mesh(model=9))


@pytest.mark.parametrize(("format", "num_bytes"), [("q4_k", 144), ("q6_k", 210), ("iq4_xs", 136)])
def test_columns_are_divided_between_blocks_of_a_file(format, num_bytes):
    """These may be smaller in a file than where kernels read them."""
    model, path = fakes.llama(), "layers/0/ffn/down"
    for count in (4, 3):
        info = ParamInfo((5, 256 * count), format, ("embed", "ffn"))
        blocks = np.arange(5 * count * num_bytes).astype(np.uint8).reshape(5, -1)
        if count == 3:
            with pytest.raises(InputError, match="mesh.model=2 divides its rows of 768 within"):
                rules.part(model, path, info, blocks, Mesh(model=2), 0, 0)
            continue
        parts = [rules.part(model, path, info, blocks, Mesh(model=2), 0, chip) for chip in (0, 1)]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), blocks)
