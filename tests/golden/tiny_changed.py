"""Logits of tiny checkpoints under configurations that few files have: the weights are those of a
checkpoint beside it, with biases where the configuration asks for them.

`changed/cases.json` names each case's checkpoint and the keys that differ; `changed/logits.npz`
holds for each `NAME:logits` f32[4, V], of the last tokens of prompt 1, and `NAME:TENSOR`, its
biases.
"""

import json
import pathlib
import tempfile

import numpy as np
import tiny_checkpoints
import torch
import transformers
from safetensors.torch import load_file, save_file

_HERE = pathlib.Path(__file__).parent
_LAST = 4
_BIAS_STD = 0.3
CASES = {
    "clip_qkv": ("olmoe-gqa-norm", {"clip_qkv": 0.6}),
    "inverse_layer_idx": (
        "gpt2-mha-untied-inner-float32",
        {"scale_attn_by_inverse_layer_idx": True, "scale_attn_weights": False},
    ),
    "latent_bias": ("deepseek_v3-mha-groups-yarn", {"attention_bias": True}),
    "top_k": ("deepseek_v2-mha-groups-yarn", {"num_experts_per_tok": 4, "topk_group": 1}),
}


def write(root: pathlib.Path) -> None:
    """Writes all cases under `root`."""
    directory = root / "changed"
    directory.mkdir(exist_ok=True)
    expected = {}
    for number, (case, (name, changes)) in enumerate(CASES.items()):
        arrays = _expected(_HERE / name, changes, np.random.default_rng(500 + number))
        expected |= {f"{case}:{key}": value for key, value in arrays.items()}
    np.savez_compressed(directory / "logits.npz", **expected)
    described = {
        case: {"checkpoint": name, "config": changes} for case, (name, changes) in CASES.items()
    }
    (directory / "cases.json").write_text(json.dumps(described, indent=1) + "\n")


def _expected(
    checkpoint: pathlib.Path, changes: dict, generator: np.random.Generator
) -> dict[str, np.ndarray]:
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    tensors = load_file(checkpoint / "model.safetensors")
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        (path / "config.json").write_text(json.dumps(config))
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(path)
        )
        biases = {
            name: _BIAS_STD * generator.standard_normal(parameter.shape).astype(np.float32)
            for name, parameter in sorted(model.named_parameters())
            if name.endswith("bias") and name not in tensors
        }
        added = {name: torch.from_numpy(values) for name, values in biases.items()}
        save_file(tensors | added, path / "model.safetensors", metadata={"format": "pt"})
        model = tiny_checkpoints.load(path, torch.float32)
        exact = tiny_checkpoints.load(path, torch.float64)
        with np.load(checkpoint / "expected.npz") as arrays:
            tokens = torch.from_numpy(arrays["tokens_1"].astype(np.int64))[None]
        with torch.no_grad():
            logits, precise = (own(tokens).logits[0, -_LAST:] for own in (model, exact))
    error = (logits - precise).abs().max().item()
    if error > tiny_checkpoints.MAX_ROUNDING_ERROR:
        raise ValueError(f"{checkpoint.name}: float32 differs from float64 by {error}")
    return biases | {"logits": logits.numpy()}
