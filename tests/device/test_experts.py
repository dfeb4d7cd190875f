"""Products with experts' matrices and mixtures on the device at hand, beside float64 and XLA, and a
model with latents and experts that decodes with the device's kernels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Latent
from configs.model import LayerSpec, ModelConfig
from inference.engine import Engine
from layers.backends import backends
from layers.kernels.attention import api as attention
from layers.kernels.device import target_device
from layers.kernels.linear import grouped
from tests.device.answers import check_engine
from tests.device.hopper import hopper  # noqa: F401
from tests.layers.kernels import test_expert_products, test_routing

pytestmark = pytest.mark.device

_SIZES = {  # E, F, D of gate and up, and of down
    "qwen3-30b-a3b": ((128, 1536, 2048), (128, 2048, 768)),
    "deepseek-v2-lite": ((64, 2816, 2048), (64, 2048, 1408)),
}


@pytest.mark.parametrize("num_rows", [8, 48, 512, 2400])
@pytest.mark.parametrize("model", _SIZES)
def test_a_grouped_product_equals_float64(model, num_rows):
    """Uneven groups, some empty, rows behind the last one; the same bits again."""
    for E, F, D in _SIZES[model]:
        generator = np.random.default_rng(num_rows)
        share_E = generator.random(E) ** 4 * (generator.random(E) > 0.3)
        sizes_E = generator.multinomial(num_rows - 3, share_E / share_E.sum())
        expert_X = np.repeat(np.arange(E), sizes_E)
        x_XD = jnp.asarray(generator.standard_normal((num_rows, D)), jnp.bfloat16)
        w_EFD = jax.random.normal(jax.random.key(num_rows), (E, F, D), jnp.bfloat16)
        kernel = backends.current().grouped_product(w_EFD)
        multiply = jax.jit(functools.partial(grouped.grouped_product, kernel=kernel))
        found_XF = np.asarray(multiply(x_XD, w_EFD, jnp.asarray(sizes_E, jnp.int32)))
        x_XD64 = np.asarray(x_XD, np.float64)
        asked_X = generator.choice(num_rows - 3, 5)
        for row in asked_X:
            w_FD = np.asarray(w_EFD[expert_X[row]], np.float64)
            error_F = np.abs(found_XF[row] - w_FD @ x_XD64[row])
            size_F = np.abs(w_FD) @ np.abs(x_XD64[row])
            # Sums leave Hopper's kernel in bfloat16.
            assert (error_F <= 2**-8 * np.abs(w_FD @ x_XD64[row]) + 2e-6 * size_F).all()
        assert not found_XF[num_rows - 3 :].any()
        again_XF = np.asarray(multiply(x_XD, w_EFD, jnp.asarray(sizes_E, jnp.int32)))
        np.testing.assert_array_equal(again_XF, found_XF)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("num_tokens, num_experts, top_k", [(5, 72, 6), (64, 128, 8), (1, 32, 4)])
@pytest.mark.parametrize("name", test_routing.ROUTERS)
def test_routing_of_few_tokens(name, num_tokens, num_experts, top_k):
    router = test_routing.ROUTERS[name]
    test_routing.check(router, num_tokens, num_experts, top_k, 0, interpret=None)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("format, num_tokens, counts, options", test_expert_products.CASES)
def test_products_of_few_tokens(format, num_tokens, counts, options):
    for sizes in ((256, 256), (2048, 768)):
        test_expert_products.check(format, num_tokens, counts, sizes, 0, **options, interpret=None)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", test_expert_products.KINDS)
def test_a_mixture_equals_xlas(name):
    test_expert_products.check_mixture(name, interpret=None)


def test_an_engine_with_latents_and_experts_answers_as_by_xla():
    latent = Latent(16, rank=128, rope_width=64, nope_width=32, value_width=32)
    model = ModelConfig(
        "device-experts", "deepseek_v3", 131, width=256, num_layers=2, max_context=512,
        pattern=(LayerSpec(latent, Gated(256)), LayerSpec(latent, Experts(16, 2, 128))),
        dtype="bfloat16",
    )  # fmt: skip
    name = attention.choose(_config(None, model)).name
    if name in ("reference", "ffi_cpu"):
        pytest.skip("this device has no kernel for latents")
    check_engine(lambda *of: Engine(_config(*of[:2]), of[2]), model, name)


def _config(name, model):
    page_tokens = 128 if target_device().platform == "tpu" else 64
    settings = EngineConfig.of(
        attention=name, max_seqs=4, page_tokens=page_tokens, cache_bytes=32 << 20, top_logprobs=8
    )
    return Config(model, settings)
