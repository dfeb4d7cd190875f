"""Tiny models that read images, too, as transformers writes them, and the logits of texts.

`wholes/NAME/` has the checkpoint and `expected.npz`: `tokens` i32[T] and `logits` f32[T, V] at
every position, in float32.
"""

import pathlib

import numpy as np
import tiny_checkpoints
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_families import Case, widths

_TOKENS, _VOCAB_SIZE = 40, 31
_TEXT = {
    "vocab_size": _VOCAB_SIZE,
    "max_position_embeddings": 256,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [2, 2, 2],
        "mrope_interleaved": True,
    },
}
_EYES = {
    "depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "patch_size": 2,
    "temporal_patch_size": 1, "num_position_embeddings": 4, "deepstack_visual_indexes": [0],
}  # fmt: skip
CASES = {
    "qwen3_vl-gqa": (
        transformers.Qwen3VLConfig,
        widths(40, 2, 4, 2, 12) | {"intermediate_size": 28},
    ),
    "qwen3_vl-mha-bias-tied": (
        transformers.Qwen3VLConfig,
        widths(30, 2, 3, 3, 12)
        | {"intermediate_size": 28, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "qwen3_vl_moe-gqa": (
        transformers.Qwen3VLMoeConfig,
        widths(40, 2, 4, 2, 12)
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 10},
    ),
    # A dense layer, and experts in one tensor as transformers 4 has them: [in, out].
    "qwen3_vl_moe-mqa-dense-turned": (
        transformers.Qwen3VLMoeConfig,
        widths(36, 3, 3, 1, 12)
        | {
            "intermediate_size": 28,
            "mlp_only_layers": [1],
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
        },
    ),
}


def write(root: pathlib.Path) -> None:
    """Writes all cases under `root`."""
    for number, (name, (kind, text)) in enumerate(CASES.items()):
        is_tied = text.get("tie_word_embeddings", False)
        vision = _EYES | {"out_hidden_size": text["hidden_size"]}
        config = kind(text_config=_TEXT | text, vision_config=vision, tie_word_embeddings=is_tied)
        case = Case(name, {}, seed=900 + number)
        model = transformers.AutoModelForImageTextToText.from_config(config)
        generator = np.random.default_rng(case.seed)
        tiny_checkpoints.randomize(model, case, generator)
        directory = root / "wholes" / name
        model.save_pretrained(directory)
        (directory / "generation_config.json").unlink()
        if name.endswith("turned"):
            _turn(directory / "model.safetensors")
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager",
            experts_implementation="eager",
        )  # fmt: skip
        tokens = generator.integers(0, _VOCAB_SIZE, _TOKENS)
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
        arrays = {"tokens": tokens.astype(np.int32), "logits": logits}
        np.savez_compressed(directory / "expected.npz", **arrays)
        print(f"wholes/{name}: logits' deviation {logits.std():.2f}", flush=True)


def _turn(path: pathlib.Path) -> None:
    """Stores the matrices of experts [in, out]."""
    tensors = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
