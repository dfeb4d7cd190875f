"""`params.json`, which Mistral's repositories of Mistral Large 3 have in place of `config.json`, as
the keys of one.
"""

from configs.errors import InputError
from inference.families.shared.config_keys import Keys

NAME = "params.json"

# Keys of `config.json` by those of `params.json`.
_KEYS = {
    "dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
}
_SAME = (
    *("vocab_size", "rope_theta", "max_position_embeddings", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_MIXTURE = {
    "expert_hidden_dim": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_expert_groups": "n_group",
    "num_expert_groups_per_tok": "topk_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "routed_scale": "routed_scaling_factor",
    "route_every_n": "moe_layer_freq",
}
_YARN = {"alpha": "beta_slow", "beta": "beta_fast", "factor": "factor"}
_ORIGINAL = "original_max_position_embeddings"


def described(keys: Keys) -> dict[str, object]:
    """Returns the keys of a `config.json`; raises an `InputError` for what is not Mistral Large 3,
    or is stored in few bits that are not FP8.
    """
    mixture, yarn = keys.nested("moe"), keys.nested("yarn")
    if mixture is None or keys.raw.get("kv_lora_rank") is None:
        raise InputError(
            "moe and kv_lora_rank are missing: of params.json alone Mistral Large 3 is read; other "
            "models have a config.json beside it"
        )
    keys.require_neutral(
        activation=("silu", None), sliding_window=(None,), use_biases=(None, False)
    )
    mixture.require_neutral(
        renorm_strategy=("WEIGHTS", None), use_load_balancing_bias=(False, None)
    )
    raw: dict[str, object] = {"architectures": ["MistralLarge3ForCausalLM"], "dtype": "bfloat16"}
    raw |= {theirs: keys.raw[ours] for ours, theirs in _KEYS.items() if ours in keys.raw}
    raw |= {name: keys.raw[name] for name in _SAME if name in keys.raw}
    raw |= {name: mixture.raw[key] for key, name in _MIXTURE.items() if key in mixture.raw}
    raw.setdefault("max_position_embeddings", 128_000)
    raw["rope_parameters"] = _positions(keys, yarn)
    if (stored := keys.nested("quantization")) is not None:
        raw["quantization_config"] = _fp8(stored)
    return raw


def _fp8(stored: Keys) -> dict[str, object]:
    """Returns `quantization_config` of weights with a scale a tensor."""
    stored.choice("qformat_weight", {"fp8_e4m3": "fp8"}, "none")
    schemes = {"NO_SCALES": "dynamic", "TENSOR": "static"}
    return {
        "quant_method": "fp8",
        "activation_scheme": stored.choice("qscheme_act", schemes, "TENSOR"),
        "modules_to_not_convert": ["tok_embeddings", "output", "gate"],
    }


def _positions(keys: Keys, yarn: Keys | None) -> dict[str, object]:
    """Returns `rope_parameters`; without `apply_scale` scores are not scaled either."""
    rope: dict[str, object] = {"rope_type": "default"}
    if yarn is not None:
        rope = {name: yarn.raw[key] for key, name in _YARN.items() if key in yarn.raw}
        scales: dict[str, object] = {"attention_factor": 1.0}
        if yarn.boolean("apply_scale", True):
            scales["mscale_all_dim"] = 1.0
        rope |= scales | {"rope_type": "yarn", _ORIGINAL: yarn.integer(_ORIGINAL)}
    if heated := keys.nested("llama_4_scaling"):
        length = heated.integer(_ORIGINAL)
        if rope.setdefault(_ORIGINAL, length) != length:
            raise InputError(
                f"llama_4_scaling: {_ORIGINAL}={length} differs from yarn's {rope[_ORIGINAL]}"
            )
        rope["llama_4_scaling_beta"] = heated.number("beta")
    return rope
