"""What is moved between matrices, and turned, changes nothing that a model says."""

import dataclasses
import functools

import numpy as np
import pytest

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated, Plain
from configs.model import LayerSpec
from inference.quantize import folds, rotation
from inference.quantize.rotation import Rotation
from layers import decoder, params
from layers.ragged import contiguous
from tests import compiling, fakes, newer_fakes
from tests.inference.quantize import models

pytestmark = pytest.mark.quick_code

TOKENS = np.random.default_rng(0).integers(0, 131, (2, 40)).astype(np.int32)


def biased():
    """Every bias, and one key/value head for four queries."""
    mixer = Attention(4, 1, 16, biases=("qkv", "out"))
    return models.llama(pattern=(LayerSpec(mixer, Gated(96, has_bias=True)),))


def layer_norms():
    """As GPT-2: norms with biases, and an activation on the way up."""
    mixer = Attention(4, 4, 16, rope=None, biases=("qkv", "out"))
    ffn = Plain(96, activation="gelu_tanh", has_bias=True)
    return models.llama(pattern=(LayerSpec(mixer, ffn),), norm="layer")


def offsets():
    """Norms that are stored less 1, on both sides of a layer."""
    mixer = Attention(4, 2, 16, qk_norm="head")
    return models.llama(pattern=(LayerSpec(mixer, Gated(96)),), norm_offset=1.0, post_norms=True)


def gated_heads():
    """Gates of heads, and values narrower than keys."""
    mixer = Attention(4, 2, 16, head_gate="sigmoid", value_width=12, value_scale=0.7)
    return models.llama(pattern=(LayerSpec(mixer, Gated(96)),))


def shared_values():
    """A second layer that reads the first one's values."""
    own = Attention(4, 2, 16)
    reader = dataclasses.replace(own, owner=0)
    return models.llama(pattern=tuple(LayerSpec(mixer, Gated(96)) for mixer in (own, reader)))


def side_by_side():
    """A norm that attention and feed-forward both read."""
    layer = LayerSpec(Attention(4, 2, 16), Gated(96), parallel_norms=1)
    return models.llama(pattern=(layer,), norm="layer_unbiased")


MODELS = {
    "biased": biased, "layer-norms": layer_norms, "offsets": offsets,
    "side by side": side_by_side, "gates": gated_heads, "shared": shared_values,
    "mixture": models.mixture, "latent": models.latent,
    "tied": lambda: models.llama(tied=True, embedding_scale=8.0),
    "gpt-oss": fakes.gpt_oss, "gemma": fakes.gemma, "gemma4": fakes.gemma4,
    "deepseek-v32": newer_fakes.shared_indexer, "compressed": fakes.compressed,
}  # fmt: skip


def random_values(config):
    """Parameters by path, norms and biases among them no two alike."""
    rng = np.random.default_rng(7)
    found = params.flatten(params.init(decoder.param_infos(config), seed=3), lambda _: False)
    return {
        path: np.asarray(v if v.ndim > 1 else v + rng.uniform(0.1, 1, v.shape), np.float32)
        for path, v in found.items()
    }


@functools.cache
def program(config):
    @compiling.jit
    def run(tree):
        tokens_T = TOKENS.reshape(-1)
        x_TD = decoder.embedded(tree, config, tokens_T, contiguous(*TOKENS.shape))
        passed = decoder.layers(tree, config, x_TD, contiguous(*TOKENS.shape), tokens_T=tokens_T)
        return decoder.logits(tree, config, passed.hidden_TD)

    return run


def logits(config, values):
    return np.asarray(program(config)(params.unflatten(decoder.param_infos(config), values)))


def of_layer(values, index):
    prefix = f"layers/{index}/"
    return {p.removeprefix(prefix): v for p, v in values.items() if p.startswith(prefix)}


