"""The tiny checkpoints whose queries grow with their position; see `tiny_cases`."""

import json
import pathlib
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_families import TIED, UNTIED, Case, rope, widths


def _yarn(original: int, beta: float, **more: Any) -> dict:
    """Both scales make cos and sin as large as without YaRN."""
    scales = {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 8.0}
    return rope(
        "yarn", factor=8.0, original_max_position_embeddings=original, llama_4_scaling_beta=beta,
        **scales | more,
    )  # fmt: skip


def _latent(rank: int, rotary: int, nope: int, value: int, query_rank: int | None = None) -> dict:
    return {
        "kv_lora_rank": rank,
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
        "q_lora_rank": query_rank,
    }


def _mixture(num_experts: int, top_k: int) -> dict:
    return {
        "n_routed_experts": num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": 12,
    }


# Mistral's own names of tensors, by transformers'.
_OWN_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.": "",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate.": "gate.",
    "mlp.shared_experts": "shared_experts",
    "mlp.experts": "experts",
    "mlp": "feed_forward",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
}


def _in_own_names(directory: pathlib.Path) -> None:
    """As Mistral's own files have them, with a tensor of each expert."""
    path, described = directory / "model.safetensors", directory / "config.json"
    tensors = {}
    for stored, tensor in load_file(path).items():
        name = stored
        for theirs, own in _OWN_NAMES.items():
            name = name.replace(theirs, own)
        if not name.endswith(("experts.gate_w3", "experts.w2")):
            tensors[name] = tensor
            continue
        stem = name.rpartition(".")[0]
        for expert, matrix in enumerate(tensor):
            halves = matrix.chunk(2) if name.endswith("gate_w3") else (matrix,)
            for part, half in zip(
                ("w1", "w3") if len(halves) == 2 else ("w2",), halves, strict=True
            ):
                tensors[f"{stem}.{expert}.{part}.weight"] = half.contiguous()
    save_file(tensors, path, metadata={"format": "pt"})
    raw = json.loads(described.read_text())
    raw |= {"architectures": ["MistralLarge3ForCausalLM"], "model_type": "mistral_large3"}
    described.write_text(json.dumps(raw, indent=2) + "\n")


CASES = (
    Case(
        "ministral3-gqa-yarn",
        widths(40, 3, 4, 2, 12) | UNTIED | _yarn(16, 0.6),
        seed=401,
        version_4_keys=True,
        greedy=True,
    ),
    # One scale alone, as in Devstral 2, and a window.
    Case(
        "ministral3-mqa-tied-window-float32",
        widths(36, 2, 3, 1, 10)
        | TIED
        | {"sliding_window": 24}
        | _yarn(24, 0.9, mscale_all_dim=0.0, beta_fast=4.0),
        seed=402,
        dtype=torch.float32,
    ),
    Case(
        "mistral4-mha-groups-yarn",
        widths(40, 3, 5, 5)
        | UNTIED
        | _latent(18, 8, 10, 6, query_rank=22)
        | _mixture(9, 4)
        | {"first_k_dense_replace": 1, "n_group": 3, "topk_group": 2}
        | {"routed_scaling_factor": 1.7}
        | _yarn(16, 0.6, partial_rotary_factor=8 / 18),
        seed=411,
        greedy=True,
    ),
    Case(
        "mistral4-mha-halves-float32",
        widths(36, 2, 3, 3)
        | TIED
        | _latent(10, 6, 8, 12)
        | _mixture(4, 2)
        | {"norm_topk_prob": False, "rope_interleave": False}
        | _yarn(24, 0.9, partial_rotary_factor=6 / 14, mscale_all_dim=0.0),
        seed=412,
        dtype=torch.float32,
    ),
    Case(
        "mistral_large3-mha-own-names",
        widths(36, 2, 3, 3)
        | UNTIED
        | _latent(10, 6, 8, 12, query_rank=14)
        | _mixture(5, 2)
        | {"first_k_dense_replace": 1}
        | _yarn(16, 0.6, partial_rotary_factor=6 / 14),
        seed=413,
        rewritten=_in_own_names,
    ),
    # Chunks that end within pages, a mixture in every second layer, and one layer without RoPE,
    # whose queries grow.
    Case(
        "llama4-gqa-chunks",
        widths(40, 4, 4, 2, 12)
        | UNTIED
        | rope(
            "llama3",
            factor=8.0,
            original_max_position_embeddings=32,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        )
        | {
            "intermediate_size": 12,
            "intermediate_size_mlp": 28,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 20,
            "floor_scale": 6,
            "attn_scale": 0.6,
        },
        seed=421,
        version_4_keys=True,
        greedy=True,
    ),
    # As published files list layers: the second has neither RoPE nor chunks.
    Case(
        "llama4-mha-listed-tied-float32",
        widths(36, 2, 3, 3, 10)
        | TIED
        | {
            "intermediate_size": 12,
            "intermediate_size_mlp": 28,
            "num_local_experts": 3,
            "moe_layers": [1],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 24,
            "use_qk_norm": False,
            "attention_bias": True,
        },
        seed=422,
        dtype=torch.float32,
        rewrites={"layer_types": None},
    ),
    Case(
        "llama4-mqa-no-chunks-tied",
        widths(30, 2, 3, 1, 10)
        | TIED
        | {
            "intermediate_size": 12,
            "intermediate_size_mlp": 28,
            "num_local_experts": 4,
            "moe_layers": [0],
            "attention_chunk_size": None,
            "attn_temperature_tuning": False,
            "no_rope_layer_interval": 2,
        },
        seed=423,
    ),
)
