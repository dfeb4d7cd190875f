"""Nemotron-H (NVIDIA 2025, arXiv 2504.03624) and Nemotron 3, which has experts: a layer is a mixer
or a feed-forward.
"""

import dataclasses
from types import NoneType

from absl import logging

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.combined import NoMixer
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Plain
from configs.kinds.kind import MOST_MATRICES, FeedForward, Mixer
from configs.kinds.recurrent.mamba import Mamba2
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    fields,
    gguf_mixtures,
    gguf_names,
    gguf_states,
    hf_names,
    parts,
    state_space,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import LAYER_EPSILON, GgufKeys

_LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}
_ALIASES = {
    "layer_types": "layers_block_type",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_min": "time_step_min",
    "mamba_dt_limit": "time_step_limit",
}


def _read_nemotron(keys: Keys) -> ModelFields:
    aliased = {key: keys.raw[alias] for alias, key in _ALIASES.items() if alias in keys.raw}
    keys = keys.updated(aliased)
    keys.require_neutral(
        mamba_hidden_act=("silu", None),
        sliding_window=(None,),
        tie_word_embeddings=(False, None),
    )
    kinds = _kinds(keys)
    layers = {kind: LayerSpec(*_PARTS[kind](keys)) for kind in dict.fromkeys(kinds)}
    return {
        "vocab_size": keys.integer("vocab_size", 131_072),
        "width": keys.integer("hidden_size", 4096),
        "num_layers": len(kinds),
        "max_context": keys.integer("max_position_embeddings", 4096),
        "pattern": fields.repeated([layers[kind] for kind in kinds]),
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
    }


def _kinds(keys: Keys) -> list[str]:
    """Returns each layer's kind, by letters or by words, which win."""
    words, letters = keys.raw.get("layers_block_type"), keys.raw.get("hybrid_override_pattern")
    if words is None:
        letters = "ME*-" if letters is None else letters
        if not isinstance(letters, str) or not letters or set(letters) - _LETTERS.keys():
            raise InputError(
                f"hybrid_override_pattern has a letter of {''.join(_LETTERS)} for each layer, not "
                f"{shown(letters)}"
            )
        words = [_LETTERS[letter] for letter in letters]
    valid = {word: word for word in _LETTERS.values()} | _OLDER
    if not isinstance(words, list) or not words:
        raise InputError(f"layers_block_type lists kinds of layers, not {shown(words)}")
    for word in words:
        if not isinstance(word, str) or word not in valid:
            raise InputError(
                f"layer type {shown(word)} is not supported; valid: {', '.join(valid)}"
            )
    if len(words) > MOST_LAYERS:
        raise InputError(f"a model has at most {MOST_LAYERS} layers, not {len(words)}")
    stated = keys.raw.get("num_hidden_layers")
    if stated not in (None, len(words)):
        raise InputError(f"num_hidden_layers={shown(stated)}, and the pattern has {len(words)}")
    return [valid[word] for word in words]


def _state(keys: Keys) -> tuple[Mixer, None]:
    heads, head_width = keys.integer("mamba_num_heads", 128), keys.integer("mamba_head_dim", 64)
    groups = keys.integer("n_groups", 8)
    if state_space.step_limits(keys) != (0.0, None):
        raise InputError(
            f"time_step_limit={shown(keys.raw['time_step_limit'])} is not supported: steps of this "
            "family are at least time_step_min, and have no other limit; valid: [0, Infinity]"
        )
    mixer = Mamba2(
        heads,
        head_width,
        keys.integer("ssm_state_size", 128),
        groups,
        keys.integer("conv_kernel", 4),
        state_space.biases(keys, "use_bias", "use_conv_bias"),
        norm_width=heads * head_width // groups,
        step_limits=(keys.number("time_step_min", 0.001), None),
    )
    return mixer, None


def _attention(keys: Keys) -> tuple[Mixer, None]:
    heads, width = keys.integer("num_attention_heads", 32), keys.integer("head_dim", 128)
    keys.require_neutral(attention_head_dim=(width, None))  # of older files
    if keys.boolean("attention_bias", False):
        logging.log_first_n(
            logging.WARNING,
            "attention_bias=true has no effect: attention of nemotron_h has no biases, in "
            "transformers, too",
            1,
        )
    kv_heads = heads if keys.raw.get("num_key_value_heads", 8) is None else 8
    return Attention(heads, keys.integer("num_key_value_heads", kv_heads), width, rope=None), None


