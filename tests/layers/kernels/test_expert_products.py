"""Hopper's mixtures of few tokens, interpreted, beside float64 and XLA's."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.model import LayerSpec, ModelConfig
from layers import params, quantized
from layers.backends import backends
from layers.backends.backend import Backend
from layers.feed_forwards import experts
from layers.kernels.device import Device
from layers.kernels.experts import gpu
from layers.kernels.linear import low_bit, skinny_gpu
from layers.ragged import Ragged, Rectangle
from layers.registry import StepContext
from tests import compiling
from tests.interpreted import HOPPER, check_races, threads_are_compiled_once  # noqa: F401

pytestmark = pytest.mark.quick_code

FORMATS = "bfloat16", "int8", "fp8", "int4", "int4_asym_g64", "mxfp4"


@dataclasses.dataclass(frozen=True)
class _Mixtures(Backend):
    """Hopper's mixtures, and XLA for the rest."""

    interpret: object = HOPPER

    def mixture(self, kind, num_tokens, gate_up, down):
        assert gpu.can_mix(kind, num_tokens, gate_up, down)
        return functools.partial(gpu.mix, kind, interpret=self.interpret)


@pytest.fixture(autouse=True)
def few_cores(monkeypatch):
    """A cluster has several tiles then, and a block of it several steps."""
    device = Device("gpu", "NVIDIA H200", 2)
    monkeypatch.setattr(skinny_gpu, "target_device", lambda: device)


def _stack(generator, shape, format):
    """A stack as the kernel reads it, and its numbers in float64."""
    values = generator.standard_normal(shape).astype(np.float32)
    if format == "bfloat16":
        stack = jnp.asarray(values, jnp.bfloat16)
        return stack, np.asarray(stack, np.float64)
    blocks = quantized.quantize(format, values.reshape(-1, shape[-1]))
    numbers = quantized.dequantize(format, blocks, shape[-1])
    w = low_bit.of_blocks(blocks.reshape(*shape[:-1], -1), format, shape[-1], "bfloat16", np.uint16)
    return w, np.asarray(numbers, np.float64).reshape(shape)


@functools.partial(jax.jit, static_argnames=("num_blocks", "weighs_inputs", "interpret"))
def _products(x_WD, up, down, used, factors_EW, bias_EF, num_blocks, weighs_inputs, interpret):
    hidden_BWF = skinny_gpu.expert_products(
        x_WD, up, used, num_blocks, skinny_gpu.GATES["silu"], factors_EW, bias_EF, top_k=2,
        weighs_inputs=weighs_inputs, interpret=interpret,
    )  # fmt: skip
    return hidden_BWF, skinny_gpu.sum_of_products(
        hidden_BWF, len(x_WD), down, used, interpret=interpret
    )


