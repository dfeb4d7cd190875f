"""Falcon-H1 (Zuo et al. 2025, arXiv 2507.22448): attention and Mamba-2 in parallel in every layer,
and a factor on every projection.
"""

import dataclasses

from configs.errors import InputError
from configs.kinds.combined import Parallel
from configs.kinds.feed_forward import Gated
from configs.kinds.recurrent.mamba import Mamba2
from configs.model import LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields
from inference.families.shared import (
    fields,
    gguf_names,
    gguf_states,
    hf_names,
    parts,
    rope_keys,
    state_space,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys

_DEFAULTS = {
    "vocab_size": 128_000, "hidden_size": 4096, "intermediate_size": 14_336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}  # fmt: skip


def _read_falcon_h1(keys: Keys) -> ModelFields:
    keys = keys.with_defaults(_DEFAULTS)
    keys.require_neutral(mamba_use_mlp=(True, None), attn_layer_indices=(None,))
    rope = rope_keys.read(keys)
    in_scales, out_scales = (
        (keys.number(f"attention_{way}_multiplier", 1.0), keys.number(f"ssm_{way}_multiplier", 1.0))
        for way in ("in", "out")
    )
    inner = keys.optional_integer("mamba_d_ssm", 1024)
    has_norm = keys.boolean("mamba_rms_norm", False)
    state = state_space.mamba2(
        keys, inner or state_space.expanded(keys), part_scales=_scales(keys, "ssm_multipliers", 5)
    )
    biases = ("out",) if keys.boolean("projectors_bias", False) else ()
    state = dataclasses.replace(
        state,
        biases=(*(bias for bias in state.biases if bias != "out"), *biases),
        norm_width=state.norm_width if has_norm else 0,
        norms_first=has_norm and keys.boolean("mamba_norm_before_gate", True),
    )
    attention = fields.attention(keys, rope=rope, key_scale=keys.number("key_multiplier", 1.0))
    mixer = Parallel(attention, state, in_scales, out_scales)
    gate, down = _scales(keys, "mlp_multipliers", 2) or (1.0, 1.0)
    ffn = dataclasses.replace(fields.gated(keys), gate_scale=gate, down_scale=down)
    return {
        **fields.model(keys, rope, mixer, ffn, eps=1e-5),
        "embedding_scale": keys.number("embedding_multiplier", 1.0),
        "logit_scale": keys.number("lm_head_multiplier", 1.0),
    }


def _scales(keys: Keys, key: str, count: int) -> tuple[float, ...]:
    """Returns `count` factors, or () where all are 1."""
    if keys.raw.get(key) is None:
        return ()
    factors = keys.numbers(key, count)
    if len(factors) != count:
        raise InputError(f"{key} lists {count} numbers, not {len(factors)}")
    return () if set(factors) == {1.0} else factors


def _write_falcon_h1(config: ModelConfig) -> dict[str, object]:
    mixer, state, ffn = _parts(config.layers[0])
    (attention_in, state_in), (attention_out, state_out) = mixer.in_scales, mixer.out_scales
    return state_space.hybrid_keys(config) | {
        "mamba_d_ssm": state.inner_width,
        "mamba_rms_norm": state.norm_width != 0,
        "mamba_norm_before_gate": state.norms_first,
        "projectors_bias": "out" in state.biases,
        "embedding_multiplier": config.embedding_scale,
        "lm_head_multiplier": config.logit_scale,
        "key_multiplier": mixer.attention.key_scale,
        "attention_in_multiplier": attention_in,
        "attention_out_multiplier": attention_out,
        "ssm_in_multiplier": state_in,
        "ssm_out_multiplier": state_out,
        "ssm_multipliers": list(state.part_scales or (1.0,) * 5),
        "mlp_multipliers": [ffn.gate_scale, ffn.down_scale],
    }


def _gguf_falcon_h1(keys: GgufKeys) -> ModelFields:
    """Reads Falcon-H1, whose factors are part of the file's weights."""
    kv_heads = keys.integer("attention.head_count_kv")
    attention = gguf_states.attention(keys, 0, kv_heads, rope=keys.rope())
    has_bias = keys.has_tensor("blk.0.ffn_down.bias")
    mixer = Parallel(attention, gguf_states.state_space(keys, 0))
    return {"pattern": (LayerSpec(mixer, Gated(keys.ffn_width, has_bias=has_bias)),)}


def _folded(config: ModelConfig) -> ModelConfig:
    if config.tied and config.embedding_scale != config.logit_scale:
        raise InputError(
            f"{config.name}: model.embedding_scale={config.embedding_scale} and "
            f"logit_scale={config.logit_scale} act on one table, and a .gguf file has its factors "
            "in its weights; --to=orbax keeps them"
        )
    pattern = []
    for layer in config.pattern:
        mixer, state, ffn = _parts(layer)
        attention = dataclasses.replace(mixer.attention, key_scale=1.0)
        state = dataclasses.replace(state, part_scales=())
        pattern.append(
            dataclasses.replace(
                layer,
                mixer=Parallel(attention, state),
                ffn=dataclasses.replace(ffn, gate_scale=1.0, down_scale=1.0),
            )
        )
    return dataclasses.replace(config, pattern=tuple(pattern), embedding_scale=1.0, logit_scale=1.0)


def _factors(config: ModelConfig) -> dict[str, float]:
    """Returns the factors by endings of names; one on a layer's input scales no bias."""
    mixer, state, ffn = _parts(config.layers[0])
    (read, fed), (attends, states) = mixer.in_scales, mixer.out_scales
    key, scales = mixer.attention.key_scale, state.part_scales or (1.0,) * 5
    parts = dict(zip(("z", "x", "B", "C", "dt"), scales, strict=True))
    factors = {
        ".token_embd.weight": config.embedding_scale,
        ".output.weight": config.logit_scale,
        ".attn_q.weight": read,
        ".attn_k.weight": read * key,
        ".attn_k.bias": key,
        ".attn_v.weight": read,
        **{f".ssm_in.weight.{part}": fed * scale for part, scale in parts.items()},
        **{f".ssm_in.bias.{part}": scale for part, scale in parts.items()},
    }
    behind = {"attn_output": attends, "ssm_out": states, "ffn_gate": ffn.gate_scale,
              "ffn_down": ffn.down_scale}  # fmt: skip
    for name, scale in behind.items():
        factors |= {f".{name}.weight": scale, f".{name}.bias": scale}
    return {name: scale for name, scale in factors.items() if scale != 1.0}


def _parts(layer: LayerSpec) -> tuple[Parallel, Mamba2, Gated]:
    """Returns the mixer, its Mamba-2 and the feed-forward, which all models of the family have."""
    mixer, ffn = layer.mixer, layer.ffn
    assert isinstance(mixer, Parallel) and isinstance(mixer.recurrent, Mamba2)
    assert isinstance(ffn, Gated)
    return mixer, mixer.recurrent, ffn


FAMILIES = (
    Family(
        name="falcon_h1",
        architecture="FalconH1ForCausalLM",
        read=_read_falcon_h1,
        reads=("attention_bias", "mlp_bias"),
        write=_write_falcon_h1,
        mixers=(Parallel,),
        tensors=hf_names.HYBRID,
        splits=(parts.mamba2,),
        gguf=Gguf(
            {**gguf_names.STATES, "ffn_norm": ("ffn_norm",)},
            readers={"falcon-h1": GgufReader(_gguf_falcon_h1, gguf_states.MAMBA2)},
            writer=GgufWriter("falcon-h1", fold=_folded, factors=_factors, has_states=True),
        ),
    ),
)
