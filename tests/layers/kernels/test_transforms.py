"""Packed products and the native library's attention under JAX's transformations: the same bits."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import serialize_executable
from jax.sharding import PartitionSpec as P

from configs.errors import InputError
from configs.precision import FORMATS
from layers import page_rows
from layers.kernels.attention import ffi_cpu
from layers.kernels.linear import packed
from layers.linear import linear
from layers.ragged import Ragged
from tests.layers import native, paged_case

ROOT = Path(__file__).resolve().parents[3]
DTYPES = "float32", "bfloat16"
_SHARDED = "bfloat16", "q4_0"


def _drawn(seed, *shape, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def _packed(seed, F, D, format):
    if format not in packed.BLOCKS:
        return packed.pack(_drawn(seed, F, D, dtype=format))
    size = int(FORMATS[format].bytes_for(D, D))
    blocks = np.random.default_rng(seed).integers(0, 60, (F, size), np.uint8)  # finite scales
    return packed.pack_rows(blocks, format, (F, D))


def _attention(dtype="float32"):
    """A case and attention over it, of (q, pages, rectangle)."""
    case = paged_case.Case((70, 150, 131), (6, 2), 16, 3, dtype, 0, 64, 1 / 8)
    native.need(case.page_format)
    return case, functools.partial(ffi_cpu.attend_pages, group=0, page_format=case.page_format)


@pytest.mark.parametrize("weights", [*DTYPES, "q4_0"])
def test_vmap(weights):
    native.need()
    x_BTD = _drawn(0, 3, 5, 96)
    matrices = [_packed(seed, 40, 96, weights) for seed in range(3)]
    each = [[np.asarray(jax.jit(linear)(x, w)) for x in x_BTD] for w in matrices]
    found = jax.jit(jax.vmap(linear, (0, None)))(x_BTD, matrices[0])
    np.testing.assert_array_equal(found, each[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *matrices)
    found = jax.jit(jax.vmap(linear))(x_BTD, stacked)
    np.testing.assert_array_equal(found, [each[i][i] for i in range(3)])


def test_vmap_of_attention():
    case, attend = _attention()
    q_YWNH, pages, rectangle = case.arguments
    q_BYWNH = np.stack([q_YWNH, 2 * q_YWNH])
    found = jax.jit(jax.vmap(attend, (0, None, None)))(q_BYWNH, pages, rectangle)
    for q, one in zip(q_BYWNH, found, strict=True):
        np.testing.assert_array_equal(jax.jit(attend)(q, pages, rectangle), one)


def test_attention_reads_no_page_that_is_not_there():
    """Whatever a table or a position says."""
    case, attend = _attention()
    q_YWNH, pages, rectangle = case.arguments
    wild = jax.tree.map(lambda table: jnp.full_like(table, 1 << 30), rectangle.tables)
    for tables in (wild, jax.tree.map(jnp.negative, wild)):
        jax.block_until_ready(attend(q_YWNH, pages, dataclasses.replace(rectangle, tables=tables)))
    far = dataclasses.replace(
        rectangle, position_YW=jnp.full_like(rectangle.position_YW, (1 << 31) - 1)
    )
    jax.block_until_ready(attend(q_YWNH, pages, far))
    with native.refused("do not go together"):
        jax.block_until_ready(attend(q_YWNH, pages[:, :0], rectangle))


def test_gradients_are_refused_in_one_line():
    """Training keeps XLA's path."""
    case, attend = _attention()
    x_TD, w = _drawn(0, 3, 96), packed.pack(_drawn(1, 40, 96))
    product = jax.grad(lambda x_TD, w: linear(x_TD, w).sum(), argnums=(0, 1))
    attention = jax.grad(lambda *arguments: attend(*arguments).sum())
    for gradient, arguments in ((product, (x_TD, w)), (attention, case.arguments)):
        for transformed in (gradient, jax.jit(gradient)):
            with pytest.raises(
                InputError, match="no gradients: train with engine.kernels.linear=ref"
            ):
                transformed(*arguments)