LONG = {"gemma", "gemma4", "deepseek-v32", "compressed"}  # many layers to compile


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in MODELS]
)
def test_factors_that_move_change_nothing(name):
    config = MODELS[name]()
    values, rng, num_folds = random_values(config), np.random.default_rng(1), 0
    expected = logits(config, values)
    moved = dict(values)
    for index in range(config.num_layers):
        own = of_layer(values, index)
        for fold in folds.of_layer(config, index):
            before = dict(own)
            fold.apply(own, {}, np.exp(rng.normal(size=fold.shape)), "bfloat16")
            changed = {path for path in own if not np.array_equal(own[path], before[path])}
            assert set(fold.readers) < changed
            num_folds += 1
        moved |= {f"layers/{index}/{path}": value for path, value in own.items()}
    assert num_folds >= config.num_layers
    np.testing.assert_allclose(logits(config, moved), expected, rtol=0, atol=1e-4)


def test_what_is_folded():
    def found(config, index=0):
        return [fold.readers for fold in folds.of_layer(config, index)]

    down, out = ("ffn/down",), ("mixer/out",)
    assert found(models.llama()) == [("mixer/qkv",), ("ffn/gate_up",), out, down]
    assert found(layer_norms()) == [("mixer/qkv",), ("ffn/up",), out]
    assert found(side_by_side()) == [("mixer/qkv", "ffn/gate_up"), out, down]
    assert found(shared_values()) == [("mixer/qkv",), ("ffn/gate_up",), down]
    assert found(shared_values(), 1) == [("mixer/q",), ("ffn/gate_up",), down]
    assert ("ffn/experts/down",) not in found(fakes.gpt_oss())
    assert found(fakes.linear()) == [("ffn/gate_up",), down]
    assert found(fakes.linear(), 1) == [down]  # its norms make the residual stream, too
    assert ("ffn/router", "ffn/experts/gate_up", "ffn/shared/gate_up") in found(models.mixture())


def test_a_residual_stream_that_goes_on_from_norms_is_not_turned():
    layer = dataclasses.replace(fakes.llama().pattern[0], factors=((1.2, 1.0), (1.0, 1.0)))
    with pytest.raises(InputError, match="--rotate: the residual stream of .* goes on from its"):
        rotation.untied(dataclasses.replace(fakes.llama(), pattern=(layer,)))


def test_parts_that_read_one_norm_are_not_turned():
    layer = dataclasses.replace(fakes.llama().pattern[0], parallel_norms=1)
    with pytest.raises(InputError, match="--rotate: mixers and feed-forwards of .* read one norm"):
        rotation.untied(dataclasses.replace(fakes.llama(), pattern=(layer,)))


ROTATED = ["biased", "mixture", "tied"]


@pytest.mark.parametrize("name", ROTATED)
def test_a_rotated_model_says_the_same(name):
    config = dataclasses.replace(MODELS[name](), norm_offset=0.0 if name == "tied" else 0.5)
    values, turned = random_values(config), rotation.untied(config)
    own = Rotation(config, values["final_norm"])
    found = {}
    for path in params.flatten(turned.parameters()):
        if not path.startswith("layers/"):
            source = "embed/table" if path == "head/table" and config.tied else path
            found[path] = own.rest(path, values[source])
    for index in range(config.num_layers):
        layer = own.layer(of_layer(values, index))
        found |= {f"layers/{index}/{path}": value for path, value in layer.items()}
    np.testing.assert_allclose(logits(turned, found), logits(config, values), rtol=0, atol=1e-4)
    path = "layers/0/mixer/out"
    assert not np.allclose(found[path], values[path], atol=1e-2)


@pytest.mark.parametrize("width", [64, 48, 7, 576])
def test_a_rotation_is_orthogonal_and_spreads_one_element_over_all(width):
    turn_DD = rotation.orthogonal(width)
    np.testing.assert_allclose(turn_DD @ turn_DD.T, np.eye(width), atol=1e-12)
    power = width & -width
    if power == width:
        np.testing.assert_allclose(np.abs(turn_DD), width**-0.5)


@pytest.mark.parametrize(
    "config, message",
    [(layer_norms(), "layer norms"), (offsets(), "norms of what they add"),
     (fakes.gemma4(), "norms of what they add")],
)  # fmt: skip
def test_what_cannot_be_turned_is_refused(config, message):
    with pytest.raises(InputError, match=message):
        rotation.untied(config)
