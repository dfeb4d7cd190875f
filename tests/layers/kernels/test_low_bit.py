"""Arrays of few bits beside their blocks' numbers, in float64."""

import dataclasses
import functools
import math
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.mesh import Mesh
from configs.precision import FORMATS, PUBLISHED
from inference.checkpoints import load
from layers import decoder, params, quantized
from layers.kernels.linear import api, low_bit, low_bit_product
from layers.linear import each_linear, grouped_linear, linear
from layers.ragged import contiguous
from tests import compiling, fakes
from tests.layers import native
from tests.layers.kernels import test_scaled_floats

WEIGHT_ONLY = [name for name in quantized.OURS if FORMATS[name].activations is None]
ROUNDING = [name for name in quantized.OURS if FORMATS[name].activations is not None]


def drawn(format, *shape, seed=0, dtype="float32", word=np.uint8):
    """Random blocks as an array of few bits, and their numbers."""
    *rows, width = shape
    if format in PUBLISHED:
        blocks, numbers = test_scaled_floats.drawn(format, math.prod(rows), width, seed)
    else:
        values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
        blocks = quantized.quantize(format, values.reshape(-1, width))
        numbers = quantized.dequantize(format, blocks, width)
    return (
        low_bit.of_blocks(blocks.reshape(*rows, -1), format, width, dtype, word),
        numbers.reshape(shape).astype(np.float64),
    )


