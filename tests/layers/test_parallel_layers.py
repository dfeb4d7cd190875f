"""Layers whose mixer and feed-forward read the stream side by side, with norms and heads as their
families have them, by hand.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated, Plain
from configs.model import LayerSpec
from layers import decoder, norm, params
from layers.feed_forwards import dense
from layers.ragged import contiguous
from tests import compiling, fakes

pytestmark = pytest.mark.quick_code

_TOKENS = np.random.default_rng(0).integers(0, 31, 7)


def _layer(parallel_norms: int) -> LayerSpec:
    heads = Attention(2, 1, 6, rope=None, qk_norm="each")
    return LayerSpec(heads, Plain(10, "gelu"), parallel_norms=parallel_norms)


def _model(parallel_norms: int, **changes):
    return fakes.llama(
        vocab_size=31, width=12, num_layers=1, pattern=(_layer(parallel_norms),), **changes
    )


def _normed(x: np.ndarray, eps: float) -> np.ndarray:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * (1 + np.asarray(jax.scipy.special.erf(x / 2**0.5))) / 2


def _by_hand(weights, x_TD: np.ndarray, eps: float) -> np.ndarray:
    """The stream behind the layer in numpy, float64."""
    mixer, ffn = weights["mixer"], weights["ffn"]
    normed_TD = _normed(x_TD, eps) * weights["mixer_norm"]
    heads_TXH = (normed_TD @ mixer["qkv"].T).reshape(len(x_TD), 4, 6)
    q_TNH = _normed(heads_TXH[:, :2], eps) * mixer["q_norm"].reshape(2, 6)
    k_TH = _normed(heads_TXH[:, 2], eps) * mixer["k_norm"]
    scores_NTS = np.einsum("tnh,sh->nts", q_TNH, k_TH) / 6**0.5
    scores_NTS = np.where(np.tri(len(x_TD), dtype=bool), scores_NTS, -np.inf)
    shares_NTS = np.exp(scores_NTS - scores_NTS.max(-1, keepdims=True))
    shares_NTS /= shares_NTS.sum(-1, keepdims=True)
    values_TNH = np.einsum("nts,sh->tnh", shares_NTS, heads_TXH[:, 3])
    if "ffn_norm" in weights:
        normed_TD = _normed(x_TD, eps) * weights["ffn_norm"]
    fed_TD = _gelu(normed_TD @ ffn["up"].T) @ ffn["down"].T
    return x_TD + values_TNH.reshape(len(x_TD), -1) @ mixer["out"].T + fed_TD


@pytest.mark.parametrize("parallel_norms", [1, 2])
def test_both_parts_read_what_enters_the_layer(parallel_norms):
    config = _model(parallel_norms, norm="layer_unbiased", has_head_bias=True, logit_scale=0.5)
    drawn = np.random.default_rng(1)
    weights = jax.tree.map(
        lambda w: w + drawn.normal(0, 0.3, w.shape).astype(np.float32),
        params.init(decoder.param_infos(config), 1),
    )
    assert ("ffn_norm" in weights["layers"][0]) == (parallel_norms == 2)

    def run(weights):
        ragged = contiguous(1, len(_TOKENS))
        x_TD = decoder.embedded(weights, config, _TOKENS, ragged)
        output = decoder.layers(weights, config, x_TD, ragged, features=(1,))
        return x_TD, output.streams[0], decoder.logits(weights, config, output.hidden_TD)

    x_TD, behind_TD, logits_TV = map(np.asarray, compiling.call(run, weights))
    exact = jax.tree.map(lambda w: np.asarray(w, np.float64), weights)
    expected_TD = _by_hand(exact["layers"][0], x_TD.astype(np.float64), config.norm_eps)
    np.testing.assert_allclose(behind_TD, expected_TD, atol=2e-5)
    hidden_TD = _normed(expected_TD, config.norm_eps) * exact["final_norm"]
    expected_TV = (hidden_TD @ exact["head"]["table"].T + exact["head"]["table_bias"]) / 2
    np.testing.assert_allclose(logits_TV, expected_TV, atol=2e-5)


def test_a_layer_norm_without_a_bias_has_one_parameter():
    model = dataclasses.replace(fakes.llama(), norm="layer_unbiased")
    x = np.random.default_rng(2).normal(3, 2, (5, 24)).astype(np.float32)
    weight = np.linspace(0.5, 1.5, 24, dtype=np.float32)
    expected = _normed(x.astype(np.float64), model.norm_eps) * weight
    np.testing.assert_allclose(norm.apply(jnp.asarray(x), weight, model), expected, atol=1e-5)
    assert decoder.param_infos(model)["final_norm"].shape == (24,)


def test_a_bias_of_a_tied_head_stands_alone():
    declared = decoder.param_infos(dataclasses.replace(fakes.llama(tied=True), has_head_bias=True))
    assert {name: info.shape for name, info in declared["head"].items()} == {"table_bias": (131,)}


def test_gelu_by_the_error_function():
    x = jnp.linspace(-4, 4, 17)
    np.testing.assert_allclose(dense.ACTIVATIONS["gelu"](x), _gelu(np.asarray(x)), atol=1e-6)


@pytest.mark.parametrize("changes, cause", [
    ({"parallel_norms": 3}, "a layer's parallel_norms are 0, 1 or 2, not 3"),
    ({"parallel_norms": 1, "is_post_normed": True}, "parallel_norms go with a ffn, no factors"),
    ({"parallel_norms": 2, "ffn": None}, "parallel_norms go with a ffn, no factors"),
])  # fmt: skip
def test_what_does_not_go_side_by_side(changes, cause):
    with pytest.raises(InputError, match=cause):
        LayerSpec(**{"mixer": Attention(2, 1, 6), "ffn": Gated(10)} | changes)
