"""Tiny random checkpoints, written by transformers itself, and the logits that it computes.

Each directory is what `save_pretrained` writes, and `expected.npz` beside it holds, for prompts 0
and 1, `tokens_0` i32[T] and `logits_0` f32[T, V] at every position: float32 arithmetic on stored
weights, eager attention. Sizes are odd on purpose, prompt 0 is longer than two sliding windows and
three pages of 16 tokens, and norm weights are far from their neutral value, so that a wrong
convention shows. Some config.json files are rewritten with the keys of transformers 4, which most
published checkpoints still have.
"""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import tiny_tokenizer
import torch
import transformers

_VOCAB_SIZE = 131
_PROMPT_LENGTHS = (75, 29)
_MATRIX_STD = 0.2
_NORM_STD = 0.3
# Far below the 1e-4 that an implementation may differ by: the reference's own rounding is no issue.
_MAX_ROUNDING_ERROR = 2e-5

# A context below the prompt's: all three branches of the rule occur among the 8 frequencies.
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_LLAMA = {
    "vocab_size": _VOCAB_SIZE,
    "intermediate_size": 52,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_GEMMA3 = {
    "vocab_size": _VOCAB_SIZE,
    "intermediate_size": 52,
    "max_position_embeddings": 256,
    "sliding_window": 24,
}


def _gemma3_rope(global_base: float, local_base: float, **scaling: Any) -> dict:
    return {
        "full_attention": {"rope_type": "default", "rope_theta": global_base} | scaling,
        "sliding_attention": {"rope_type": "default", "rope_theta": local_base},
    }


def _layers(pattern: str) -> list[str]:
    """'ssf' names two sliding layers, then a full one."""
    return [{"s": "sliding_attention", "f": "full_attention"}[letter] for letter in pattern]


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint: its config's fields and how it is stored."""

    name: str
    fields: dict
    seed: int
    dtype: torch.dtype = torch.bfloat16
    version_4_keys: bool = False
    max_shard_size: str = "5GB"
    tokenizer: bool = False

    def config(self) -> transformers.PreTrainedConfig:
        if self.name.startswith("gemma3"):
            return transformers.Gemma3TextConfig(**_GEMMA3 | self.fields)
        return transformers.LlamaConfig(**_LLAMA | self.fields)


def _widths(width: int, layers: int, heads: int, kv_heads: int, head_width: int) -> dict:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_width,
    }


CASES = (
    Case("llama-mqa-float32", _widths(40, 2, 5, 1, 10), seed=1, dtype=torch.float32),
    Case(
        "llama-gqa-tied-rope3",
        _widths(48, 3, 4, 2, 16) | {"tie_word_embeddings": True, "rope_parameters": _LLAMA3_ROPE},
        seed=2,
        version_4_keys=True,
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
        | {
            "vocab_size": tiny_tokenizer.VOCAB_SIZE,
            "tie_word_embeddings": True,
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
        | {
            "query_pre_attn_scalar": 14,
            "layer_types": _layers("sfs"),
            "tie_word_embeddings": False,
            "rope_parameters": _gemma3_rope(1e6, 1e4),
        },
        seed=7,
        dtype=torch.float32,
        max_shard_size="40KB",
    ),
)


def write(root: pathlib.Path) -> None:
    """Writes every case under `root`."""
    for case in CASES:
        directory = root / case.name
        _write_checkpoint(case, directory)
        expected, error = _expected(case, directory)
        np.savez_compressed(directory / "expected.npz", **expected)
        spread = expected["logits_0"].std()
        print(f"{case.name}: logits' deviation {spread:.2f}, float32 error {error:.1e}", flush=True)
        if error > _MAX_ROUNDING_ERROR:
            raise ValueError(
                f"{case.name}: weights too sharp, float32 differs from float64 by {error}"
            )


def _write_checkpoint(case: Case, directory: pathlib.Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(case.config())
    _randomize(model, case)
    model.generation_config = transformers.GenerationConfig.from_model_config(model.config)
    model.to(case.dtype).save_pretrained(directory, max_shard_size=case.max_shard_size)
    if case.tokenizer:
        tiny_tokenizer.write(directory)
    if case.version_4_keys:
        path = directory / "config.json"
        path.write_text(json.dumps(_version_4(json.loads(path.read_text())), indent=2) + "\n")


def _randomize(model: torch.nn.Module, case: Case) -> None:
    """Matrices from N(0, 0.2^2); norm factors around 1, which Gemma stores as w - 1."""
    neutral = 0.0 if case.name.startswith("gemma3") else 1.0
    generator = np.random.default_rng(case.seed)
    for name, parameter in sorted(model.named_parameters()):
        values = generator.standard_normal(parameter.shape)
        values = neutral + _NORM_STD * values if "norm" in name else _MATRIX_STD * values
        parameter.data = torch.from_numpy(values.astype(np.float32))


def _version_4(config: dict) -> dict:
    """The same config with the keys that transformers 4 wrote."""
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "gemma3_text":
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        del config["_sliding_window_pattern"]
        config["sliding_window_pattern"] = config.pop("layer_types").index("full_attention") + 1
    elif config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]:
        del config["head_dim"]
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return config


def _load(directory: pathlib.Path, dtype: torch.dtype) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    ).eval()


def _expected(case: Case, directory: pathlib.Path) -> tuple[dict[str, Any], float]:
    """The reference's arrays, and how far its float32 logits are from float64 ones."""
    generator = np.random.default_rng(case.seed)
    prompts = [generator.integers(0, _VOCAB_SIZE, n) for n in _PROMPT_LENGTHS]
    model, exact = _load(directory, torch.float32), _load(directory, torch.float64)
    expected: dict[str, Any] = {}
    if case.tokenizer:
        expected = tiny_tokenizer.expected(directory, model)
        prompts = [expected["ids_0"], expected["ids_1"]]
    error = 0.0
    for i, prompt in enumerate(prompts):
        tokens = torch.from_numpy(prompt.astype(np.int64))[None]
        with torch.no_grad():
            logits = model(tokens).logits[0]
            error = max(error, (logits - exact(tokens).logits[0]).abs().max().item())
        expected[f"tokens_{i}"] = prompt.astype(np.int32)
        expected[f"logits_{i}"] = logits.numpy()
    return expected, error
