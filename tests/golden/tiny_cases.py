"""The tiny checkpoints as data: a configuration of each family in every head layout that it allows,
tied and untied, with odd sizes and each of its quirks.

Prompt 0 is longer than two windows and three pages of 16 tokens.
"""

import dataclasses
from typing import Any

import tiny_tokenizer
import torch
import transformers

VOCAB_SIZE = 131


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint: its config's fields and how it is stored; 'family-...' is its name.

    Attributes:
        version_4_keys: config.json is rewritten with the keys of transformers 4, which most
            published checkpoints still have.
        rewrites: keys of config.json as other writers leave them; None removes a key.
        bare: tensors are named without the base model's prefix, and masks are stored with them,
            as in the first checkpoints of GPT-2.
        stepwise: logits are those of decoding token by token, after a prompt of so many tokens.
        greedy: greedy continuations of ten prompts are stored too.
        beams: beam searches of three prompts are stored too.
    """

    name: str
    fields: dict
    seed: int
    dtype: torch.dtype = torch.bfloat16
    version_4_keys: bool = False
    rewrites: dict = dataclasses.field(default_factory=dict)
    bare: bool = False
    max_shard_size: str = "5GB"
    tokenizer: bool = False
    stepwise: int | None = None
    greedy: bool = False
    beams: bool = False

    @property
    def family(self) -> str:
        """The first word of its name."""
        return self.name.split("-")[0]

    def config(self) -> transformers.PreTrainedConfig:
        """As transformers takes it."""
        kind, defaults = _FAMILIES[self.family]
        return kind(**defaults | self.fields)


_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 52,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_OWN_TOKENS: dict[str, Any] = {k: v for k, v in _COMMON.items() if not k.endswith("token_id")}
_LLAMA = _OWN_TOKENS | {"pad_token_id": None, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
_FAMILIES: dict[str, tuple[Any, dict]] = {
    "llama": (transformers.LlamaConfig, _LLAMA),
    "gemma3": (transformers.Gemma3TextConfig, _OWN_TOKENS | {"sliding_window": 24}),
    "mistral": (transformers.MistralConfig, _COMMON),
    "qwen2": (transformers.Qwen2Config, _COMMON),
    "qwen3": (transformers.Qwen3Config, _COMMON),
    "smollm3": (transformers.SmolLM3Config, _COMMON),
    "gemma2": (transformers.Gemma2Config, _COMMON | {"sliding_window": 24}),
    "phi3": (transformers.Phi3Config, _COMMON),
    "olmo2": (transformers.Olmo2Config, _COMMON),
    "mixtral": (transformers.MixtralConfig, _COMMON | {"intermediate_size": 20}),
    "qwen2_moe": (transformers.Qwen2MoeConfig, _COMMON),
    "qwen3_moe": (transformers.Qwen3MoeConfig, _COMMON),
    "olmoe": (transformers.OlmoeConfig, _COMMON | {"intermediate_size": 20}),
    "deepseek_v2": (transformers.DeepseekV2Config, _COMMON),
    "deepseek_v3": (transformers.DeepseekV3Config, _COMMON),
    "glm4_moe": (transformers.Glm4MoeConfig, _COMMON),
    "gpt_oss": (
        transformers.GptOssConfig, _COMMON | {"sliding_window": 24, "intermediate_size": 20}
    ),
    "olmo3": (transformers.Olmo3Config, _COMMON | {"sliding_window": 24}),
    "gpt2": (transformers.GPT2Config, {"vocab_size": VOCAB_SIZE} | {
        key: value for key, value in _COMMON.items() if key.endswith("token_id")
    }),
}  # fmt: skip

# A context below the prompt's: all three branches of the rule occur among the 8 frequencies.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


def _widths(
    width: int, layers: int, heads: int, kv_heads: int, head_width: int | None = None
) -> dict:
    """`head_width` where the family has one that is not width / heads."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    } | ({} if head_width is None else {"head_dim": head_width})


def _layers(pattern: str) -> list[str]:
    """'ssf' names two sliding layers, then a full one."""
    return [{"s": "sliding_attention", "f": "full_attention"}[letter] for letter in pattern]


def _gemma3_rope(global_base: float, local_base: float, **scaling: Any) -> dict:
    return {
        "full_attention": {"rope_type": "default", "rope_theta": global_base} | scaling,
        "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
    }


def _rope(kind: str, theta: float = 10000.0, **more: Any) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta} | more}


def _latent(rank: int, rotary: int, nope: int, value: int, query_rank: int | None = None) -> dict:
    return {
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
        "q_lora_rank": query_rank,
    }