def _plain(keys: Keys) -> tuple[Mixer, FeedForward]:
    width, has_bias = keys.integer("intermediate_size", 21_504), keys.boolean("mlp_bias", False)
    return NoMixer(), Plain(width, _activation(keys), has_bias)


def _experts(keys: Keys) -> tuple[Mixer, FeedForward]:
    groups = keys.integer("n_group", 1)
    router = Router(
        "sigmoid",
        keys.boolean("norm_topk_prob", True),
        keys.number("routed_scaling_factor", 1.0),
        has_offsets=True,
        num_groups=groups,
        top_groups=keys.integer("topk_group", 1),
        group_best=2 if groups > 1 else 1,
    )
    latent = keys.optional_integer("moe_latent_size") or 0
    return NoMixer(), Experts(
        keys.integer("n_routed_experts", 8, limit=MOST_MATRICES),
        keys.integer("num_experts_per_tok", 2),
        keys.integer("moe_intermediate_size", 7688),
        router,
        keys.integer("moe_shared_expert_intermediate_size", 7688),
        activation=_activation(keys),
        is_gated=False,
        latent_width=latent,
        shared_bias=keys.boolean("mlp_bias", False),
    )


_PARTS = {
    "linear_attention": _state, "full_attention": _attention, "mlp": _plain, "moe": _experts,
}  # fmt: skip


def _activation(keys: Keys) -> str:
    return keys.choice("mlp_hidden_act", {"relu2": "relu2"}, "relu2")


def _write_nemotron(config: ModelConfig) -> dict[str, object]:
    """Returns the keys, except those of kinds that no layer is."""
    letters, raw = "", dict[str, object]()
    for layer in config.layers:
        mixer, ffn = layer.mixer, layer.ffn
        if (ffn is None) is isinstance(mixer, NoMixer):
            raise InputError(f"{config.name}: a layer of nemotron_h is a mixer or a feed-forward")
        if isinstance(mixer, Mamba2):
            letters += "M"
            raw |= {
                "mamba_num_heads": mixer.num_heads,
                "mamba_head_dim": mixer.head_width,
                "ssm_state_size": mixer.state_width,
                "n_groups": mixer.num_groups,
                "conv_kernel": mixer.conv_width,
                "use_bias": "in" in mixer.biases,
                "use_conv_bias": "conv" in mixer.biases,
                "time_step_min": mixer.step_limits[0],
            }
        elif isinstance(mixer, Attention):
            letters += "*"
            raw |= {
                "num_attention_heads": mixer.num_heads,
                "num_key_value_heads": mixer.num_kv_heads,
                "head_dim": mixer.head_width,
            }
        elif isinstance(ffn, Plain):
            letters += "-"
            raw |= {"intermediate_size": ffn.width, "mlp_bias": ffn.has_bias}
        elif isinstance(ffn, Experts):
            letters += "E"
            raw |= _expert_keys(ffn)
    return raw | {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "hybrid_override_pattern": letters,
        "max_position_embeddings": config.max_context,
        "layer_norm_epsilon": config.norm_eps,
        "mlp_hidden_act": "relu2",
    }


def _expert_keys(ffn: Experts) -> dict[str, object]:
    return {
        "n_routed_experts": ffn.num_experts,
        "num_experts_per_tok": ffn.top_k,
        "moe_intermediate_size": ffn.width,
        "moe_shared_expert_intermediate_size": ffn.shared_width,
        "moe_latent_size": ffn.latent_width or None,
        "mlp_bias": ffn.shared_bias,
        "n_group": ffn.router.num_groups,
        "topk_group": ffn.router.top_groups,
        "norm_topk_prob": ffn.router.is_normalized,
        "routed_scaling_factor": ffn.router.scale,
    }


_LEAST_STEP = 0.001  # no key states it


