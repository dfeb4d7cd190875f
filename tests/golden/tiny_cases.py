"""The tiny checkpoints as data: a configuration of each family in every head layout that it allows,
tied and untied, with odd sizes and each of its quirks.

Prompt 0 is longer than two windows and three pages of 16 tokens.
"""

from typing import Any

import tiny_dense
import tiny_gated_heads
import tiny_hyper
import tiny_mistral
import tiny_mixtures
import tiny_newer_mixtures
import tiny_parallel
import tiny_tokenizer
import torch
from tiny_families import TIED, UNTIED, Case, layers, rope, widths

# A context below the prompt's: all three branches of the rule occur among the 8 frequencies.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _gemma3_rope(global_base: float, local_base: float, **scaling: Any) -> dict:
    return {
        "full_attention": {"rope_type": "default", "rope_theta": global_base} | scaling,
        "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
    }


def _longrope(pairs: int, original: int, share: float = 1.0) -> dict:
    """Divisors that differ from pair to pair; `original` is Phi-3's key beside the others."""
    return rope(
        "longrope",
        short_factor=[1.0 + 0.05 * i for i in range(pairs)],
        long_factor=[1.5 + 0.7 * i for i in range(pairs)],
        partial_rotary_factor=share,
    ) | {"original_max_position_embeddings": original}


