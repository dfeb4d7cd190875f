"""The kernel that updates states in place on the device at hand, compiled and not interpreted,
beside a loop in float64; and a model with states that decodes with it.
"""

import jax
import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.recurrent.mamba import Mamba2
from configs.model import LayerSpec, ModelConfig
from inference.engine import Engine
from layers.kernels.recurrence import api
from scripts.reports import agreement
from tests import fakes
from tests.device.answers import answers, by_xla_alone
from tests.layers.kernels import recurrent_case

pytestmark = pytest.mark.device

# N, K, M, H, and whether tokens correct what the state says of their key.
_CASES = {
    "mamba2-2.7b": ((80, 1, 128, 64), False),
    "groups": ((16, 8, 128, 64), False),
    "gated delta rule": ((32, 16, 128, 128), True),
    "few heads": ((3, 3, 64, 64), True),
}


@pytest.mark.parametrize("num_drafts, counts", [
    (0, [1, 1, 0, 1, 1, 1, 0]), (4, [5, 0, 1, 2, 0, 5, 3]),
])  # fmt: skip
@pytest.mark.parametrize("case", _CASES)
def test_a_kernel_equals_a_loop_in_float64(case, num_drafts, counts):
    sizes, has_beta = _CASES[case]
    N, K, M, H = sizes
    kernel = api.choose(1 + num_drafts, K, (recurrent_case.SLOTS + 1, 1 + num_drafts, N, M, H))
    if kernel is None:
        pytest.skip("this device has no kernel for such states")
    update = jax.jit(kernel, donate_argnums=5)
    for seed in range(3):
        recurrent_case.check(update, sizes, counts, num_drafts, has_beta, seed)
    rectangle = recurrent_case.rows(num_drafts, counts, 0)
    drawn = recurrent_case.inputs(rectangle, sizes, has_beta, 0)
    first, again = (jax.tree.map(np.asarray, update(*drawn, rectangle)) for _ in range(2))
    np.testing.assert_array_equal(first[1][:-1], again[1][:-1])
    np.testing.assert_array_equal(first[0][rectangle.valid_YW], again[0][rectangle.valid_YW])


@pytest.mark.parametrize("mixer", [
    Mamba2(8, 64, 128), DeltaNet(4, 2, key_width=64, value_width=64),
], ids=["mamba2", "delta_net"])  # fmt: skip
def test_an_engine_answers_as_without_the_kernel(mixer):
    num_keys = getattr(mixer, "num_key_heads", 1)
    N, M, H = mixer.num_heads, *((128, 64) if isinstance(mixer, Mamba2) else (64, 64))
    if api.choose(1, num_keys, (5, 1, N, M, H)) is None:
        pytest.skip("this device has no kernel for such states")
    model = ModelConfig(
        "device-states", "mamba2", 131, width=256, num_layers=2, max_context=512,
        pattern=(LayerSpec(mixer, None),), dtype="float32",
    )  # fmt: skip

    config = Config(model, EngineConfig.of(max_seqs=4, top_logprobs=8))
    params = fakes.real_params(model)
    with by_xla_alone():
        expected, texts = answers(Engine(config, params))
    answered, _ = answers(Engine(config, params), texts)
    assert agreement.compare(answered, expected).worst < 1e-3