def _gguf_nemotron(keys: GgufKeys) -> ModelFields:
    """Reads Nemotron-H: a layer with keys attends, a layer with a width is a feed-forward."""
    widths = keys.listed("feed_forward_length")
    layers = []
    for layer, (kv_heads, width) in enumerate(zip(keys.kv_heads(), widths, strict=True)):
        if kv_heads:
            layers.append(LayerSpec(gguf_states.attention(keys, layer, kv_heads), None))
        elif width:
            layers.append(LayerSpec(NoMixer(), _gguf_ffn(keys, layer, width)))
        else:
            mixer = dataclasses.replace(
                gguf_states.state_space(keys, layer), step_limits=(_LEAST_STEP, None)
            )
            layers.append(LayerSpec(mixer, None))
    return {"pattern": tuple(layers)}


def _gguf_ffn(keys: GgufKeys, layer: int, width: int) -> FeedForward:
    if not keys.has_tensor(f"blk.{layer}.ffn_gate_inp.weight"):
        return Plain(width, "relu2", has_bias=keys.has_tensor(f"blk.{layer}.ffn_down.bias"))
    router = gguf_mixtures.read_router(keys, is_normalized=True, scores="sigmoid")
    if router.num_groups == 1:
        router = dataclasses.replace(router, group_best=1)
    return gguf_mixtures.read_experts(
        keys,
        router,
        width,
        shared_width=keys.integer("expert_shared_feed_forward_length"),
        activation="relu2",
        is_gated=False,
        latent_width=keys.whole("moe_latent_size"),
        shared_bias=keys.has_tensor(f"blk.{layer}.ffn_down_shexp.bias"),
    )


_TENSORS: Table = {
    **hf_names.BACKBONE,
    **hf_names.mamba2("mixer"),
    "mixer/qkv": tuple(f"mixer.{part}_proj.weight" for part in "qkv"),
    "mixer/out": ("mixer.o_proj.weight",),
    "ffn_norm": ("norm.weight",),
    "ffn/up": ("mixer.up_proj.weight",),
    "ffn/down": ("mixer.down_proj.weight",),
    "ffn/router": ("mixer.gate.weight",),
    "ffn/router_offsets": ("mixer.gate.e_score_correction_bias",),
    "ffn/latent_down": ("mixer.fc1_latent_proj.weight",),
    "ffn/latent_up": ("mixer.fc2_latent_proj.weight",),
    "ffn/experts/up": ("mixer.experts.{}.up_proj.weight",),
    "ffn/experts/down": ("mixer.experts.{}.down_proj.weight",),
    "ffn/shared/up": ("mixer.shared_experts.up_proj.weight",),
    "ffn/shared/down": ("mixer.shared_experts.down_proj.weight",),
}
_GGUF: Table = {
    **gguf_names.STATES,
    "ffn_norm": ("attn_norm.weight",),
    "ffn/up": ("ffn_up.weight",),
    "ffn/latent_down": ("ffn_latent_down.weight",),
    "ffn/latent_up": ("ffn_latent_up.weight",),
    "ffn/experts/up": ("ffn_up_exps.{}.weight",),
    "ffn/shared/up": ("ffn_up_shexp.weight",),
}
# llama.cpp has another name for the family with experts.
_READER = GgufReader(
    _gguf_nemotron,
    (*gguf_states.MAMBA2, *gguf_mixtures.ROUTED, "expert_shared_count", "moe_latent_size"),
    free_widths=("rope.dimension_count",),
    epsilon=LAYER_EPSILON,
)
FAMILIES = (
    Family(
        name="nemotron_h",
        architecture="NemotronHForCausalLM",
        read=_read_nemotron,
        reads=("attention_bias", "mlp_bias"),
        write=_write_nemotron,
        mixers=(Attention, Mamba2, NoMixer),
        feed_forwards=(NoneType, Plain, Experts),
        tensors=_TENSORS,
        layers="backbone.layers",
        splits=(parts.mamba2,),
        ignored=("mtp",),
        also=hf_names.OLDER_BACKBONE,
        gguf=Gguf(
            _GGUF,
            is_interleaved=True,
            readers={"nemotron_h": _READER, "nemotron_h_moe": _READER},
            writer=GgufWriter(
                "nemotron_h",
                # newer llama.cpp loads no file without
                lambda config: {LAYER_EPSILON: config.norm_eps},
                experts_architecture="nemotron_h_moe",
                has_states=True,
            ),
        ),
    ),
)
