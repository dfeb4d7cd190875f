"""Directories in formats that are kept as published, and the numbers that these stand for."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from configs.engine import Config, EngineConfig
from configs.mesh import ONE_CHIP, Mesh
from inference.checkpoints import names, resolve, safetensors_file
from inference.checkpoints.hf import config_json
from inference.engine import Engine
from layers import params
from tests import fakes

E4M3 = ml_dtypes.float8_e4m3fn
# (name of a module, its weight) -> tensors by ending, and the numbers that they stand for.
Encode = Callable[[str, np.ndarray], tuple[dict[str, np.ndarray], np.ndarray] | None]

# Experts and heads whose rows are no whole blocks, columns neither.
QWEN3_MOE: dict[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 37,
    "hidden_size": 160, "intermediate_size": 64, "moe_intermediate_size": 48, "num_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 48, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False, "dtype": "float32",
    "mlp_only_layers": [0], "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip


def drawn(raw: dict[str, object], folder: Path) -> dict[str, np.ndarray]:
    """Random tensors of a configuration's model, float32."""
    config, rng = config_json.parse(raw, folder), np.random.default_rng(0)
    tensors = {}
    for path, info in params.flatten(config.parameters()).items():
        stored = names.huggingface(config)(path).names
        rows = info.stacked if len(info.stacked) == len(stored) else None
        for index, name in enumerate(stored):
            shape = (rows[index] if rows else info.in_rows[0] // len(stored), *info.in_rows[1:])
            mean = 1.0 if len(shape) == 1 else 0.0
            tensors[name] = (mean + 0.1 * rng.standard_normal(shape)).astype(np.float32)
    return tensors


def golden(name: str) -> tuple[dict[str, object], dict[str, np.ndarray]]:
    """Configuration and tensors of a golden checkpoint."""
    folder = Path(__file__).parents[2] / "golden" / name
    source = safetensors_file.open_directory(folder)
    tensors = {n: np.array(source.read(n, 0, shape[0])) for n, shape in source.shapes.items()}
    return json.loads((folder / "config.json").read_text()), tensors


def write(
    folder: Path,
    raw: dict[str, object],
    tensors: dict[str, np.ndarray],
    encode: Encode,
    described: dict[str, object],
) -> tuple[Path, Path]:
    """A directory with matrices as `encode` has them, and one with their numbers in float32."""
    stored, plain = {}, {}
    for name, values in tensors.items():
        encoded = encode(name.removesuffix(".weight"), values) if values.ndim == 2 else None
        if encoded is None:
            stored[name] = plain[name] = values
            continue
        module = name.removesuffix(".weight")
        stored |= {f"{module}.{ending}": array for ending, array in encoded[0].items()}
        plain[name] = encoded[1]
    folders = folder / "published", folder / "plain"
    for path, arrays, more in zip(
        folders,
        (stored, plain),
        ({"quantization_config": described} if described else {}, {}),
        strict=True,
    ):
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(raw | more))
        save_file(
            {n: np.ascontiguousarray(a) for n, a in arrays.items()}, path / "model.safetensors"
        )
    return folders


def edited(folder: Path, change: Callable[[dict[str, np.ndarray]], object]) -> None:
    """Rewrites a directory's tensors, whatever their types."""
    source = safetensors_file.open_directory(folder, ("",))
    tensors = {
        name: np.array(source.read(name, 0, (shape or [1])[0])).reshape(shape)
        for name, shape in source.shapes.items()
    }
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def is_linear(module: str) -> bool:
    """Whether a module is one of those that are usually stored in few bits."""
    return module.endswith("_proj") or module.endswith("_with_mqa")


def scores(path: Path, mesh: Mesh = ONE_CHIP, **settings: object) -> np.ndarray:
    """Log-probabilities of some tokens, by an engine in float32."""
    checkpoint = resolve.resolve(str(path)).open(None)
    model = dataclasses.replace(checkpoint.config, dtype="float32")
    fields = EngineConfig.of(**{"max_seqs": 2, "chunk_tokens": 16} | settings)
    engine = Engine.from_checkpoint(Config(model, fields, mesh), checkpoint)
    with fakes.no_draws():
        [score] = engine.score([[1, 2, 3, 4, 5, 6, 7, 1, 3, 5, 8, 30, 2]])
    return np.array(score.logprobs)