def _longrope(pairs: int, original: int, share: float = 1.0) -> dict:
    """Divisors that differ from pair to pair; `original` is Phi-3's key beside the others."""
    return _rope(
        "longrope",
        short_factor=[1.0 + 0.05 * i for i in range(pairs)],
        long_factor=[1.5 + 0.7 * i for i in range(pairs)],
        partial_rotary_factor=share,
    ) | {"original_max_position_embeddings": original}


CASES = (
    Case("llama-mqa-float32", _widths(40, 2, 5, 1, 10), seed=1, dtype=torch.float32),
    Case(
        "llama-gqa-tied-rope3",
        _widths(48, 3, 4, 2, 16) | _TIED | {"rope_parameters": _LLAMA3_ROPE},
        seed=2,
        version_4_keys=True,
        greedy=True,
        beams=True,
    ),
    # head_dim is absent from this config.json, as from those of Llama 2.
    Case(
        "llama-mha-sharded",
        _widths(36, 2, 3, 3, 12),
        seed=3,
        version_4_keys=True,
        max_shard_size="20KB",
    ),
    Case(
        "llama-tokenizer",
        _widths(32, 2, 4, 2, 8)
        | _TIED
        | {
            "vocab_size": tiny_tokenizer.VOCAB_SIZE,
            "bos_token_id": tiny_tokenizer.BOS_ID,
            "eos_token_id": tiny_tokenizer.EOS_IDS,
        },
        seed=9,
        tokenizer=True,
    ),
    # The scale of attention is not the head width's; the global layers' positions are stretched.
    Case(
        "gemma3-gqa-linear-rope",
        _widths(40, 6, 4, 2, 10)
        | {
            "query_pre_attn_scalar": 24,
            "layer_types": _layers("ssfssf"),
            "rope_parameters": _gemma3_rope(1e6, 1e4, rope_type="linear", factor=8.0),
        },
        seed=5,
        version_4_keys=True,
        greedy=True,
    ),
    # A pattern that the number of layers is no multiple of.
    Case(
        "gemma3-mqa",
        _widths(36, 5, 3, 1, 10)
        | {
            "query_pre_attn_scalar": 10,
            "layer_types": _layers("ssfss"),
            "rope_parameters": _gemma3_rope(1e5, 100.0),
        },
        seed=6,
    ),
    Case(
        "gemma3-mha-untied-float32-sharded",
        _widths(36, 3, 3, 3, 14)
        | _UNTIED
        | {
            "query_pre_attn_scalar": 14,
            "layer_types": _layers("sfs"),
            "rope_parameters": _gemma3_rope(1e6, 1e4),
        },
        seed=7,
        dtype=torch.float32,
        max_shard_size="40KB",
    ),
    # A window is stated and not used; the next one's upper layers have it, by the older rule.
    Case(
        "qwen2-gqa-tied",
        _widths(40, 2, 4, 2) | _TIED | _rope("default", 1e6),
        seed=11,
        version_4_keys=True,
        rewrites={"sliding_window": 24, "max_window_layers": 1, "layer_types": None},
        greedy=True,
    ),
    Case(
        "qwen2-mqa-window",
        _widths(36, 3, 3, 1)
        | _UNTIED
        | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
        seed=12,
        version_4_keys=True,
        rewrites={"layer_types": None},
    ),
    Case("qwen2-mha-untied-float32", _widths(36, 2, 3, 3) | _UNTIED, seed=13, dtype=torch.float32),
    Case(
        "mistral-gqa-window",
        _widths(40, 3, 4, 2, 12) | _UNTIED | {"sliding_window": 24},
        seed=21,
        version_4_keys=True,
        greedy=True,
    ),
    Case("mistral-mqa-tied", _widths(36, 2, 3, 1, 12) | _TIED | {"sliding_window": None}, seed=22),
    Case(
        "mistral-mha-window-float32",
        _widths(30, 2, 3, 3, 10) | _UNTIED | {"sliding_window": 17} | _rope("default", 1e6),
        seed=23,
        dtype=torch.float32,
    ),
    Case(
        "qwen3-gqa-tied",
        _widths(40, 2, 4, 2, 14) | _TIED | _rope("default", 1e6),
        seed=31,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "qwen3-mqa-bias-window",
        _widths(36, 3, 3, 1, 10)
        | _UNTIED
        | {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": _layers("sfs"),
        },
        seed=32,
    ),
    Case("qwen3-mha-untied-float32", _widths(30, 2, 3, 3, 8) | _UNTIED, seed=33,
         dtype=torch.float32),
    # Every fourth layer does not rotate; then by a list; then every second, with a window.
    Case(
        "smollm3-gqa-tied",
        _widths(40, 5, 4, 2) | _TIED | _rope("default", 5e6),
        seed=41,
        version_4_keys=True,
        rewrites={"layer_types": None},
        greedy=True,
    ),
    Case(
        "smollm3-mqa-untied-bias",
        _widths(36, 3, 3, 1)
        | _UNTIED
        | {"no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True},
        seed=42,
    ),
    Case(
        "smollm3-mha-window-float32",
        _widths(36, 4, 3, 3)
        | _TIED
        | {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 24},
        seed=43,
        dtype=torch.float32,
        rewrites={"no_rope_layers": None, "layer_types": None},
    ),
    # Caps that bite: uncapped scores and logits reach several times as far.
    Case(
        "gemma2-gqa-tied",
        _widths(40, 4, 4, 2, 12)
        | {
            "attn_logit_softcapping": 1.5,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 20,
        },
        seed=51,
        version_4_keys=True,
        rewrites={"layer_types": None},
        greedy=True,
    ),
    Case(
        "gemma2-mqa-no-cap-of-scores",
        _widths(36, 3, 3, 1, 10)
        | {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 10,
            "attention_bias": True,
        },
        seed=52,
    ),
    Case(
        "gemma2-mha-untied-float32",
        _widths(36, 3, 3, 3, 8)
        | _UNTIED
        | {
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": None,
            "layer_types": _layers("sfs"),
        },
        seed=53,
        dtype=torch.float32,
    ),
    Case(
        "phi3-mha-window",
        _widths(36, 2, 3, 3) | _UNTIED | {"sliding_window": 23},
        seed=61,
        version_4_keys=True,
        greedy=True,
    ),
    # Both prompts exceed the original context; then neither does. Three quarters of a head rotate.
    Case(
        "phi3-gqa-longrope-partial",
        _widths(64, 2, 4, 2) | _UNTIED | _longrope(6, original=24, share=0.75),
        seed=62,
        version_4_keys=True,
    ),
    Case(
        "phi3-mqa-tied-longrope-within-float32",
        _widths(36, 2, 3, 1) | _TIED | _longrope(6, original=128),
        seed=63,
        dtype=torch.float32,
    ),
    Case(
        "olmo2-mha-untied",
        _widths(36, 3, 3, 3) | _UNTIED | _rope("default", 5e5),
        seed=71,
        version_4_keys=True,
        greedy=True,
    ),
    Case("olmo2-gqa-tied-float32", _widths(40, 2, 4, 2) | _TIED, seed=72, dtype=torch.float32),
    Case("olmo2-mqa-bias", _widths(36, 2, 3, 1) | _UNTIED | {"attention_bias": True}, seed=73),
    Case(
        "llama-gqa-yarn-bias",
        _widths(48, 2, 4, 2, 16)
        | {"attention_bias": True, "mlp_bias": True}
        | _rope("yarn", factor=4.0, original_max_position_embeddings=32),
        seed=81,
        version_4_keys=True,
    ),
    Case(
        "llama-mha-tied-yarn-scales-float32",
        _widths(36, 2, 3, 3, 12)
        | _TIED
        | _rope(
            "yarn", 500.0, factor=8.0, original_max_position_embeddings=64, beta_fast=4.0,
            beta_slow=0.5, mscale=1.0, mscale_all_dim=0.7, truncate=False,
        ),
        seed=82,
        dtype=torch.float32,
    ),
    # The base grows from token 41 on, in a context that began with 30.
    Case(
        "llama-mqa-dynamic",
        _widths(40, 2, 4, 1, 10) | {"max_position_embeddings": 40} | _rope("dynamic", factor=4.0),
        seed=83,
        stepwise=30,
    ),
    # Odd numbers of experts; in the last one a token visits all of them.
    Case(
        "mixtral-gqa-float32",
        _widths(40, 2, 4, 2) | _UNTIED | {"num_local_experts": 5, "num_experts_per_tok": 3},
        seed=101,
        dtype=torch.float32,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "mixtral-mqa-window-all",
        _widths(36, 2, 3, 1, 10)
        | _TIED
        | {"sliding_window": 24, "num_local_experts": 3, "num_experts_per_tok": 3},
        seed=102,
    ),
    # Layers without experts, by step and by list; a shared expert behind a gate.
    Case(
        "qwen2_moe-mha-dense-layers",
        _widths(36, 5, 3, 3)
        | _UNTIED
        | {
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
        seed=111,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "qwen2_moe-gqa-window",
        _widths(40, 3, 4, 2)
        | _TIED
        | {
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 36,
            "num_experts": 5,
            "num_experts_per_tok": 1,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
        },
        seed=112,
    ),
    Case(
        "qwen3_moe-gqa-float32",
        _widths(32, 3, 4, 2, 10)
        | _UNTIED
        | {
            "moe_intermediate_size": 20,
            "num_experts": 9,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
        seed=121,
        dtype=torch.float32,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "qwen3_moe-mqa-bias-window",
        _widths(36, 2, 3, 1, 10)
        | _TIED
        | {
            "moe_intermediate_size": 28,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 24,
        },
        seed=122,
    ),
    Case(
        "olmoe-mha-float32",
        _widths(36, 2, 3, 3) | _UNTIED | {"num_experts": 6, "num_experts_per_tok": 5},
        seed=131,
        dtype=torch.float32,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "olmoe-gqa-norm",
        _widths(40, 2, 4, 2)
        | _TIED
        | {"num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True},
        seed=132,
    ),
    # Queries at once, as in V2-Lite; then by a latent vector, with groups and stretched positions.
    Case(
        "deepseek_v2-mha-lite",
        _widths(36, 3, 3, 3)
        | _UNTIED
        | _latent(18, 6, 8, 10)
        | {
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
        },
        seed=141,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "deepseek_v2-mha-groups-yarn",
        _widths(40, 2, 4, 4)
        | _TIED
        | _latent(14, 8, 6, 12, query_rank=22)
        | {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 4.0,
        }
        | _rope(
            "yarn", factor=8.0, original_max_position_embeddings=32, mscale=0.7,
            mscale_all_dim=0.9, beta_fast=8.0,
        ),
        seed=142,
    ),
    Case(
        "deepseek_v3-mha-groups-yarn",
        _widths(40, 3, 5, 5)
        | _UNTIED
        | _latent(18, 8, 10, 6, query_rank=22)
        | {
            "first_k_dense_replace": 1,
            "n_routed_experts": 9,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 20,
            "n_group": 3,
            "topk_group": 2,
        }
        | _rope(
            "yarn", factor=8.0, original_max_position_embeddings=32, mscale=1.0,
            mscale_all_dim=1.0, beta_fast=8.0,
        ),
        seed=151,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "deepseek_v3-mha-halves-float32",
        _widths(36, 2, 3, 3)
        | _TIED
        | _latent(10, 6, 8, 12)
        | {
            "first_k_dense_replace": 0,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 24,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
        },
        seed=152,
        dtype=torch.float32,
    ),
    Case(
        "glm4_moe-gqa-norm-bias",
        _widths(40, 3, 4, 2, 12)
        | _UNTIED
        | {
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.5,
        },
        seed=161,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "glm4_moe-mqa-groups-float32",
        _widths(36, 2, 3, 1, 8)
        | _TIED
        | {
            "first_k_dense_replace": 0,
            "n_routed_experts": 6,
            "n_shared_experts": 2,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "n_group": 3,
            "topk_group": 1,
        },
        seed=162,
        dtype=torch.float32,
    ),
    # The limit bites: the feed-forward's inputs reach beyond it.
    Case(
        "gpt_oss-gqa-limit",
        _widths(40, 3, 4, 2, 12)
        | _UNTIED
        | {"num_local_experts": 5, "num_experts_per_tok": 3, "swiglu_limit": 0.8},
        seed=171,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "gpt_oss-mqa-full",
        _widths(36, 2, 3, 1, 10)
        | _TIED
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "layer_types": _layers("ff"),
            **_rope("default", 1e4),
        },
        seed=172,
    ),
    # The positions of layers without a window are stretched.
    Case(
        "olmo3-gqa-yarn",
        _widths(40, 4, 4, 2)
        | _UNTIED
        | {
            "layer_types": _layers("ssfs"),
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e4,
                    "factor": 8.0,
                    "original_max_position_embeddings": 32,
                    "beta_fast": 8.0,
                    "beta_slow": 1.0,
                    "attention_factor": 1.2,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
            },
        },
        seed=181,
        greedy=True,
    ),
    Case("olmo3-mha-tied-float32", _widths(36, 3, 3, 3) | _TIED, seed=182, dtype=torch.float32),
    # The layouts of the checkpoints that GPT-2 came in, and of those that transformers writes.
    Case(
        "gpt2-mha-tied-bare",
        {"n_embd": 40, "n_layer": 3, "n_head": 4, "n_positions": 101},
        seed=91,
        bare=True,
        greedy=True,
    ),
    Case(
        "gpt2-mha-untied-inner-float32",
        {"n_embd": 30, "n_layer": 2, "n_head": 3, "n_positions": 90, "n_inner": 52} | _UNTIED,
        seed=92,
        dtype=torch.float32,
    ),
)  # fmt: skip
