"""Mamba (Gu & Dao 2023, arXiv 2312.00752), FalconMamba (Zuo et al. 2024, arXiv 2410.05355), whose
norms have no weights, and Mamba-2 (Dao & Gu 2024, arXiv 2405.21060): layers without feed-forwards.
"""

import dataclasses
from types import NoneType

from configs.errors import InputError
from configs.kinds.kind import Mixer
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.selective import Mamba
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import gguf_names, gguf_states, hf_names, parts, state_space
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys


def _read_falcon_mamba(keys: Keys) -> ModelFields:
    return _read_mamba(keys, norms="plain", norm_eps=keys.number("mixer_rms_eps", 1e-6))


def _read_mamba(keys: Keys, norms: str | None = None, norm_eps: float | None = None) -> ModelFields:
    keys.require_neutral(hidden_act=("silu", None), rms_norm=(True, None))
    width, expand = keys.integer("hidden_size", 768), keys.number("expand", 2)
    mixer = Mamba(
        # Where a file states both, the width itself counts (falcon-mamba-7b has an expand of 16).
        keys.integer("intermediate_size", int(expand * width)),
        keys.integer("state_size", 16),
        state_space.step_rank(keys, "time_step_rank", width),
        keys.integer("conv_kernel", 4),
        state_space.biases(keys, "use_bias", "use_conv_bias"),
        norms,
        norm_eps,
    )
    return _model(keys, mixer, width, 50_280, num_layers=32, tied=True)


def _read_mamba2(keys: Keys) -> ModelFields:
    keys.require_neutral(hidden_act=("silu", None), rms_norm=(True, None))
    width, heads = keys.integer("hidden_size", 4096), keys.integer("num_heads", 128)
    head_width, groups = keys.integer("head_dim", 64), keys.integer("n_groups", 8)
    mixer = Mamba2(
        heads,
        head_width,
        keys.integer("state_size", 128),
        groups,
        keys.integer("conv_kernel", 4),
        state_space.biases(keys, "use_bias", "use_conv_bias"),
        norm_width=heads * head_width // groups,
        step_limits=state_space.step_limits(keys),
    )
    inner = keys.number("expand", 2) * width
    if inner != mixer.inner_width:
        raise InputError(
            f"expand x hidden_size is {inner:g}, and num_heads x head_dim {mixer.inner_width}: "
            "they have to be equal"
        )
    return _model(keys, mixer, width, 32_768, num_layers=64, tied=False)


def _model(
    keys: Keys, mixer: Mixer, width: int, vocab_size: int, num_layers: int, tied: bool
) -> ModelFields:
    """Returns a model; the last three arguments count where the file does not state them."""
    return {
        "vocab_size": keys.integer("vocab_size", vocab_size),
        "width": width,
        "num_layers": keys.integer("num_hidden_layers", num_layers, limit=MOST_LAYERS),
        "max_context": state_space.MAX_CONTEXT,
        "pattern": (LayerSpec(mixer, None),),
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "tied": keys.boolean("tie_word_embeddings", tied),
    }


def _write_mamba(config: ModelConfig) -> dict[str, object]:
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


def _write_falcon_mamba(config: ModelConfig) -> dict[str, object]:
    return _write_mamba(config) | {"mixer_rms_eps": config.mixers(Mamba)[0].norm_eps}


def _write_mamba2(config: ModelConfig) -> dict[str, object]:
    (mixer,) = config.mixers(Mamba2)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.num_layers,
        "expand": state_space.expansion(mixer, config.width),
        "num_heads": mixer.num_heads,
        "head_dim": mixer.head_width,
        "state_size": mixer.state_width,
        "n_groups": mixer.num_groups,
        "conv_kernel": mixer.conv_width,
        "use_bias": "in" in mixer.biases,
        "use_conv_bias": "conv" in mixer.biases,
        "layer_norm_epsilon": config.norm_eps,
        "time_step_limit": state_space.limits_as_json(mixer),
    }


_FALCON_EPS = 1e-6  # no key states it


def _gguf_mamba(keys: GgufKeys) -> ModelFields:
    """Reads Mamba and, with norms, FalconMamba."""
    mixer = gguf_states.selective(keys, 0)
    if not keys.boolean(gguf_states.NORMED, False):
        return {"pattern": (LayerSpec(mixer, None),)}
    mixer = dataclasses.replace(mixer, norms="plain", norm_eps=_FALCON_EPS)
    return {"family": "falcon_mamba", "pattern": (LayerSpec(mixer, None),)}


def _gguf_mamba2(keys: GgufKeys) -> ModelFields:
    return {"pattern": (LayerSpec(gguf_states.state_space(keys, 0), None),)}


_TENSORS: Table = {**hf_names.BACKBONE, **hf_names.mamba("mixer")}
_WIDTHS = ("attention.value_length", "rope.dimension_count")
FAMILIES = (
    Family(
        name="mamba",
        architecture="MambaForCausalLM",
        read=_read_mamba,
        write=_write_mamba,
        mixers=(Mamba,),
        feed_forwards=(NoneType,),
        tensors=_TENSORS,
        layers="backbone.layers",
        splits=(parts.conv_taps,),
        also=hf_names.OLDER_BACKBONE,
        gguf=Gguf(
            gguf_names.STATES,
            readers={"mamba": GgufReader(_gguf_mamba, gguf_states.MAMBA, _WIDTHS)},
            writer=GgufWriter("mamba", lambda _: {gguf_states.NORMED: False}, has_states=True),
        ),
    ),
    Family(
        name="falcon_mamba",
        architecture="FalconMambaForCausalLM",
        read=_read_falcon_mamba,
        write=_write_falcon_mamba,
        mixers=(Mamba,),
        feed_forwards=(NoneType,),
        tensors=_TENSORS,
        layers="backbone.layers",
        splits=(parts.conv_taps,),
        also=hf_names.OLDER_BACKBONE,
        gguf=Gguf(
            gguf_names.STATES,
            writer=GgufWriter("mamba", lambda _: {gguf_states.NORMED: True}, has_states=True),
        ),
    ),
    Family(
        name="mamba2",
        architecture="Mamba2ForCausalLM",
        read=_read_mamba2,
        write=_write_mamba2,
        mixers=(Mamba2,),
        feed_forwards=(NoneType,),
        tensors={**hf_names.BACKBONE, **hf_names.mamba2("mixer")},
        layers="backbone.layers",
        splits=(parts.mamba2,),
        also=hf_names.OLDER_BACKBONE,
        gguf=Gguf(
            gguf_names.STATES,
            readers={"mamba2": GgufReader(_gguf_mamba2, gguf_states.MAMBA2, _WIDTHS)},
            writer=GgufWriter("mamba2", has_states=True),
        ),
    ),
)
