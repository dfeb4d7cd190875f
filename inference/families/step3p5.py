"""Step 3.5 Flash (StepFun 2026) and the text of Step 3.7: heads with gates, more of them in layers
with windows, norms by weights less one, DeepSeek-V3's router, and limits behind the activation in
the last layers.
"""

import dataclasses

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward
from configs.kinds.rope import Rope
from configs.model import MOST_LAYERS, LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    export_fields,
    fields,
    gguf_mixtures,
    gguf_names,
    gguf_rope,
    gguf_windows,
    hf_names,
    mixtures,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys
from inference.families.shared.gguf_states import Metadata
from inference.families.shared.parts import Part, Parts

# Keys of published files by transformers' names.
_RENAMED = {
    "num_key_value_heads": ("num_attention_groups",),
    "n_routed_experts": ("moe_num_experts", "num_local_experts"),
    "num_experts_per_tok": ("moe_top_k",),
    "share_expert_dim": ("share_expert_dims",),
    "max_position_embeddings": ("max_seq_len",),
}
# Keys with a value for each layer, and behind them for those that predict further tokens.
_LISTED = (
    *("layer_types", "mlp_layer_types", "rope_theta", "partial_rotary_factors"),
    *("swiglu_limits", "swiglu_limits_shared"),
)
_FULL, _SLIDING = "full_attention", "sliding_attention"
_FIRST_DENSE = 3  # layers, where nothing says which are


def _read_step(keys: Keys) -> ModelFields:
    keys.require_neutral(
        zero_centered=(True, None), use_head_wise_attn_gate=(True, None), sink=(False, None),
        moe_router_activation=("sigmoid", None), norm_expert_weight=(True, None),
        use_moe_router_bias=(True, None), use_qk_norm=(True, None), use_moe=(True, None),
        moe_every_n_layer=(1, None), moe_layer_offset=(0, None), hidden_act=("silu", None),
        query_pre_attn_scalar=(keys.raw.get("head_dim"), None), gating=(True, "per-head", None),
        yarn_only_types=([_FULL], None),
    )  # fmt: skip
    keys = _renamed(keys)
    mixers = _mixers(keys)
    model = fields.model(keys, Rope(), mixers, _ffns(keys), eps=1e-5)
    return {**model, "norm_offset": 1.0}


def _renamed(keys: Keys) -> Keys:
    """Returns the keys by transformers' names, with a value for each layer where they list some."""
    raw = dict(keys.raw)
    for name, spellings in _RENAMED.items():
        stated = (raw[key] for key in (name, *spellings) if raw.get(key) is not None)
        raw[name] = next(stated, None)
    count = fields.num_layers(keys)
    extra = keys.whole("num_nextn_predict_layers", 0, limit=MOST_LAYERS)
    for key in _LISTED:
        values = raw.get(key)
        if isinstance(values, list) and len(values) == count + extra:
            raw[key] = values[:count]
    return Keys(raw, keys.label)


def _numbers(keys: Keys, key: str, default: float) -> list[float]:
    """Returns a number above 0 for each layer, which may be one for all."""
    count = fields.num_layers(keys)
    if not isinstance(keys.raw.get(key), list):
        return [keys.number(key, default)] * count
    listed = keys.listed(key, count) or []
    return [Keys({key: value}, keys.label).number(key) for value in listed]


def _mixers(keys: Keys) -> list[Attention]:
    heads = fields.attention(keys, 128, qk_norm="head", head_gate="sigmoid")
    other = keys.nested("attention_other_setting") or Keys({})
    other.require_neutral(
        attention_type=(_SLIDING, None), head_dim=(heads.head_width, None),
        num_attention_groups=(heads.num_kv_heads, None),
    )  # fmt: skip
    num_sliding = other.integer("num_attention_heads", heads.num_heads)
    num_sliding = keys.integer("num_sliding_attention_heads", num_sliding)
    kinds = fields.layer_types(keys, (_FULL, _SLIDING)) or [_FULL] * fields.num_layers(keys)
    window = keys.integer("sliding_window") if _SLIDING in kinds else None
    sliding = dataclasses.replace(heads, num_heads=num_sliding, window=window)
    mixers = {_FULL: heads, _SLIDING: sliding}
    return [
        dataclasses.replace(mixers[kind], rope=rope)
        for kind, rope in zip(kinds, _ropes(keys, kinds), strict=True)
    ]