def tokens(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.quick_code
@pytest.mark.parametrize("format", quantized.OURS)
def test_rows_are_the_blocks_numbers_and_bytes_those_of_the_format(format):
    w, numbers = drawn(format, 37, 384)
    # By ids in any order; one beyond the ends is that row.
    found = compiling.call(low_bit.rows, w, jnp.array([*range(37), -7, 1 << 30]))
    np.testing.assert_array_equal(found[:37], numbers)
    np.testing.assert_array_equal(found[37:], numbers[[0, 36]])
    leaves = jax.tree.leaves(w)
    assert sum(leaf.nbytes for leaf in leaves) == round(FORMATS[format].bytes_for(37 * 384, 384))
    declared = low_bit.abstract((37, 384), format, "float32")
    chex.assert_trees_all_equal_shapes_and_dtypes(declared, w)


@pytest.mark.quick_code
@pytest.mark.parametrize("format", WEIGHT_ONLY)
def test_products_in_float32(format):
    """Of two blocks of rows, which are no whole 128 bytes of a plane."""
    D = 576 if FORMATS[format].group in (None, 32) else 640
    w, numbers = drawn(format, 600, D)
    x_TD = tokens(9, D)
    found = compiling.call(linear, x_TD, w)
    assert found.shape == (9, 600) and found.dtype == jnp.float32
    np.testing.assert_allclose(found, x_TD @ numbers.T, atol=2e-6 * D)


@pytest.mark.quick_code
@pytest.mark.parametrize("format", ["int8", "fp8", "int4", "int3_asym_g64", "fp8_block"])
def test_derivatives_of_products(format):
    """Of a matrix in two blocks of rows, and of a stack, one of whose matrices has no rows."""

    def pulled(multiply):
        return lambda x, y, *others: jax.vjp(lambda x: multiply(x, *others), x)[1](y)[0]

    w, numbers = drawn(format, 600, 640)
    x_TD, y_TF = tokens(9, 640), tokens(9, 600, seed=2)
    slope_TD = compiling.call(pulled(linear), x_TD, y_TF, w)
    np.testing.assert_allclose(slope_TD, y_TF @ numbers, atol=1e-3)
    w, numbers = drawn(format, 3, 48, 640)
    sizes_E, matrix_X = jnp.array([5, 0, 4]), [0] * 5 + [2] * 4
    multiply = functools.partial(grouped_linear, deterministic=False)
    slope_XD = compiling.call(pulled(multiply), x_TD, y_TF[:, :48], w, sizes_E)
    expected = np.einsum("xf,xfd->xd", y_TF[:, :48], numbers[matrix_X])
    np.testing.assert_allclose(slope_XD, expected, atol=1e-3)


@pytest.mark.parametrize("format", ["int8", "fp8", "int4", "int3_asym_g64"])
def test_products_in_bfloat16(format):
    """Both factors are rounded to eight bits of mantissa, unless integers are exact."""
    w, numbers = drawn(format, 100, 256, dtype="bfloat16")
    x_TD = tokens(9, 256)
    size = np.abs(x_TD) @ np.abs(numbers).T
    error = np.abs(jax.jit(linear)(x_TD, w) - x_TD @ numbers.T)
    assert (error < 2**-8 * size).all() and error.max() > 2**-14 * size.max()
    x_TD = np.asarray(x_TD.astype(jnp.bfloat16), np.float32)
    error = np.abs(jax.jit(linear)(x_TD, w) - x_TD @ numbers.T)
    assert (error < (2**-20 if FORMATS[format].bits == 8 else 2**-9) * size).all()


@pytest.mark.parametrize("format", ROUNDING)
def test_products_with_rounded_activations(format):
    w, numbers = drawn(format, 600, 512)
    x_TD = tokens(9, 512)
    x_TD[3], x_TD[4] = 0, x_TD[4] * 1e6
    top_T1 = np.abs(x_TD).max(1, keepdims=True)
    if format == "w8a8":
        scale_T1 = np.where(top_T1 == 0, 1, top_T1) / np.float32(127)
        rounded_TD = np.rint(x_TD / scale_T1)
    else:
        scale_T1 = np.where(top_T1 == 0, 1, top_T1) / np.float32(448)
        rounded_TD = (x_TD / scale_T1).astype(jnp.float8_e4m3fn).astype(np.float64)
    expected = rounded_TD * scale_T1.astype(np.float64) @ numbers.T
    size = np.abs(x_TD) @ np.abs(numbers).T + 1e-30
    error = np.abs(jax.jit(linear)(x_TD, w) - expected) / size
    # A quotient between two may go either way.
    assert np.median(error) < 1e-6 and error.max() < 1e-3
    found = np.asarray(jax.jit(linear)(x_TD, w))
    assert not found[3].any()
    x_TD[5, 7] = np.nan
    broken = np.asarray(jax.jit(linear)(x_TD, w))
    assert np.isnan(broken[5]).all()
    np.testing.assert_array_equal(np.delete(broken, 5, 0), np.delete(found, 5, 0))


@pytest.mark.parametrize("format, dtype", [
    ("fp8", "bfloat16"), ("w8a8", "float32"), ("int4", "float32"), ("int4_asym_g32", "bfloat16"),
])  # fmt: skip
def test_a_row_has_the_same_bits_in_any_company(format, dtype):
    if dtype == "bfloat16" and native.multiplies_by_amx():
        pytest.skip("XLA's products of bfloat16 by AMX: docs/determinism.md")
    w, _ = drawn(format, 600, 512, dtype=dtype)
    x_TD = tokens(40, 512)
    whole = np.asarray(jax.jit(linear)(x_TD, w))
    for some in (slice(1), slice(-33, None)):
        np.testing.assert_array_equal(jax.jit(linear)(x_TD[some], w), whole[some])


@pytest.mark.parametrize("format", ["fp8", "w8a8", "w8a8_fp8", "int4_asym_g32", "int3", "mxfp4"])
def test_a_matrix_is_never_expanded_whole(format):
    F, D = 4096, 1024
    declared = low_bit.abstract((F, D), format, "bfloat16")
    compiled = jax.jit(linear).lower(jnp.zeros((4, D)), declared).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.3 * F * D * 4
    declared = low_bit.abstract((8, F, D), format, "bfloat16")
    sizes_E = jnp.zeros(8, jnp.int32)
    lowered = jax.jit(grouped_linear, static_argnums=3).lower(
        jnp.zeros((4, D)), declared, sizes_E, False
    )
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 2.5 * F * D  # a matrix of bytes


@pytest.mark.parametrize(
    "format, deterministic", [("w8a8", False), ("int4_asym_g64", False), ("int3_g32", True)]
)
def test_groups_of_rows_meet_their_matrices(format, deterministic):
    w, _ = drawn(format, 4, 37, 128)
    matrices = [
        dataclasses.replace(jax.tree.map(operator.itemgetter(e), w), shape=(37, 128))
        for e in range(4)
    ]
    x_XD, product = tokens(40, 128), jax.jit(linear)
    grouped = jax.jit(grouped_linear, static_argnums=3)
    for sizes in ((1, 0, 1, 0), (17, 0, 3, 17), (0, 40, 0, 0)):
        found = np.asarray(grouped(x_XD, w, np.array(sizes, np.int32), deterministic))
        start = 0
        for own, size in zip(matrices, sizes, strict=True):
            rows = slice(start, start + size)
            np.testing.assert_array_equal(found[rows], product(x_XD[rows], own))
            start = rows.stop
        assert not found[start:].any()
    by_head = jax.jit(each_linear)(x_XD.reshape(10, 4, 128), w)
    for e, own in enumerate(matrices):
        np.testing.assert_array_equal(by_head[:, e], product(x_XD[e::4], own))


def test_what_does_not_fit_is_refused():
    w, _ = drawn("int4", 8, 256)
    for call in (
        lambda: low_bit_product.product(tokens(3, 128), w),
        lambda: low_bit_product.products(tokens(1, 3, 256), w, jnp.zeros(1, jnp.int32)),
        lambda: low_bit.rows(drawn("int4", 2, 8, 256)[0], jnp.zeros(1, jnp.int32)),
    ):
        with pytest.raises(ValueError, match="does not go|not in a stack"):
            call()
    blocks = quantized.quantize("int4", tokens(8, 256))
    for wrong, format, width in (
        (blocks[:, :-1], "int4", 256), (blocks, "int4", 128), (blocks, "q4_k", 256),
        (blocks.view(np.int8), "int4", 256), (blocks, "int4_g64", 256),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="blocks|bytes"):
            low_bit.of_blocks(wrong, format, width, "float32")


# --- in an engine ---------------------------------------------------------------------------------

_SIZES = dict(max_seqs=4, decode_rows=(4,), page_tokens=8, chunk_tokens=16, prefill_chunks=(2,),
              cache_bytes=1 << 20, linear="reference", attention="reference")  # fmt: skip


def _few_bits(model, format):
    """The model with its matrices in a format, their blocks, and the float32 model's numbers."""
    whole = fakes.real_params(model)
    found = params.flatten(model.parameters())
    values = params.flatten(whole, lambda node: isinstance(node, jax.Array))
    paths = [path for path in load.typed_paths(model) if found[path].is_matrix]
    blocks, numbers = dict(values), dict(values)
    for path in paths:
        matrix = np.asarray(values[path]).reshape(found[path].in_rows)
        own = quantized.quantize(format, matrix)
        blocks[path] = own.reshape(*values[path].shape[:-1], -1)
        expanded = quantized.dequantize(format, own, matrix.shape[1]).reshape(values[path].shape)
        numbers[path] = jnp.asarray(expanded)
    stored = dataclasses.replace(model, formats=tuple((path, (format,)) for path in paths))
    infos = model.parameters()
    return stored, *(params.unflatten(infos, leaves) for leaves in (blocks, numbers))


_MODELS = {
    "llama": (fakes.llama(width=64, num_heads=8).with_kinds(width=128), "int4_g32"),
    "deepseek": (
        fakes.deepseek(width=64).with_kinds(
            width=96, expert_width=64, shared_width=64, rank=32, query_rank=32, nope_width=32,
            value_width=32,
        ),
        "int4_asym_g32",
    ),
}  # fmt: skip


@pytest.mark.quick_code
@pytest.mark.parametrize("name", ["llama", pytest.param("deepseek", marks=pytest.mark.long)])
def test_an_engine_serves_int4(name):
    model, blocks, numbers = _few_bits(*_MODELS[name])
    prompts = fakes.prompts([5, 40, 17, 3], 131, seed=2)
    plain = dataclasses.replace(model, formats=())
    own = fakes.engine(model, blocks, "one", False, **_SIZES)
    whole = fakes.engine(plain, numbers, "one", False, **_SIZES)
    answers = [
        [output.token_ids for output in each.generate(prompts, fakes.greedy(9))]
        for each in (own, whole)
    ]
    assert answers[0] == answers[1]

    def logits(values, tokens_T, config):
        hidden_TD, _ = decoder.forward(values, config, tokens_T, contiguous(1, len(tokens_T)))
        return decoder.logits(values, config, hidden_TD)

    tokens_T = jnp.asarray(prompts[1])
    found = compiling.call(logits, own.model_runner.params, tokens_T, config=model)
    expected = compiling.call(logits, numbers, tokens_T, config=plain)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.quick_code
def test_chips_of_a_mesh_hold_their_parts():
    model, blocks, _ = _few_bits(*_MODELS["llama"])
    prompts = fakes.prompts([5, 40, 17, 3], 131, seed=2)
    found = []
    for mesh in (Mesh(), Mesh(model=2)):
        engine = fakes.engine(model, blocks, "one", False, mesh, top_logprobs=1, **_SIZES)
        found.append([
            (out.token_ids, [max(top.values()) for top in out.top_logprobs])
            for out in engine.generate(prompts, fakes.greedy(9))
        ])  # fmt: skip
    for (ids, logprobs), (others, their) in zip(*found, strict=True):
        assert ids == others
        np.testing.assert_allclose(logprobs, their, atol=1e-4)


def test_weights_are_replaced_by_blocks_and_by_what_another_engine_has():
    model, blocks, _ = _few_bits(*_MODELS["llama"])
    config = Config(model, EngineConfig.of(**_SIZES))
    infos = decoder.param_infos(model)
    packed = api.pack_params(config, blocks, infos)
    again = api.copy_params(config, packed)
    chex.assert_trees_all_equal(again, packed)
    assert jax.tree.structure(api.abstract(config, infos)) == jax.tree.structure(packed)
    native = dataclasses.replace(config, engine=EngineConfig.of(linear="ffi_cpu"))
    with pytest.raises(
        InputError, match="arrays of few bits go with engine.kernels.linear=reference"
    ):
        api.copy_params(native, packed)
    wrong = dataclasses.replace(model, formats=(("layers/0/ffn/down", ("q4_0",)),))
    with pytest.raises(InputError, match="multiplies no weights in q4_0; valid: int8"):
        api.abstract(dataclasses.replace(config, model=wrong), decoder.param_infos(wrong))


@pytest.mark.quick_code
@pytest.mark.parametrize("format", quantized.OURS)
def test_random_weights_are_drawn_as_they_lie(format):
    """Finite, and of about the size of those that are rounded."""
    w = compiling.call(
        lambda key: low_bit.random(key, (64, 1024), format, "bfloat16"), jax.random.key(1)
    )
    assert jax.tree.map(jax.typeof, w) == jax.tree.map(
        lambda leaf: jax.typeof(jnp.zeros(leaf.shape, leaf.dtype)),
        low_bit.abstract((64, 1024), format, "bfloat16"),
    )
    numbers = np.asarray(compiling.call(low_bit.numbers, w)) * 1024**0.5
    assert 0.3 < np.std(numbers) < 1.5 and np.abs(numbers).max() <= 2
