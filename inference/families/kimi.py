"""Kimi Linear (Kimi Team 2025, arXiv 2510.26692): Kimi Delta Attention, latent attention without
positions, and DeepSeek-V3's mixture.
"""

from configs.errors import InputError, shown
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward, Mixer
from configs.kinds.latent import Latent
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    delta_net,
    export_fields,
    fields,
    gguf_latents,
    gguf_mixtures,
    gguf_names,
    hf_names,
    latents,
    mixtures,
    parts,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys
from inference.families.shared.gguf_states import Metadata

# transformers' attributes, which other families have as keys, by the keys of published files.
_SPELLED = {
    "model_max_length": "max_position_embeddings",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "moe_renormalize": "norm_topk_prob",
}


def _read_kimi(keys: Keys) -> ModelFields:
    keys = _spelled(keys)
    keys.require_neutral(
        tie_word_embeddings=(False, None),
        mla_use_nope=(True, None),
        moe_router_activation_func=("sigmoid", None),
        moe_layer_freq=(1, None),
    )
    return {
        **fields.llama_fields(keys, eps=1e-5),
        "max_context": keys.integer("max_position_embeddings", 1 << 20),
        "pattern": fields.pattern(_mixers(keys), _ffns(keys)),
    }


def _spelled(keys: Keys) -> Keys:
    """Returns the keys by one name each; published files and transformers' attributes have two."""
    raw = {"intermediate_size": 9216} | keys.raw
    for published, attribute in (*_SPELLED.items(), ("num_local_experts", "num_experts")):
        both = raw.pop(published, None), raw.get(attribute)
        if None not in both and both[0] != both[1]:
            raise InputError(
                f"{published}={shown(both[0])} and {attribute}={shown(both[1])} name the same"
            )
        raw[attribute] = both[1] if both[0] is None else both[0]
    return Keys(raw, keys.label)


def _mixers(keys: Keys) -> list[Mixer]:
    stated = keys.nested("linear_attn_config") or Keys({})
    num_heads = stated.integer("num_heads", keys.integer("linear_num_heads", 32))
    width = stated.integer("head_dim", keys.integer("linear_head_dim", 128))
    taps = stated.integer("short_conv_kernel_size", keys.integer("linear_conv_kernel_dim", 4))
    linear = _delta_net(num_heads, width, taps)
    count = keys.integer("num_attention_heads", 32)
    if keys.integer("num_key_value_heads", count) != count:
        raise InputError(
            f"num_key_value_heads is num_attention_heads={count}, all of which read one latent "
            f"vector, not {shown(keys.raw['num_key_value_heads'])}"
        )
    latent = latents.attention(keys, count, None, rope=None)
    full = _full_layers(keys, stated)
    return delta_net.by_type(keys, linear, latent, lambda layer: layer in full)


def _delta_net(num_heads: int, width: int, taps: int) -> DeltaNet:
    return DeltaNet(
        num_heads, num_heads, width, width, taps, decay_rank=width, gate_rank=width, gate="sigmoid"
    )


def _full_layers(keys: Keys, stated: Keys) -> frozenset[int]:
    """Returns the layers that attend, where `layer_types` is absent; files count from 1."""
    count = fields.num_layers(keys)
    linear, full = stated.raw.get("kda_layers"), stated.raw.get("full_attn_layers")
    if linear is None and full is None:
        return frozenset(range(4, count, 4))
    full = [] if full is None else full
    if not (
        isinstance(linear, list)
        and isinstance(full, list)
        and all(type(layer) is int for layer in (*linear, *full))
        and sorted(linear + full) == list(range(1, count + 1))
    ):
        raise InputError(
            f"{stated.label}kda_layers and full_attn_layers list each of the layers 1 to {count} "
            "once"
        )
    return frozenset(number - 1 for number in full)


def _ffns(keys: Keys) -> list[FeedForward]:
    width = keys.integer("moe_intermediate_size", 1024)
    experts = mixtures.experts(
        keys, "num_experts", 256, 8, width, mixtures.offset_router(keys, 2.446, 1, 1),
        shared_width=width * keys.integer("n_shared_experts", 1),
    )  # fmt: skip
    ffns = mixtures.by_mlp_types(keys, experts)
    return ffns or mixtures.after_dense(keys, experts, first_dense=1)


def _write_kimi(config: ModelConfig) -> dict[str, object]:
    latent = next(iter(config.mixers(Latent)), Latent(1, 1, 2, 1, 1))
    linear = delta_net.first(config)
    is_linear = [isinstance(layer.mixer, DeltaNet) for layer in config.layers]
    dense = [layer.ffn for layer in config.layers if isinstance(layer.ffn, Gated)]
    raw = export_fields.sizes(config, Rope())
    del raw["max_position_embeddings"], raw["rope_theta"], raw["rope_scaling"]
    raw["model_max_length"] = config.max_context
    if dense:
        raw["intermediate_size"] = dense[0].width
    raw |= {
        "mlp_layer_types": mixtures.mlp_types(config),
        "linear_attn_config": {
            "kda_layers": [n for n, is_kda in enumerate(is_linear, 1) if is_kda],
            "full_attn_layers": [n for n, is_kda in enumerate(is_linear, 1) if not is_kda],
            "num_heads": linear.num_heads,
            "head_dim": linear.key_width,
            "short_conv_kernel_size": linear.conv_width,
        },
        **latents.heads(latent),
        "mla_use_nope": True,
    }
    return raw | (_mixture_keys(config) if config.mixtures else {})


