"""DeepSeek-V4 (DeepSeek-AI 2026): compressed attention, several residual streams, and experts by
token id in the first layers; without the layers that predict a second token.
"""

import dataclasses
from collections.abc import Sequence

from configs.errors import InputError
from configs.kinds.compressed import Compressed
from configs.kinds.experts import Experts, Router
from configs.kinds.hyper_connections import HyperConnections
from configs.kinds.latent import Indexer
from configs.kinds.rope import Rope, Yarn
from configs.model import MOST_LAYERS, ModelConfig
from inference.families.family import Family, ModelFields
from inference.families.shared import export_fields, fields, mixtures, rope_keys
from inference.families.shared.config_keys import Keys

_WINDOW, _SPARSE = "sliding_attention", "compressed_sparse_attention"
_HEAVY = "heavily_compressed_attention"
_KINDS = _WINDOW, _SPARSE, _HEAVY
_RATIOS = {0: _WINDOW, 4: _SPARSE, 128: _HEAVY}  # of `compress_ratios`
_SCORES = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid", "softmax": "softmax"}
_SHARE, _ROPES = "partial_rotary_factor", ("main", "compress")


def _read_deepseek_v4(keys: Keys) -> ModelFields:
    keys.require_neutral(
        num_key_value_heads=(1, None), n_shared_experts=(1, None), norm_topk_prob=(True, None),
        topk_method=("noaux_tc", None), n_group=(1, None), topk_group=(1, None),
    )  # fmt: skip
    main, compress = _ropes(keys)
    kinds, hashed = _layer_kinds(keys), _hash_layers(keys)
    by_kind = {
        kind: _mixer(keys, kind, main if kind == _WINDOW else compress) for kind in set(kinds)
    }
    scoring, experts = _experts(keys, 0), _experts(keys, keys.integer("vocab_size"))
    ffns = [experts if is_hashed else scoring for is_hashed in hashed]
    streams = HyperConnections(
        keys.integer("hc_mult", 4),
        keys.integer("hc_sinkhorn_iters", 20, limit=1000),
        keys.number("hc_eps", 1e-6),
    )
    return {
        **fields.llama_fields(keys),
        "max_context": keys.integer("max_position_embeddings", 1 << 20, limit=1 << 30),
        "pattern": fields.pattern([by_kind[kind] for kind in kinds], ffns),
        "hyper_connections": streams,
    }


def _layer_kinds(keys: Keys) -> Sequence[str]:
    """Returns each layer's kind of attention: by `layer_types`, else by `compress_ratios`, which
    may go on with layers that predict a second token, else as transformers does.
    """
    count = fields.num_layers(keys)
    kinds = keys.listed("layer_types", count)
    ratios = keys.raw.get("compress_ratios")
    if kinds is not None:
        if unknown := [kind for kind in kinds if kind not in _KINDS]:
            raise InputError(f"layer_types lists {', '.join(_KINDS)}, not {unknown[0]!r}")
        return [str(kind) for kind in kinds]
    if ratios is None:
        behind = (_SPARSE if layer % 2 else _HEAVY for layer in range(count - 2))
        return ([_HEAVY] * 2 + list(behind))[:count]
    if not isinstance(ratios, list) or len(ratios) < count:
        raise InputError(f"compress_ratios must list a number for each of {count} layers")
    if unknown := [ratio for ratio in ratios[:count] if ratio not in _RATIOS]:
        valid = ", ".join(map(str, _RATIOS))
        raise InputError(f"compress_ratios lists {unknown[0]!r}; valid: {valid}")
    return [_RATIOS[ratio] for ratio in ratios[:count]]


def _hash_layers(keys: Keys) -> list[bool]:
    """Returns for each layer whether ids of tokens choose its experts."""
    count = fields.num_layers(keys)
    kinds = keys.listed("mlp_layer_types", count)
    if kinds is None:
        num_hashed = keys.whole("num_hash_layers", 3, limit=MOST_LAYERS)
        return [layer < num_hashed for layer in range(count)]
    if any(kind not in ("hash_moe", "moe") for kind in kinds):
        raise InputError("mlp_layer_types lists 'hash_moe' or 'moe' for each layer")
    return [kind == "hash_moe" for kind in kinds]