@pytest.mark.parametrize("weights", DTYPES)
def test_an_input_may_be_donated(weights):
    """Its memory is no place for the product, which has its shape."""
    native.need()
    x_TD, w = _drawn(0, 33, 96), packed.pack(_drawn(1, 96, 96, dtype=weights))
    expected = np.asarray(jax.jit(linear)(x_TD, w))
    given = jax.device_put(x_TD)
    found = jax.jit(lambda x_TD, w: linear(x_TD * 1, w), donate_argnums=0)(given, w)
    assert given.is_deleted()
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_donated_pages_are_written_and_read_in_place(dtype):
    case, attend = _attention(dtype)
    q_YWNH, pages, rectangle = case.arguments
    row_YWX, poisoned = paged_case.take_newest(pages, rectangle)
    row_TX = row_YWX.reshape(-1, *row_YWX.shape[2:])

    @functools.partial(jax.jit, donate_argnums=1)
    def step(q_YWNH, pages, rectangle, row_TX):
        pages = page_rows.write(pages, row_TX, Ragged((rectangle,)), 0)
        return attend(q_YWNH, pages, rectangle), pages

    given = jnp.array(poisoned)
    address = given.unsafe_buffer_pointer()
    found, written = step(q_YWNH, given, rectangle, row_TX)
    assert given.is_deleted() and written.unsafe_buffer_pointer() == address
    expected = jax.jit(attend)(q_YWNH, pages, rectangle)
    np.testing.assert_array_equal(found, expected)


def _programs():
    """Functions and their arguments, equal in every process."""
    case, attend = _attention("bfloat16")
    x_TD = _drawn(0, 33, 96, dtype="bfloat16")
    weights = {format: (linear, (x_TD, _packed(0, 128, 96, format))) for format in _SHARDED}
    extremes = case.arguments[1].reshape(-1, 2, 8 * 256)[..., : 2 * 64]

    def bounds(*arguments):  # of the pages that every row has
        return ffi_cpu.page_bounds(*arguments, case.page_format)[..., :5]

    bounded = case.arguments[0], extremes, case.arguments[2].tables[0], jnp.array([5, 9, 8])
    return {"attend": (attend, case.arguments), "bounds": (bounds, bounded)} | weights


def load_executables(folder):
    """Runs, in a process of four devices, what another one compiled; then products on a mesh."""
    devices, programs = jax.devices(), _programs()
    for name, (function, arguments) in programs.items():
        trees = jax.tree.structure((arguments, {})), jax.tree.structure(0)
        content = (folder / name).read_bytes()
        executable = serialize_executable.deserialize_and_load(
            content, *trees, execution_devices=devices[:1]
        )
        expected = np.load(folder / f"{name}.npy")
        np.testing.assert_array_equal(executable(*arguments), expected)
        np.testing.assert_array_equal(jax.jit(function)(*arguments), expected)

    mesh = jax.sharding.Mesh(np.array(devices), ("model",))
    sharded = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P("model")), check_vma=False
    )
    product = sharded(linear, out_specs=P(None, "model"))
    lookup = sharded(lambda ids_T, w: packed.rows(w, ids_T), out_specs=P())
    for format in _SHARDED:
        x_TD, w = programs[format][1]
        expected = np.load(folder / f"{format}.npy")
        w = jax.device_put(w, jax.sharding.NamedSharding(mesh, P("model")))
        assert len(w.data.addressable_shards) == 4
        for function in (product, linear):  # each device's own features, or what XLA makes of it
            executable = jax.jit(function).lower(x_TD, w).compile()
            assert ("all-gather" in executable.as_text()) == (function is linear)
            np.testing.assert_array_equal(executable(x_TD, w), expected)
        with pytest.raises(ValueError, match="not in a shard"):
            jax.jit(lookup)(jnp.arange(3), w)

    # Each device's rows meet its own two experts; what is behind them is padding.
    x_XD, sizes_E = _drawn(2, 48, 64), np.array([10, 0, 3, 6, 0, 12, 5, 5], np.int32)
    w_EFD = _drawn(3, 8, 50, 64, dtype="bfloat16")
    experts = jax.shard_map(
        packed.grouped_product, mesh=mesh, in_specs=P("model"), out_specs=P("model"),
        check_vma=False,
    )  # fmt: skip
    found = np.asarray(jax.jit(experts)(x_XD, packed.pack(w_EFD), sizes_E))
    for device in range(4):
        rows, own = slice(12 * device, 12 * device + 12), slice(2 * device, 2 * device + 2)
        alone = packed.grouped_product(x_XD[rows], packed.pack(w_EFD[own]), sizes_E[own])
        np.testing.assert_array_equal(found[rows], alone)


def _elsewhere(folder, **environment):
    code = (
        f"from tests.layers.kernels import {Path(__file__).stem} as here; from pathlib import Path"
    )
    environment = os.environ | environment | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", f"{code}\nhere.load_executables(Path({str(folder)!r}))"],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_executables_are_loaded_elsewhere_and_features_are_sharded(tmp_path):
    for name, (function, arguments) in _programs().items():
        executable = jax.jit(function).lower(*arguments).compile()
        (tmp_path / name).write_bytes(serialize_executable.serialize(executable)[0])
        np.save(tmp_path / f"{name}.npy", executable(*arguments))
    done = _elsewhere(tmp_path, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert done.returncode == 0, done.stderr