def _ropes(keys: Keys, kinds: list[str]) -> list[Rope]:
    """Returns the RoPE of each layer, which published files list, and transformers has by kind."""
    by_kind = keys.nested("rope_parameters")
    if by_kind is not None:
        one = {
            kind: rope_keys.partial_of(keys, by_kind.nested(kind), 1e4, 1.0) for kind in {*kinds}
        }
        return [one[kind] for kind in kinds]
    scaling = keys.nested("rope_scaling")
    thetas = _numbers(keys, "rope_theta", 10_000.0)
    shares = _numbers(keys, "partial_rotary_factors", 1.0)
    return [
        rope_keys.partial_of(keys, scaling if kind == _FULL else None, theta, share)
        for kind, theta, share in zip(kinds, thetas, shares, strict=True)
    ]


def _ffns(keys: Keys) -> list[FeedForward]:
    """Returns each layer's feed-forward, the mixture with the limits of its layer."""
    count = fields.num_layers(keys)
    width = keys.integer("moe_intermediate_size", 1280)
    scale = keys.number("moe_router_scaling_factor", 1.0)
    experts = mixtures.experts(
        keys, "n_routed_experts", 288, 8, width, Router("sigmoid", scale=scale, has_offsets=True),
        shared_width=keys.integer("share_expert_dim", 1280),
    )  # fmt: skip
    ffns = mixtures.by_mlp_types(keys, experts)
    if ffns is None:
        sparse = _numbered(keys)
        ffns = mixtures.by_layer(keys, experts, lambda layer: layer in sparse)
    limits = zip(
        _limits(keys, "swiglu_limits", count),
        _limits(keys, "swiglu_limits_shared", count),
        strict=True,
    )
    limited = []
    for layer, (ffn, pair) in enumerate(zip(ffns, limits, strict=True)):
        if ffn is not experts and any(pair):
            raise InputError(f"swiglu_limits of layer {layer}, which has no experts, must be 0")
        limited.append(dataclasses.replace(experts, late_limits=pair) if ffn is experts else ffn)
    return limited


def _numbered(keys: Keys) -> set[int]:
    """Returns the layers with experts, whose numbers `moe_layers_enum` lists in a text."""
    listed = keys.raw.get("moe_layers_enum")
    if listed is None:
        return set(range(_FIRST_DENSE, fields.num_layers(keys)))
    parts = [part.strip() for part in listed.split(",")] if isinstance(listed, str) else []
    if not parts or not all(part.isdecimal() for part in parts):
        raise InputError(f"moe_layers_enum lists numbers of layers in a text, not {shown(listed)}")
    return set(map(int, parts))


def _limits(keys: Keys, key: str, count: int) -> list[float | None]:
    """Returns a limit for each layer; 0 and null are none."""
    limits = keys.listed(key, count) or [None] * count
    return [
        Keys({key: limit}, keys.label).number(key) if limit not in (0, None) else None
        for limit in limits
    ]


def _write_step(config: ModelConfig) -> dict[str, object]:
    """Returns the keys of published files."""
    experts, dense = mixtures.mixture(config), mixtures.dense_layers(config)
    mixers = [export_fields.attention(layer) for layer in config.layers]
    full = next((mixer for mixer in mixers if mixer.window is None), mixers[0])
    sliding = next((mixer for mixer in mixers if mixer.window is not None), full)
    ropes = [mixer.rope or Rope() for mixer in mixers]
    ffns = [layer.ffn for layer in config.layers]
    limits = [ffn.late_limits if isinstance(ffn, Experts) else (None, None) for ffn in ffns]
    raw = mixtures.with_heads(config) | export_fields.layer_types(config)
    raw["num_attention_groups"] = raw.pop("num_key_value_heads")
    return raw | {
        "rope_theta": [rope.theta for rope in ropes],
        "rope_scaling": export_fields.rope_scaling((full.rope or Rope()).scaling),
        "partial_rotary_factors": [rope.share for rope in ropes],
        "yarn_only_types": [_FULL],
        "attention_bias": "out" in full.biases,
        "num_attention_heads": full.num_heads,
        "attention_other_setting": {
            "attention_type": _SLIDING,
            "num_attention_heads": sliding.num_heads,
        },
        "intermediate_size": dense[min(dense)].width if dense else experts.width,
        "moe_intermediate_size": experts.width,
        "share_expert_dim": experts.shared_width,
        "moe_num_experts": experts.num_experts,
        "moe_top_k": experts.top_k,
        "moe_router_scaling_factor": experts.router.scale,
        "moe_layers_enum": ",".join(str(n) for n in range(config.num_layers) if n not in dense),
        "swiglu_limits": [routed or 0.0 for routed, _ in limits],
        "swiglu_limits_shared": [shared or 0.0 for _, shared in limits],
    }


_EXTRA = "nextn_predict_layers"
_CLAMPS = "swiglu_clamp_exp", "swiglu_clamp_shexp"