def _ropes(keys: Keys) -> tuple[Rope, Rope]:
    """Returns the positions of layers without entries, and of those with them."""
    stated = keys.nested("rope_parameters")
    nested = [stated.nested(name) if stated else None for name in _ROPES]
    ropes = []
    for name, rope_object, theta in zip(_ROPES, nested, (10_000.0, 160_000.0), strict=True):
        if name == "compress" and rope_object is None:
            rope_object = rope_keys.described(keys)
        base = keys.number("rope_theta" if name == "main" else "compress_rope_theta", theta)
        rope_object = None if rope_object is None else rope_keys.without_share(rope_object)
        if rope_object is not None and not all(nested):  # the flat object's base is the windows'
            rope_object = rope_object.updated({"rope_theta": base, **dict.fromkeys(_ROPES)})
        rope = rope_keys.scaled(rope_keys.without_share(keys), rope_object, base)
        if isinstance(rope.scaling, Yarn) and rope.scaling.attention_factor is None:
            scaling = dataclasses.replace(rope.scaling, attention_factor=1.0)
            rope = dataclasses.replace(rope, scaling=scaling)
        ropes.append(dataclasses.replace(rope, neighbours=True))
    return ropes[0], ropes[1]


def _mixer(keys: Keys, kind: str, rope: Rope) -> Compressed:
    rates = keys.nested("compress_rates") or Keys({})
    stride = 0
    if kind != _WINDOW:
        older, default = ("csa", 4) if kind == _SPARSE else ("hca", 128)
        stride = keys.integer(f"compress_rate_{older}", rates.integer(kind, default))
    head_width = keys.integer("head_dim", 512)
    share = keys.optional_number(_SHARE)
    width = keys.integer("qk_rope_head_dim", head_width // 8)
    is_sparse = kind == _SPARSE
    indexer = Indexer(
        keys.integer("index_n_heads", 64),
        keys.integer("index_head_dim", 128),
        keys.integer("index_topk", 512),
    )
    return Compressed(
        num_heads=keys.integer("num_attention_heads", 64),
        head_width=head_width,
        query_rank=keys.integer("q_lora_rank", 1024),
        rope_width=width if share is None else int(head_width * share),
        groups=keys.integer("o_groups", 8),
        group_rank=keys.integer("o_lora_rank", 1024),
        window=keys.integer("sliding_window", 128),
        stride=stride,
        overlaps=is_sparse,
        rope=rope,
        norm_eps=keys.number("rms_norm_eps", 1e-6),
        indexer=indexer if is_sparse else None,
    )


def _experts(keys: Keys, table_rows: int) -> Experts:
    """Returns a mixture whose experts ids of tokens choose, or, with no `table_rows`, scores."""
    router = Router(
        keys.choice("scoring_func", _SCORES, "sqrtsoftplus"),
        scale=keys.number("routed_scaling_factor", 1.5),
        has_offsets=not table_rows,
        table_rows=table_rows,
    )
    width = keys.integer("moe_intermediate_size", 2048)
    return mixtures.experts(
        keys, "n_routed_experts", 256, 6, width, router, shared_width=width,
        limit=keys.optional_number("swiglu_limit", 10.0),
    )  # fmt: skip


def _write_deepseek_v4(config: ModelConfig) -> dict[str, object]:
    mixers = [layer.mixer for layer in config.layers if isinstance(layer.mixer, Compressed)]
    kinds = [_SPARSE if mixer.indexer else _HEAVY if mixer.stride else _WINDOW for mixer in mixers]
    by_kind = dict(zip(kinds, mixers, strict=True))
    first, experts = mixers[0], mixtures.mixture(config)
    indexer = by_kind[_SPARSE].indexer if _SPARSE in by_kind else None
    streams = config.hyper_connections or HyperConnections(1)
    near = by_kind.get(_WINDOW, first).rope
    far = next((mixer.rope for mixer in mixers if mixer.stride), near)
    turns = {
        name: {
            "rope_type": "default",
            **(export_fields.rope_scaling(rope.scaling) or {}),
            "rope_theta": rope.theta,
            _SHARE: first.rope_width / first.head_width,
        }
        for name, rope in zip(_ROPES, (near, far), strict=True)
    }
    raw = export_fields.sizes(config, near)
    del raw["rope_scaling"]
    return raw | mixtures.routed(config) | {
        "compress_rope_theta": far.theta,
        "rope_parameters": turns,
        _SHARE: first.rope_width / first.head_width,
        "num_attention_heads": first.num_heads,
        "num_key_value_heads": 1,
        "head_dim": first.head_width,
        "q_lora_rank": first.query_rank,
        "o_groups": first.groups,
        "o_lora_rank": first.group_rank,
        "sliding_window": first.window,
        "layer_types": kinds,
        "compress_rates": {
            kind: by_kind[kind].stride if kind in by_kind else default
            for kind, default in ((_SPARSE, 4), (_HEAVY, 128))
        },
        "mlp_layer_types": [
            "hash_moe" if layer.ffn is not None and layer.ffn.reads_tokens else "moe"
            for layer in config.layers
        ],
        "index_n_heads": indexer.num_heads if indexer else 64,
        "index_head_dim": indexer.head_width if indexer else 128,
        "index_topk": indexer.top_k if indexer else 512,
        "hc_mult": streams.num_streams,
        "hc_sinkhorn_iters": streams.iterations,
        "hc_eps": streams.eps,
        "swiglu_limit": experts.limit,
        "scoring_func": next(
            name for name, scores in _SCORES.items() if scores == experts.router.scores
        ),
    }  # fmt: skip


def _hyper(part: str) -> dict[str, tuple[str, ...]]:
    endings = {"weights": "fn", "biases": "base", "factors": "scale"}
    name = "attn" if part == "mixer" else part
    return {f"{part}_hyper/{path}": (f"hc_{name}_{end}",) for path, end in endings.items()}


def _pooled(path: str, module: str) -> dict[str, tuple[str, ...]]:
    return {
        f"{path}pooled": (f"{module}.wkv.weight", f"{module}.wgate.weight"),
        f"{path}pooling/bias": (f"{module}.ape",),
        f"{path}pooling/norm": (f"{module}.norm.weight",),
    }


# As transformers writes them, which are the published ones but for what stands outside of layers.
_TENSORS = {
    "embed/table": ("model.embed_tokens.weight",),
    "head/table": ("lm_head.weight",),
    "final_norm": ("model.norm.weight",),
    "hyper/weights": ("model.hc_head.hc_fn",),
    "hyper/biases": ("model.hc_head.hc_base",),
    "hyper/factors": ("model.hc_head.hc_scale",),
    "mixer_norm": ("attn_norm.weight",),
    "ffn_norm": ("ffn_norm.weight",),
    **_hyper("mixer"),
    **_hyper("ffn"),
    "mixer/q_down": ("attn.wq_a.weight",),
    "mixer/q_norm": ("attn.q_norm.weight",),
    "mixer/q_up": ("attn.wq_b.weight",),
    "mixer/kv": ("attn.wkv.weight",),
    "mixer/kv_norm": ("attn.kv_norm.weight",),
    "mixer/sinks": ("attn.attn_sink",),
    "mixer/group_out": ("attn.wo_a.weight",),
    "mixer/out": ("attn.wo_b.weight",),
    **_pooled("mixer/", "attn.compressor"),
    **_pooled("mixer/indexer/", "attn.indexer.compressor"),
    "mixer/indexer/q": ("attn.indexer.wq_b.weight",),
    "mixer/indexer/weights": ("attn.indexer.weights_proj.weight",),
    "ffn/router": ("ffn.gate.weight",),
    "ffn/router_offsets": ("ffn.gate.bias",),
    "ffn/router_table": ("ffn.gate.tid2eid",),
    "ffn/experts/gate_up": ("ffn.experts.{}.w1.weight", "ffn.experts.{}.w3.weight"),
    "ffn/experts/down": ("ffn.experts.{}.w2.weight",),
    "ffn/shared/gate_up": ("ffn.shared_experts.w1.weight", "ffn.shared_experts.w3.weight"),
    "ffn/shared/down": ("ffn.shared_experts.w2.weight",),
}
FAMILIES = (
    Family(
        name="deepseek_v4",
        architecture="DeepseekV4ForCausalLM",
        read=_read_deepseek_v4,
        write=_write_deepseek_v4,
        mixers=(Compressed,),
        feed_forwards=(Experts,),
        tensors=_TENSORS,
        predictor="model.mtp",
        integers=(".ffn.gate.tid2eid",),
        also={  # published names, which all lack the prefix, and what transformers makes of them
            "model.embed.weight": "model.embed_tokens.weight",
            "model.head.weight": "lm_head.weight",
            "head.weight": "lm_head.weight",
            ".hc_head_fn": ".hc_head.hc_fn",
            ".hc_head_base": ".hc_head.hc_base",
            ".hc_head_scale": ".hc_head.hc_scale",
            ".attn.norm.weight": ".attn.kv_norm.weight",
        },
    ),
)