def check(
    format, num_tokens, counts, sizes, seed, weighs_inputs=False, has_bias=False, interpret=HOPPER
):
    """Of tokens of which `counts[e]` are routed to expert e."""
    (D, F), E, W = sizes, len(counts), -(-num_tokens // 8) * 8
    generator = np.random.default_rng(seed)
    factors_EW = np.zeros((E, W), np.float32)
    for e, count in enumerate(counts):
        tokens = generator.choice(num_tokens, count, replace=False)
        factors_EW[e, tokens] = generator.uniform(0.1, 1, count)
    (used_B,) = np.asarray(counts).nonzero()
    used = np.full(E + 4, E, np.int32)
    used[: len(used_B) + 1] = [len(used_B), *used_B]
    up, up_EFD = _stack(generator, (E, 2 * F, D), format)
    down, down_EDF = _stack(generator, (E, D, F), format)
    bias_EF = generator.standard_normal((E, 2 * F)).astype(np.float32) if has_bias else None
    x_WD = jnp.asarray(generator.standard_normal((num_tokens, D)), jnp.bfloat16)
    assert skinny_gpu.can_gate(num_tokens, up) and skinny_gpu.can_sum(num_tokens, down)
    hidden_BWF, out_WD = _products(
        x_WD, up, down, used, factors_EW, bias_EF, E, weighs_inputs, interpret
    )
    expected_WD, size_WD = np.zeros((2, num_tokens, D))
    for b, e in enumerate(used_B):
        factor_W1 = factors_EW[e, :num_tokens, None].astype(np.float64)
        before, behind = (factor_W1, factor_W1 != 0) if weighs_inputs else (1, factor_W1)
        y_WF = np.asarray(x_WD, np.float64) @ up_EFD[e].T * before
        gate_WF, up_WF = np.split(y_WF + (0 if bias_EF is None else bias_EF[e]), 2, axis=1)
        hidden_WF = gate_WF / (1 + np.exp(-gate_WF)) * up_WF * behind
        assert not hidden_BWF[b, num_tokens:].any()
        rounded_WF = np.asarray(hidden_BWF[b, :num_tokens], np.float64)
        error_WF = np.abs(rounded_WF - hidden_WF)
        assert (error_WF <= 2**-8 * np.abs(hidden_WF) + 1e-5 * D).all()
        assert not rounded_WF[factors_EW[e, :num_tokens] == 0].any()
        expected_WD += rounded_WF @ down_EDF[e].T
        size_WD += np.abs(rounded_WF) @ np.abs(down_EDF[e].T)
    assert (np.abs(out_WD - expected_WD) <= 2e-6 * size_WD).all()
    check_races(interpret)


CASES = [  # format, num_tokens, counts, options
    ("bfloat16", 9, [0, 3, 9, 0, 1], {}),
    ("int4", 5, [2, 0, 4], {}),
    pytest.param("bfloat16", 3, [0, 0, 3], {"has_bias": True}, marks=pytest.mark.long),
    pytest.param("bfloat16", 2, [0, 0, 0], {}, marks=pytest.mark.long),
    pytest.param("int8", 5, [2, 0, 4], {"weighs_inputs": True}, marks=pytest.mark.long),
    pytest.param("mxfp4", 5, [2, 0, 4], {}, marks=pytest.mark.long),
]  # fmt: skip


@pytest.mark.parametrize("format, num_tokens, counts, options", CASES)
def test_products_with_experts_equal_float64(format, num_tokens, counts, options):
    """Experts without rows, all rows with one expert, and no rows."""
    check(format, num_tokens, counts, (256, 256), 0, **options)


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("format, num_rows", [("bfloat16", 64), ("int8", 64), ("int4", 32)])
def test_stages_fill_the_shared_memory_of_a_block(format, num_rows, is_gated, monkeypatch):
    """Half a multiprocessor's, 2 KiB for barriers aside: one more would not fit."""
    scratch_of, plans = skinny_gpu._scratch, []

    class PlannedError(Exception):
        pass

    def stop(block, weights):
        plans.append((block.plan.stages, scratch_of(block, weights)))
        raise PlannedError

    def num_bytes(array):
        return math.prod(array.shape) * array.dtype.itemsize

    monkeypatch.setattr(skinny_gpu, "_scratch", stop)
    w, _ = _stack(np.random.default_rng(0), (2, 256, 2048), format)
    x_WD, factors_EW = jnp.zeros((num_rows, 2048), jnp.bfloat16), jnp.zeros((2, num_rows))
    matrices, gate = jnp.zeros(6, jnp.int32), skinny_gpu.GATES["silu"]
    with pytest.raises(PlannedError):
        if is_gated:
            skinny_gpu.expert_products(x_WD, w, matrices, 2, gate, factors_EW, top_k=1)
        else:
            skinny_gpu.sum_of_products(x_WD[None], num_rows, w, matrices)
    ((stages, scratch),) = plans
    stage_bytes = sum(map(num_bytes, scratch["buffers"].values())) // stages
    room = (208 // 2 - 2 << 10) - num_bytes(scratch["out_smem"])
    assert stages == room // stage_bytes == (3 if format == "bfloat16" and is_gated else 2)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(500))
def test_random_products_with_experts_equal_float64(seed):
    """Of 40 shapes."""
    generator = np.random.default_rng([450, seed % 40])
    format = str(generator.choice(FORMATS))
    num_tokens, num_experts = int(generator.integers(1, 25)), int(generator.integers(1, 7))
    if format == "mxfp4":  # with more there are no registers for a gate
        num_tokens = min(num_tokens, 16)
    sizes = tuple(256 * generator.integers(1, 3, 2))
    has_bias, weighs_inputs = (generator.random(2) < 0.3).tolist()
    generator = np.random.default_rng(seed)
    counts = generator.integers(0, num_tokens + 1, num_experts)
    counts *= generator.random(num_experts) < 0.7
    check(format, num_tokens, counts.tolist(), sizes, seed, weighs_inputs, has_bias)


KINDS = {
    "qwen3": Experts(12, 4, 64),
    "deepseek": Experts(
        16, 3, 64, Router("sigmoid", num_groups=4, top_groups=2, group_best=2, has_offsets=True,
                          scale=2.5), shared_width=64,
    ),
    "gpt-oss": Experts(
        8, 2, 64, Router(has_bias=True), activation="quick_gelu", has_bias=True, limit=1.5,
        up_offset=1.0,
    ),
    "llama4": Experts(8, 1, 64, Router("sigmoid", is_normalized=False), weighs_inputs=True),
    "step": Experts(8, 2, 64, late_limits=(0.5, None)),
}  # fmt: skip


def _model(kind):
    layer = LayerSpec(Attention(4, 2, 6), kind)
    return ModelConfig("m", "llama", 31, 128, 1, 64, (layer,), dtype="bfloat16")


def _applied(kind, weights, x_TD, valid_T, backend=None):
    model = _model(kind)
    position_YW = jnp.zeros((len(x_TD), 1), jnp.int32)

    def apply(weights, x_TD, valid_T):
        rectangle = Rectangle(jnp.zeros(len(x_TD), jnp.int32), position_YW, valid_T[:, None], ())
        spec = model.pattern[0].mixer.cache(model)
        context = StepContext(Ragged((rectangle,)), None, spec, 0, True, False)
        return experts.apply(weights, model, kind, x_TD, context)

    with backends.use(backend):
        return compiling.call(apply, weights, x_TD, valid_T)


def check_mixture(name, interpret=HOPPER):
    kind, generator = KINDS[name], np.random.default_rng(7)
    weights = params.init(kind.parameters(_model(kind)), 3)
    for group in (weights, weights["experts"]):
        for path in {"router_bias", "router_offsets", "gate_up_bias", "down_bias"} & group.keys():
            values = generator.standard_normal(group[path].shape) * 0.3
            group[path] = jnp.asarray(values, group[path].dtype)
    x_TD = generator.standard_normal((6, 128)).astype(np.float32)
    valid_T = np.array([True, True, False, True, True, False])
    out_TD, routed = _applied(kind, weights, x_TD, valid_T, _Mixtures(interpret=interpret))
    expected_TD, expected = _applied(kind, weights, x_TD, valid_T, backends.XLA)
    np.testing.assert_array_equal(routed.num_tokens, expected.num_tokens)
    np.testing.assert_allclose(routed.share, expected.share, rtol=1e-5)
    # Either side rounds hidden numbers to bfloat16, so a sum may be off by 2^-8 of its terms'
    # sizes. Of up to four experts these are at most four times the largest result.
    bound = 2**-8 * 4 * np.abs(expected_TD[valid_T]).max()
    np.testing.assert_allclose(out_TD[valid_T], expected_TD[valid_T], rtol=0, atol=bound)
    other_TD = np.concatenate([x_TD[:1], generator.standard_normal((19, 128), np.float32)])
    backend = _Mixtures(interpret=interpret)
    again_TD, _ = _applied(kind, weights, other_TD, np.ones(20, bool), backend)
    np.testing.assert_array_equal(again_TD[0], out_TD[0])


@pytest.mark.parametrize("name", [
    "deepseek", "gpt-oss", *(pytest.param(name, marks=pytest.mark.long)
                             for name in ("qwen3", "llama4", "step")),
])  # fmt: skip
def test_a_mixture_by_kernels_equals_xlas(name):
    """With padding; and a token's bits do not depend on the others."""
    check_mixture(name)
