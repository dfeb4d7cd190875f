"""The models most tried in 2026, and which of their published forms are read."""

import json
from pathlib import Path
from typing import NamedTuple

from configs.errors import InputError
from inference.checkpoints.gguf.pretokenizers import SPLITS
from inference.checkpoints.hf import config_json
from inference.families import families

COLUMNS = ("model", "bfloat16", "FP8", "4 bits", "GGUF, Q4_K_M")
_BLOCK_FP8 = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}


class _Tried(NamedTuple):
    """A model, and where its forms are published.

    Attributes:
        published: the repository in `tests/golden/published/` with its keys.
        forms: repositories by column.
        gguf: llama.cpp's architecture and pre-tokenizer.
    """

    model: str
    published: str
    forms: dict[str, str]
    gguf: tuple[str, str]


_TRIED = (
    _Tried(
        "Qwen3.6 27B, Qwen3.8 27B", "Qwen/Qwen3.5-27B",
        {"bfloat16": "Qwen/Qwen3.8-27B", "FP8": "Qwen/Qwen3.8-27B-FP8",
         "4 bits": "nvidia/Qwen3.6-27B-NVFP4"},
        ("qwen35", "qwen35"),
    ),
    _Tried(
        "Qwen3.6 35B A3B", "Qwen/Qwen3.5-35B-A3B",
        {"bfloat16": "Qwen/Qwen3.6-35B-A3B", "FP8": "Qwen/Qwen3.6-35B-A3B-FP8",
         "4 bits": "nvidia/Qwen3.6-35B-A3B-NVFP4"},
        ("qwen35moe", "qwen35"),
    ),
    _Tried(
        "Gemma 4 12B", "google/gemma-4-12B-it",
        {"bfloat16": "google/gemma-4-12B-it", "4 bits": "unsloth/gemma-4-12b-it-NVFP4"},
        ("gemma4", "gemma4"),
    ),
    _Tried(
        "Gemma 4 26B A4B, 31B", "google/gemma-4-26B-A4B",
        {"bfloat16": "google/gemma-4-26B-A4B-it", "4 bits": "nvidia/Gemma-4-26B-A4B-NVFP4"},
        ("gemma4", "gemma4"),
    ),
    _Tried(
        "gpt-oss 20B", "openai/gpt-oss-20b",
        {"bfloat16": "unsloth/gpt-oss-20b-BF16", "4 bits": "openai/gpt-oss-20b"},
        ("gpt-oss", "gpt-4o"),
    ),
    _Tried(
        "GLM-4.7-Flash", "zai-org/GLM-4.7-Flash",
        {"bfloat16": "zai-org/GLM-4.7-Flash", "4 bits": "unsloth/GLM-4.7-Flash-NVFP4"},
        ("deepseek2", "glm4"),
    ),
    _Tried(
        "Qwen3-Coder-Next", "Qwen/Qwen3-Next-80B-A3B-Instruct",
        {"bfloat16": "Qwen/Qwen3-Coder-Next", "FP8": "Qwen/Qwen3-Coder-Next-FP8",
         "4 bits": "RedHatAI/Qwen3-Coder-Next-NVFP4"},
        ("qwen3next", "qwen2"),
    ),
    _Tried(
        "Devstral Small 2, Ministral 3", "mistralai/Devstral-Small-2-24B-Instruct-2512",
        {"bfloat16": "mistralai/Ministral-3-8B-Base-2512",
         "FP8": "mistralai/Devstral-Small-2-24B-Instruct-2512"},
        ("mistral3", "tekken"),
    ),
    _Tried(
        "Nemotron 3.5 Lightning", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        {"bfloat16": "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
         "4 bits": "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4"},
        ("nemotron_h_moe", "pixtral"),
    ),
    _Tried(
        "DeepSeek-V4-Flash", "deepseek-ai/DeepSeek-V4-Flash",
        {"FP8": "sgl-project/DeepSeek-V4-Flash-FP8", "4 bits": "deepseek-ai/DeepSeek-V4-Flash"},
        ("deepseek4", "deepseek-v3"),
    ),
    _Tried(
        "MiniMax-M2.5, M2.7", "MiniMaxAI/MiniMax-M2.7",
        {"FP8": "MiniMaxAI/MiniMax-M2.7", "4 bits": "nvidia/MiniMax-M2.7-NVFP4"},
        ("minimax-m2", "minimax-m2"),
    ),
)  # fmt: skip


def rows(published: Path) -> list[tuple[str, ...]]:
    """Returns a row a model: repositories of forms that are read, or why one is not.

    Args:
        published: the folder of published configurations.
    """
    lines = (line for path in published.glob("*.jsonl") for line in path.open())
    configs = {entry["repository"]: entry["config"] for entry in map(json.loads, lines)}
    return [(tried.model, *_cells(tried, configs)) for tried in _TRIED]


def _cells(tried: _Tried, configs: dict[str, dict[str, object]]) -> list[str]:
    plain = config_json.without_storage(configs[tried.published])
    cells = []
    for column, described in (("bfloat16", None), ("FP8", _BLOCK_FP8), ("4 bits", _NVFP4)):
        repository = tried.forms.get(column)
        raw = plain if described is None else plain | {"quantization_config": described}
        stated = configs.get(repository or "", {})
        keys = stated if described and "quantization_config" in stated else raw
        is_read = repository is not None and _is_read(keys)
        cells.append("" if repository is None else _cell(repository, is_read))
    architecture, pretokenizer = tried.gguf
    has_reader = architecture in families.gguf_readers()
    is_read = has_reader and pretokenizer in (
        *SPLITS,
        "gemma4",
    )  # the latter has a model of its own
    return [*cells, "read" if is_read else "not read: " + ("tokens" if has_reader else "family")]


def _cell(repository: str, is_read: bool) -> str:
    return f"`{repository}`" if is_read else f"not read: `{repository}`"


def _is_read(raw: dict[str, object]) -> bool:
    """Whether a `config.json` is read, weights in few bits too."""
    path = Path("model")
    try:
        raw = config_json.text_part(raw)
        storage = config_json.storage(raw, path)
        config = config_json.parse(config_json.without_storage(raw), path)
        config = config_json.with_formats(config, storage, raw, path)
    except InputError:
        return False
    kinds = {kind for _, kinds in config.formats for kind in kinds}
    return raw.get("expert_dtype") != "fp4" or "mxfp4" in kinds  # experts apart from the others
