"""Architectures whose layers select what their states keep (Mamba), alone or between attention."""

from typing import Any

from configs.kinds.selective import Mamba
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.checkpoints.hf.architectures.config_keys import Keys
from inference.checkpoints.hf.architectures.recurrent import MAX_CONTEXT


def mamba(keys: Keys, name: str) -> ModelConfig:
    """Mamba (Gu & Dao 2023, arXiv 2312.00752): mixers alone."""
    return _mixers_alone(keys, name, "mamba")


def falcon_mamba(keys: Keys, name: str) -> ModelConfig:
    """FalconMamba (Zuo et al. 2024, arXiv 2410.05355): Mamba with norms that have no weights."""
    eps = keys.number("mixer_rms_eps", 1e-6)
    return _mixers_alone(keys, name, "falcon_mamba", norms="plain", norm_eps=eps)


def _mixers_alone(keys: Keys, name: str, family: str, **own: Any) -> ModelConfig:
    keys.require_neutral({"hidden_act": ("silu", None), "rms_norm": (True, None)})
    width, expand = keys.integer("hidden_size", 768), keys.number("expand", 2)
    has_bias = keys.boolean("use_bias", False)
    mixer = Mamba(
        # Where a file names both, the width itself counts (falcon-mamba-7b has an expand of 16).
        keys.integer("intermediate_size", int(expand * width)),
        keys.integer("state_size", 16),
        _rank(keys, "time_step_rank", width),
        keys.integer("conv_kernel", 4),
        _biases(has_bias, keys.boolean("use_conv_bias", True)),
        **own,
    )
    return ModelConfig(
        name=name,
        family=family,
        vocab_size=keys.integer("vocab_size", 50280),
        width=width,
        num_layers=keys.integer("num_hidden_layers", 32, limit=MOST_LAYERS),
        max_context=MAX_CONTEXT,
        pattern=(LayerSpec(mixer, None),),
        norm_eps=keys.number("layer_norm_epsilon", 1e-5),
        tied=keys.boolean("tie_word_embeddings", True),
    )


def _rank(keys: Keys, key: str, width: int) -> int:
    """Of the steps; 'auto' is a sixteenth of the width."""
    is_auto = keys.raw.get(key) in (None, "auto")
    return -(-width // 16) if is_auto else keys.integer(key)


def _biases(of_products: bool, of_convolution: bool) -> tuple[str, ...]:
    each = {"in": of_products, "conv": of_convolution, "out": of_products}
    return tuple(name for name, has in each.items() if has)


def export_mamba(config: ModelConfig) -> dict[str, Any]:
    """The fields of a Mamba model's `config.json`."""
    mixer = config.mixers(Mamba)[0]
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": mixer.channels,
        "state_size": mixer.state_width,
        "time_step_rank": mixer.step_rank,
        "conv_kernel": mixer.conv_width,
        "use_bias": "in" in mixer.biases,
        "use_conv_bias": "conv" in mixer.biases,
        "layer_norm_epsilon": config.norm_eps,
    }


def export_falcon_mamba(config: ModelConfig) -> dict[str, Any]:
    """The fields of a FalconMamba model's `config.json`."""
    return export_mamba(config) | {"mixer_rms_eps": config.mixers(Mamba)[0].norm_eps}
