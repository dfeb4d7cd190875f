"""Architectures whose layers select what their states keep (Mamba), alone or between attention."""

from collections.abc import Callable
from typing import Any

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import MOST_MATRICES
from configs.kinds.recurrent.selective import Mamba
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.checkpoints.hf.architectures import export_fields, fields
from inference.checkpoints.hf.architectures.config_keys import Keys
from inference.checkpoints.hf.architectures.scans.recurrent import MAX_CONTEXT

# What files leave out.
_JAMBA = {
    "vocab_size": 65_536, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 262_144,
}  # fmt: skip


def mamba(keys: Keys, name: str) -> ModelConfig:
    """Mamba (Gu & Dao 2023, arXiv 2312.00752): mixers alone."""
    return _mixers_alone(keys, name, "mamba")


def falcon_mamba(keys: Keys, name: str) -> ModelConfig:
    """FalconMamba (Zuo et al. 2024, arXiv 2410.05355): Mamba with norms that have no weights."""
    eps = keys.number("mixer_rms_eps", 1e-6)
    return _mixers_alone(keys, name, "falcon_mamba", norms="plain", norm_eps=eps)


def jamba(keys: Keys, name: str) -> ModelConfig:
    """Jamba (Lieber et al. 2024, arXiv 2403.19887): attention without positions, and experts, each
    in every so many layers.
    """
    keys = Keys(_JAMBA | keys.raw, keys.label)
    keys.require_neutral({"sliding_window": (None,), "mamba_inner_layernorms": (True, None)})
    own = fields.llama_fields(keys, name, "jamba")
    width, layers = own["width"], range(own["num_layers"])
    has_bias = keys.boolean("mamba_proj_bias", False)
    mamba = Mamba(
        keys.integer("mamba_expand", 2) * width,
        keys.integer("mamba_d_state", 16),
        _rank(keys, "mamba_dt_rank", width),
        keys.integer("mamba_d_conv", 4),
        _biases(has_bias, keys.boolean("mamba_conv_bias", True)),
        norms="weighted",
    )
    attention = fields.attention(keys, rope=None)
    dense, count = fields.gated(keys), keys.integer("num_experts", 16, limit=MOST_MATRICES)
    experts = None if count == 1 else _experts(keys, count, dense)
    attends, has_experts = _every(keys, "attn", 8, 4), _every(keys, "expert", 2, 1)
    pattern = fields.pattern(
        [attention if attends(layer) else mamba for layer in layers],
        [experts if experts and has_experts(layer) else dense for layer in layers],
    )
    longest = keys.integer("max_position_embeddings", _JAMBA["max_position_embeddings"])
    return ModelConfig(**own, max_context=longest, pattern=pattern)


def _experts(keys: Keys, count: int, dense: Gated) -> Experts:
    """As wide as a dense layer each; what the chosen ones count is not normalized."""
    top_k = keys.integer("num_experts_per_tok", 2)
    if top_k > count:
        raise InputError(f"num_experts_per_tok={top_k} is more than num_experts={count}")
    return Experts(count, top_k, dense.width, Router(is_normalized=False))


def _every(keys: Keys, kind: str, period: int, offset: int) -> Callable[[int], bool]:
    """Whether a layer, by its number, is of a kind that every so many are."""
    period = keys.integer(f"{kind}_layer_period", period, limit=MOST_LAYERS)
    offset = keys.whole(f"{kind}_layer_offset", offset, limit=MOST_LAYERS)
    if offset >= period:
        raise InputError(f"{kind}_layer_offset={offset} is not below {kind}_layer_period={period}")
    return lambda layer: layer % period == offset


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


def export_jamba(config: ModelConfig) -> dict[str, Any]:
    """The fields of a Jamba model's `config.json`."""
    attends = [isinstance(layer.mixer, Attention) for layer in config.layers]
    mixes = [isinstance(layer.ffn, Experts) for layer in config.layers]
    attention = next(iter(config.mixers(Attention)), Attention(1, 1, config.width, rope=None))
    mamba = next(iter(config.mixers(Mamba)), Mamba(config.width, 1, 1))
    ffns = [layer.ffn for layer in config.layers]
    experts = next((ffn for ffn in ffns if isinstance(ffn, Experts)), Experts(1, 1, 1))
    dense = next((ffn for ffn in ffns if isinstance(ffn, Gated)), experts)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "intermediate_size": dense.width,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.max_context,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        **export_fields.heads(attention),
        **_repeated("attn", attends),
        **_repeated("expert", mixes),
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
        "mamba_expand": mamba.channels // config.width,
        "mamba_d_state": mamba.state_width,
        "mamba_dt_rank": mamba.step_rank,
        "mamba_d_conv": mamba.conv_width,
        "mamba_conv_bias": "conv" in mamba.biases,
        "mamba_proj_bias": "in" in mamba.biases,
    }


def _repeated(kind: str, layers: list[bool]) -> dict[str, int]:
    """How far layers of a kind are apart, and the first of them; behind all layers if none is."""
    found = [layer for layer, is_one in enumerate(layers) if is_one]
    first = found[0] if found else len(layers)
    period = found[1] - first if len(found) > 1 else max(first + 1, len(layers))
    return {f"{kind}_layer_period": period, f"{kind}_layer_offset": first % period}