def _mixture_keys(config: ModelConfig) -> dict[str, object]:
    experts = mixtures.mixture(config)
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_token": experts.top_k,
        "num_shared_experts": experts.shared_width // experts.width,
        "moe_intermediate_size": experts.width,
        "moe_renormalize": experts.router.is_normalized,
        "num_expert_group": experts.router.num_groups,
        "topk_group": experts.router.top_groups,
        "routed_scaling_factor": experts.router.scale,
    }


def _delta_names(module: str) -> Table:
    """Returns the names of Kimi Delta Attention, which projects decays and gates in two steps."""
    return {
        **hf_names.delta_net(module),
        "delta_net/gates": (f"{module}.b_proj.weight",),
        "delta_net/down": (f"{module}.f_a_proj.weight", f"{module}.g_a_proj.weight"),
        "delta_net/decay_up": (f"{module}.f_b_proj.weight",),
        "delta_net/gate_up": (f"{module}.g_b_proj.weight",),
        "delta_net/rate": (f"{module}.A_log.heads",),
    }


_TENSORS: Table = {
    **hf_names.LATENT,
    **hf_names.SPARSE_BLOCK,
    **_delta_names("self_attn"),
    "ffn/router_offsets": ("block_sparse_moe.gate.e_score_correction_bias",),
    "ffn/shared/gate_up": tuple(
        f"block_sparse_moe.shared_experts.{part}_proj.weight" for part in ("gate", "up")
    ),
    "ffn/shared/down": ("block_sparse_moe.shared_experts.down_proj.weight",),
}
_GGUF: Table = {
    **gguf_names.LATENT,
    "delta_net/in": tuple(f"attn_{part}.weight" for part in "vqk"),
    "delta_net/conv": tuple(f"ssm_conv1d_{part}.weight" for part in "vqk"),
    "delta_net/gates": ("ssm_beta.weight",),
    "delta_net/down": ("ssm_f_a.weight", "ssm_g_a.weight"),
    "delta_net/decay_up": ("ssm_f_b.weight",),
    "delta_net/gate_up": ("ssm_g_b.weight",),
    "delta_net/rate": ("ssm_a",),
    "delta_net/step_bias": ("ssm_dt.bias",),
    "delta_net/out_norm": ("ssm_norm.weight",),
    "delta_net/out": ("attn_output.weight",),
}


def _gguf_kimi(keys: GgufKeys) -> ModelFields:
    """Reads Kimi Linear, whose layers without key/value heads keep states."""
    kv_heads = keys.kv_heads()
    betas = f"blk.{kv_heads.index(0) if 0 in kv_heads else 0}.ssm_beta.weight"
    count, *_ = keys.shapes.get(betas, (keys.integer("attention.head_count"),))
    linear = _delta_net(count, keys.integer("kda.head_dim"), keys.integer("ssm.conv_kernel"))
    latent = gguf_latents.attention(keys, rope=None)
    router = gguf_mixtures.read_router(keys, is_normalized=True, scores="sigmoid")
    ffns = gguf_mixtures.feed_forwards(keys, router, keys.num_layers)
    mixers = [latent if heads else linear for heads in kv_heads]
    return {"pattern": tuple(map(LayerSpec, mixers, ffns))}


def _gguf_states(config: ModelConfig) -> Metadata:
    linear = delta_net.first(config)
    return {
        "attention.head_count_kv": [int(isinstance(x.mixer, Latent)) for x in config.layers],
        "kda.head_dim": linear.key_width,
        "ssm.conv_kernel": linear.conv_width,
    }


FAMILIES = (
    Family(
        name="kimi_linear",
        architecture="KimiLinearForCausalLM",
        read=_read_kimi,
        reads=("attention_bias", "num_local_experts"),
        write=_write_kimi,
        mixers=(Latent, DeltaNet),
        feed_forwards=(Gated, Experts),
        tensors=_TENSORS,
        splits=(parts.delta_net, parts.latent_heads),
        recut=parts.separate_taps,
        also={
            f"block_sparse_moe.{part}_proj.weight": f"mlp.{part}_proj.weight"
            for part in ("gate", "up", "down")
        },
        gguf=Gguf(
            _GGUF,
            readers={
                "kimi-linear": GgufReader(
                    _gguf_kimi,
                    (*gguf_mixtures.DENSE, *gguf_latents.HEADS, "kda.head_dim", "ssm.conv_kernel"),
                    gguf_latents.FREE_WIDTHS,
                )
            },
            writer=GgufWriter("kimi-linear", _gguf_states),
        ),
    ),
)