CASES = (
    Case("llama-mqa-float32", widths(40, 2, 5, 1, 10), seed=1, dtype=torch.float32),
    Case(
        "llama-gqa-tied-rope3",
        widths(48, 3, 4, 2, 16) | TIED | {"rope_parameters": _LLAMA3_ROPE},
        seed=2,
        version_4_keys=True,
        greedy=True,
        beams=True,
    ),
    # head_dim is absent from this config.json, as from those of Llama 2.
    Case(
        "llama-mha-sharded",
        widths(36, 2, 3, 3, 12),
        seed=3,
        version_4_keys=True,
        max_shard_size="20KB",
    ),
    Case(
        "llama-tokenizer",
        widths(32, 2, 4, 2, 8)
        | TIED
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
        widths(40, 6, 4, 2, 10)
        | {
            "query_pre_attn_scalar": 24,
            "layer_types": layers("ssfssf"),
            "rope_parameters": _gemma3_rope(1e6, 1e4, rope_type="linear", factor=8.0),
        },
        seed=5,
        version_4_keys=True,
        greedy=True,
    ),
    # A pattern that the number of layers is no multiple of.
    Case(
        "gemma3-mqa",
        widths(36, 5, 3, 1, 10)
        | {
            "query_pre_attn_scalar": 10,
            "layer_types": layers("ssfss"),
            "rope_parameters": _gemma3_rope(1e5, 100.0),
        },
        seed=6,
    ),
    Case(
        "gemma3-mha-untied-float32-sharded",
        widths(36, 3, 3, 3, 14)
        | UNTIED
        | {
            "query_pre_attn_scalar": 14,
            "layer_types": layers("sfs"),
            "rope_parameters": _gemma3_rope(1e6, 1e4),
        },
        seed=7,
        dtype=torch.float32,
        max_shard_size="40KB",
    ),
    # The upper three layers read earlier ones' caches and have a feed-forward twice as wide.
    Case(
        "gemma4-gqa-inputs-sharing",
        widths(40, 6, 4, 2, 10)
        | {
            "global_head_dim": 16,
            "intermediate_size": 28,
            "hidden_size_per_layer_input": 6,
            "layer_types": layers("ssfssf"),
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
        seed=501,
        greedy=True,
    ),
    Case(
        "gemma4_unified-mha-mqa",
        widths(30, 4, 3, 3, 10)
        | UNTIED
        | {
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "layer_types": layers("sfsf"),
            "final_logit_softcapping": 4.0,
        },
        seed=503,
    ),
    # A window is stated and not used; the next one's upper layers have it, by the older rule.
    Case(
        "qwen2-gqa-tied",
        widths(40, 2, 4, 2) | TIED | rope("default", 1e6),
        seed=11,
        version_4_keys=True,
        rewrites={"sliding_window": 24, "max_window_layers": 1, "layer_types": None},
        greedy=True,
    ),
    Case(
        "qwen2-mqa-window",
        widths(36, 3, 3, 1)
        | UNTIED
        | {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
        seed=12,
        version_4_keys=True,
        rewrites={"layer_types": None},
    ),
    Case("qwen2-mha-untied-float32", widths(36, 2, 3, 3) | UNTIED, seed=13, dtype=torch.float32),
    Case(
        "mistral-gqa-window",
        widths(40, 3, 4, 2, 12) | UNTIED | {"sliding_window": 24},
        seed=21,
        version_4_keys=True,
        greedy=True,
    ),
    Case("mistral-mqa-tied", widths(36, 2, 3, 1, 12) | TIED | {"sliding_window": None}, seed=22),
    Case(
        "mistral-mha-window-float32",
        widths(30, 2, 3, 3, 10) | UNTIED | {"sliding_window": 17} | rope("default", 1e6),
        seed=23,
        dtype=torch.float32,
    ),
    Case(
        "qwen3-gqa-tied",
        widths(40, 2, 4, 2, 14) | TIED | rope("default", 1e6),
        seed=31,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "qwen3-mqa-bias-window",
        widths(36, 3, 3, 1, 10)
        | UNTIED
        | {
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 24,
            "layer_types": layers("sfs"),
        },
        seed=32,
    ),
    Case("qwen3-mha-untied-float32", widths(30, 2, 3, 3, 8) | UNTIED, seed=33,
         dtype=torch.float32),
    # Every fourth layer does not rotate; then by a list; then every second, with a window.
    Case(
        "smollm3-gqa-tied",
        widths(40, 5, 4, 2) | TIED | rope("default", 5e6),
        seed=41,
        version_4_keys=True,
        rewrites={"layer_types": None},
        greedy=True,
    ),
    Case(
        "smollm3-mqa-untied-bias",
        widths(36, 3, 3, 1)
        | UNTIED
        | {"no_rope_layers": [0, 1, 0], "attention_bias": True, "mlp_bias": True},
        seed=42,
    ),
    Case(
        "smollm3-mha-window-float32",
        widths(36, 4, 3, 3)
        | TIED
        | {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 24},
        seed=43,
        dtype=torch.float32,
        rewrites={"no_rope_layers": None, "layer_types": None},
    ),
    # Caps that bite: uncapped scores and logits reach several times as far.
    Case(
        "gemma2-gqa-tied",
        widths(40, 4, 4, 2, 12)
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
        widths(36, 3, 3, 1, 10)
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
        widths(36, 3, 3, 3, 8)
        | UNTIED
        | {
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": None,
            "layer_types": layers("sfs"),
        },
        seed=53,
        dtype=torch.float32,
    ),
    Case(
        "phi3-mha-window",
        widths(36, 2, 3, 3) | UNTIED | {"sliding_window": 23},
        seed=61,
        version_4_keys=True,
        greedy=True,
    ),
    # Both prompts exceed the original context; then neither does. Three quarters of a head rotate.
    Case(
        "phi3-gqa-longrope-partial",
        widths(64, 2, 4, 2) | UNTIED | _longrope(6, original=24, share=0.75),
        seed=62,
        version_4_keys=True,
    ),
    Case(
        "phi3-mqa-tied-longrope-within-float32",
        widths(36, 2, 3, 1) | TIED | _longrope(6, original=128),
        seed=63,
        dtype=torch.float32,
    ),
    Case(
        "olmo2-mha-untied",
        widths(36, 3, 3, 3) | UNTIED | rope("default", 5e5),
        seed=71,
        version_4_keys=True,
        greedy=True,
    ),
    Case("olmo2-gqa-tied-float32", widths(40, 2, 4, 2) | TIED, seed=72, dtype=torch.float32),
    Case("olmo2-mqa-bias", widths(36, 2, 3, 1) | UNTIED | {"attention_bias": True}, seed=73),
    Case(
        "ernie4_5-gqa-neighbors",
        widths(40, 2, 4, 2, 12) | UNTIED | rope("default", 5e5),
        seed=74,
        version_4_keys=True,
    ),
    Case(
        "granite-gqa-scales",
        widths(40, 2, 4, 2)
        | UNTIED
        | {
            "embedding_multiplier": 1.6,
            "logits_scaling": 1.4,
            "residual_multiplier": 0.8,
            "attention_multiplier": 0.4,
        },
        seed=75,
        version_4_keys=True,
    ),
    Case(
        "llama-gqa-yarn-bias",
        widths(48, 2, 4, 2, 16)
        | {"attention_bias": True, "mlp_bias": True}
        | rope("yarn", factor=4.0, original_max_position_embeddings=32),
        seed=81,
        version_4_keys=True,
    ),
    Case(
        "llama-mha-tied-yarn-scales-float32",
        widths(36, 2, 3, 3, 12)
        | TIED
        | rope(
            "yarn", 500.0, factor=8.0, original_max_position_embeddings=64, beta_fast=4.0,
            beta_slow=0.5, mscale=1.0, mscale_all_dim=0.7, truncate=False,
        ),
        seed=82,
        dtype=torch.float32,
    ),
    # The base grows from token 41 on, in a context that began with 30.
    Case(
        "llama-mqa-dynamic",
        widths(40, 2, 4, 1, 10) | {"max_position_embeddings": 40} | rope("dynamic", factor=4.0),
        seed=83,
        stepwise=30,
    ),
    *tiny_mistral.CASES,
    *tiny_mixtures.CASES,
    *tiny_hyper.CASES,
    *tiny_newer_mixtures.CASES,
    *tiny_gated_heads.CASES,
    *tiny_dense.CASES,
    *tiny_parallel.CASES,
    # The positions of layers without a window are stretched.
    Case(
        "olmo3-gqa-yarn",
        widths(40, 4, 4, 2)
        | UNTIED
        | {
            "layer_types": layers("ssfs"),
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
    Case("olmo3-mha-tied-float32", widths(36, 3, 3, 3) | TIED, seed=182, dtype=torch.float32),
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
        {"n_embd": 30, "n_layer": 2, "n_head": 3, "n_positions": 90, "n_inner": 52} | UNTIED,
        seed=92,
        dtype=torch.float32,
    ),
)  # fmt: skip
