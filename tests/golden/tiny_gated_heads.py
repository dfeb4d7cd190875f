"""The tiny checkpoints of mixtures whose heads have gates or narrow values; see `tiny_cases`."""

import json
import pathlib

import torch
from safetensors.torch import load_file, save_file
from tiny_families import TIED, UNTIED, Case, layers, rope, widths


def _positions(full: dict, sliding: dict) -> dict:
    """Rotary positions of both kinds of layers."""
    objects = {"full_attention": full, "sliding_attention": sliding}
    return {
        "rope_parameters": {kind: {"rope_type": "default"} | own for kind, own in objects.items()}
    }


_HALF, _WHOLE = {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, {"rope_theta": 100.0}


def _alone(directory: pathlib.Path) -> dict:
    """Leaves out what reads images; returns the keys of the text."""
    path = directory / "model.safetensors"
    eyes = "vision_model.", "vit_large_projector."
    tensors = {name: t for name, t in load_file(path).items() if not name.startswith(eyes)}
    save_file(tensors, path, metadata={"format": "pt"})
    whole = json.loads((directory / "config.json").read_text())
    return whole["text_config"] | {"architectures": ["Step3p5ForCausalLM"], "dtype": whole["dtype"]}


def _as_text(directory: pathlib.Path) -> None:
    """Writes Step 3.7's text with transformers' keys."""
    text = _alone(directory)
    (directory / "config.json").write_text(json.dumps(text, indent=2) + "\n")


def _as_published(directory: pathlib.Path) -> None:
    """Writes Step 3.7's text as the published files of Step 3.5 are, with three layers more in
    lists, which predict further tokens.
    """
    text = _alone(directory)
    kinds = text["layer_types"]
    ropes = [text["rope_parameters"][kind] for kind in kinds]
    sparse = [str(n) for n, kind in enumerate(text["mlp_layer_types"]) if kind == "sparse"]
    scaling = dict(text["rope_parameters"]["full_attention"])
    del scaling["rope_theta"], scaling["partial_rotary_factor"]
    same = (
        "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
        "vocab_size", "head_dim", "num_attention_heads", "max_position_embeddings", "rms_norm_eps",
        "sliding_window", "moe_intermediate_size", "share_expert_dim", "moe_router_scaling_factor",
        "tie_word_embeddings",
    )  # fmt: skip
    published = {
        "torch_dtype": text["dtype"],
        "num_attention_groups": text["num_key_value_heads"],
        "moe_num_experts": text["n_routed_experts"],
        "moe_top_k": text["num_experts_per_tok"],
        "moe_layers_enum": ",".join(sparse),
        "num_nextn_predict_layers": 3,
        "layer_types": [*kinds, *kinds[1:4]],
        "rope_theta": [rope["rope_theta"] for rope in [*ropes, *ropes[1:4]]],
        "partial_rotary_factors": [
            rope.get("partial_rotary_factor", 1.0) for rope in [*ropes, *ropes[1:4]]
        ],
        "rope_scaling": scaling,
        "yarn_only_types": ["full_attention"],
        "attention_other_setting": {
            "attention_type": "sliding_attention", "head_dim": text["head_dim"],
            "num_attention_heads": text["num_sliding_attention_heads"],
            "num_attention_groups": text["num_key_value_heads"],
        },
        "swiglu_limits": [*text["swiglu_limits"], 0.0, 0.0, 0.0],
        "swiglu_limits_shared": [*text["swiglu_limits_shared"], 0.0, 0.0, 0.0],
        "moe_router_activation": "sigmoid", "use_head_wise_attn_gate": True, "zero_centered": True,
        "use_moe_router_bias": True, "norm_expert_weight": True, "sink": False,
    }  # fmt: skip
    keys = {key: text[key] for key in same} | published
    (directory / "config.json").write_text(json.dumps(keys, indent=2) + "\n")


CASES = (
    Case(
        "afmoe-gqa-window-scaled",
        widths(40, 4, 4, 2, 12)
        | UNTIED
        | {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "moe_intermediate_size": 12,
            "num_dense_layers": 1,
            "route_scale": 1.5,
            "mup_enabled": True,
            **rope("default", 1e4),
        },
        seed=501,
        version_4_keys=True,
        rewrites={"layer_types": None, "route_norm": True, "score_func": "sigmoid", "n_group": 1},
        greedy=True,
    ),
    Case(
        "afmoe-mqa-bias-listed-tied-float32",
        widths(36, 2, 3, 1, 8)
        | TIED
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "num_shared_experts": 2,
            "moe_intermediate_size": 12,
            "num_dense_layers": 0,
            "attention_bias": True,
            "layer_types": layers("fs"),
            **rope("default", 1e4),
        },
        seed=502,
        dtype=torch.float32,
    ),
    # More heads in layers with windows; positions of both kinds.
    Case(
        "laguna-gqa-heads-yarn",
        widths(40, 3, 4, 2, 12)
        | UNTIED
        | {
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
            "moe_routed_scaling_factor": 1.5,
            "gating": "per-head",
            "layer_types": layers("fss"),
            "num_attention_heads_per_layer": [4, 6, 6],
            **_positions(
                _HALF | {
                    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32,
                    "attention_factor": 1.2,
                },
                _WHOLE,
            ),
        },
        seed=511,
        greedy=True,
    ),
    Case(
        "laguna-mqa-elements-tied-float32",
        widths(36, 3, 3, 1, 8)
        | TIED
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 12,
            "gating": "per-element",
            "attention_bias": True,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            **_positions(_HALF, _WHOLE),
        },
        seed=512,
        dtype=torch.float32,
    ),
    # By the keys of published files, whose window counts the tokens before a query.
    Case(
        "mimo_v2_flash-gqa-sinks",
        widths(40, 4, 4, 1, 12)
        | UNTIED
        | {
            "v_head_dim": 8,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "layer_types": layers("fssf"),
            "sliding_window": 24,
            "attention_value_scale": 0.6,
            **_positions(_HALF, _HALF | {"rope_theta": 100.0}),
        },
        seed=521,
        rewrites={
            "hybrid_layer_pattern": [0, 1, 1, 0],
            "moe_layer_freq": [0, 1, 1, 1],
            "mlp_layer_types": None,
            "sliding_window_size": 23,
            "swa_num_key_value_heads": 2,
            "swa_num_attention_heads": 4,
            "layernorm_epsilon": 1e-5,
            "routed_scaling_factor": None,
        },
        greedy=True,
    ),
    Case(
        "mimo_v2_flash-mha-bias-wide-tied-float32",
        widths(36, 2, 4, 2, 8)
        | TIED
        | {
            "v_head_dim": 8,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "layer_types": layers("sf"),
            "mlp_layer_types": ["sparse", "sparse"],
            "n_group": 3,
            "topk_group": 2,
            "attention_bias": True,
            "attention_value_scale": None,
            **_positions(_WHOLE | {"partial_rotary_factor": 1.0}, _HALF),
        },
        seed=522,
        dtype=torch.float32,
    ),
    # By the keys of published files, whose lists go on for layers that predict further tokens.
    Case(
        "step3p5-gqa-limits",
        widths(40, 4, 4, 2, 12)
        | UNTIED
        | {
            "layer_types": layers("fssf"),
            "num_sliding_attention_heads": 6,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "share_expert_dim": 14,
            "moe_router_scaling_factor": 1.5,
            "swiglu_limits": [0.0, 0.0, 0.3, 0.2],
            "swiglu_limits_shared": [0.0, 0.25, 0.0, 0.35],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "llama3", "rope_theta": 1e3, "partial_rotary_factor": 0.5,
                    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        seed=531,
        rewritten=_as_published,
        greedy=True,
    ),
    Case(
        "step3p5-mqa-tied-float32",
        widths(36, 3, 3, 1, 8)
        | TIED
        | {
            "layer_types": layers("sfs"),
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "share_expert_dim": 12,
            "attention_bias": True,
        },
        seed=532,
        dtype=torch.float32,
        rewritten=_as_text,
    ),
)  # fmt: skip
