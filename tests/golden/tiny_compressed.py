"""Compressed attention of DeepSeek-V4 (DeepSeek-AI 2026), small, and what transformers' modules
compute of random hidden states: mixers alone, as the family's streams and experts are not here.

Few heads of an indexer often give an entry a score of exactly 0, and of equals torch takes any; so
there are many.

`compressed/CASE.npz` holds the module's parameters by name, those fields of its configuration that
matter to it (`fields`, JSON), `hidden` f32[S, D] and `out` f32[S, D].
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import tiny_checkpoints
import torch
from tiny_families import Case
from transformers import DeepseekV4Config
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 32,
    "beta_slow": 1,
}  # fmt: skip
_COMMON: dict[str, Any] = {
    "hidden_size": 24, "num_attention_heads": 6, "head_dim": 12, "q_lora_rank": 10, "o_groups": 3,
    "o_lora_rank": 5, "num_hidden_layers": 1, "vocab_size": 31, "max_position_embeddings": 256,
    "index_n_heads": 16, "index_head_dim": 8, "rms_norm_eps": 1e-6, "sliding_window": 20,
    "partial_rotary_factor": 1 / 3,
}  # fmt: skip
# name: (layer's type, its fields, tokens)
_CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "sparse-few": (_SPARSE, {"index_topk": 6}, 101),
    "sparse-all": (_SPARSE, {"index_topk": 64, "rope_scaling": _YARN}, 70),
    "sparse-wide": (_SPARSE, {"index_topk": 3, "sliding_window": 5, "rate": 8}, 90),
    "heavy": (_HEAVY, {"rate": 16, "rope_scaling": _YARN}, 101),
    "heavy-beyond-window": (_HEAVY, {"rate": 32, "sliding_window": 9, "o_groups": 1}, 101),
}


def write(root: pathlib.Path, chosen: Callable[[Case], bool] | None = None) -> None:
    """Writes all cases under `root`, whatever families are chosen: they belong to none."""
    for seed, name in enumerate(_CASES):
        _write(name, seed, root / "compressed" / f"{name}.npz")


@torch.no_grad()
def _write(name: str, seed: int, target: pathlib.Path) -> None:
    target.parent.mkdir(exist_ok=True)
    kind, fields, num_tokens = _CASES[name]
    fields = _COMMON | fields
    rate, scaling = fields.pop("rate", 4), fields.pop("rope_scaling", None)
    config = DeepseekV4Config(
        **fields, layer_types=[kind], mlp_layer_types=["moe"], compress_rates={kind: rate},
        rope_parameters=scaling, attn_implementation="eager",
    )  # fmt: skip
    generator = np.random.default_rng(4000 + seed)
    module = v4.DeepseekV4Attention(config, 0).train(False)
    for key, parameter in module.named_parameters():
        wide = 1.0 if key.endswith(("sinks", "position_bias")) else parameter.shape[-1] ** -0.5
        values = wide * generator.standard_normal(parameter.shape)
        is_scale = key.endswith("norm.weight")
        parameter.copy_(torch.from_numpy(1 + 0.3 * values if is_scale else values))
    hidden = torch.from_numpy(generator.standard_normal((1, num_tokens, config.hidden_size)))
    outs = [_out(module, config, hidden, dtype) for dtype in (torch.float32, torch.float64)]
    error = (outs[0] - outs[1]).abs().max().item()
    print(f"compressed/{name}: deviation {outs[0].std():.2f}, float32 error {error:.1e}")
    if error > tiny_checkpoints.MAX_ROUNDING_ERROR:
        raise ValueError(f"compressed/{name}: float32 differs from float64 by {error}")
    told = fields | {"rate": rate, "rope": config.rope_parameters["compress"], "type": kind}
    np.savez_compressed(
        target, **{key: value.float().numpy() for key, value in module.state_dict().items()},
        fields=np.array(json.dumps(told)), hidden=hidden[0].float().numpy(),
        out=outs[0][0].numpy(),
    )  # fmt: skip


def _out(
    module: torch.nn.Module, config: DeepseekV4Config, hidden: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    module, hidden = module.to(dtype), hidden.float().to(dtype)
    position_ids = torch.arange(hidden.shape[1])[None]
    turns = v4.DeepseekV4RotaryEmbedding(config)(hidden, position_ids, "compress")
    mask = create_sliding_window_causal_mask(
        config=config, inputs_embeds=hidden, attention_mask=None, past_key_values=None,
        position_ids=position_ids,
    )  # fmt: skip
    return module(hidden, {"compress": turns}, position_ids, mask)[0]