def _gguf_step(keys: GgufKeys) -> ModelFields:
    """Reads Step 3.5, except its last blocks, which predict further tokens."""
    count = keys.num_layers - keys.whole(_EXTRA, limit=keys.num_layers - 1)
    slides = gguf_windows.slides(keys, count)
    heads = zip(keys.listed("attention.head_count"), keys.kv_heads(), slides, strict=False)
    mixers = [
        Attention(
            num_heads, kv_heads, keys.head_width,
            gguf_rope.near(keys) if is_near else gguf_rope.llama3(keys, share=0.5),
            window=keys.integer(gguf_windows.WINDOW) if is_near else None,
            qk_norm="head", head_gate="sigmoid",
        )
        for num_heads, kv_heads, is_near in heads
    ]  # fmt: skip
    return {"num_layers": count, "norm_offset": 1.0,
            "pattern": tuple(map(LayerSpec, mixers, _gguf_ffns(keys, count)))}  # fmt: skip


def _gguf_ffns(keys: GgufKeys, count: int) -> list[FeedForward]:
    router = gguf_mixtures.read_router(keys, is_normalized=True, scores="sigmoid")
    router = dataclasses.replace(router, group_best=1)
    shared = keys.whole("expert_shared_feed_forward_length")
    experts = gguf_mixtures.read_experts(keys, router, shared_width=shared)
    dense = keys.whole("leading_dense_block_count", limit=MOST_LAYERS)
    limits = zip(*(keys.limits(key, count) for key in _CLAMPS), strict=True)
    return [
        Gated(keys.ffn_width) if n < dense else dataclasses.replace(experts, late_limits=pair)
        for n, pair in enumerate(limits)
    ]


def _gguf_keys(config: ModelConfig) -> Metadata:
    mixers = [export_fields.attention(layer) for layer in config.layers]
    limits = [getattr(layer.ffn, "late_limits", (None, None)) for layer in config.layers]
    return {
        **(gguf_windows.written(config) | gguf_rope.near_of(config)),
        "attention.head_count": [mixer.num_heads for mixer in mixers],
        "rope.dimension_count": mixers[0].head_width,
        **{key: [pair[n] or 0.0 for pair in limits] for n, key in enumerate(_CLAMPS)},
    }


def _split_experts(prefix: str, layer: LayerSpec, width: int, tensors: Table) -> Parts:
    """Splits stacks of the matrices [E, out, in] of all experts."""
    if not isinstance(layer.ffn, Experts):
        return
    E, F, D = layer.ffn.num_experts, layer.ffn.width, width
    for part, shape in (("gate", (F, D)), ("up", (F, D)), ("down", (D, F))):
        name = f"{prefix}.moe.{part}_proj.weight"
        for expert in range(E):
            yield f"{name}.{expert}", Part(name, (E, *shape), shape, slice(expert, expert + 1))


_TENSORS: Table = {
    **hf_names.LLAMA,
    "mixer/gate": ("self_attn.g_proj.weight",),
    "ffn/router": ("moe.gate.weight",),
    "ffn/router_offsets": ("moe.router_bias",),
    "ffn/experts/gate_up": ("moe.gate_proj.weight.{}", "moe.up_proj.weight.{}"),
    "ffn/experts/down": ("moe.down_proj.weight.{}",),
    "ffn/shared/gate_up": tuple(f"share_expert.{part}_proj.weight" for part in ("gate", "up")),
    "ffn/shared/down": ("share_expert.down_proj.weight",),
}
FAMILIES = (
    Family(
        name="step3p5",
        architecture="Step3p5ForCausalLM",
        read=_read_step,
        reads=("attention_bias", "num_local_experts"),
        write=_write_step,
        feed_forwards=(Gated, Experts),
        tensors=_TENSORS,
        splits=(_split_experts,),
        predicting=hf_names.PREDICTING,
        listed=_LISTED,
        wrapper="Step3p7ForConditionalGeneration",
        ignored=(
            *("vision_model", "vit_large_projector"),
            *("model.vision_model", "model.multi_modal_projector"),
        ),
        gguf=Gguf(
            {**gguf_names.EXPERTS, "mixer/gate": ("attn_gate.weight",)},
            readers={
                "step35": GgufReader(
                    _gguf_step,
                    (
                        *(*gguf_mixtures.DENSE, *gguf_windows.KEYS, *_CLAMPS, _EXTRA),
                        *(gguf_rope.NEAR_THETA, "moe_every_n_layers"),
                    ),
                    free_widths=("rope.dimension_count",),
                )
            },
            writer=GgufWriter("step35", _gguf_keys),
        ),
    ),
)
