"""Blocks of ours as `compressed-tensors` stores them: the tensors of a module, and what
`config.json` says of all of them.
"""

from collections.abc import Mapping

import numpy as np

from configs.errors import InputError
from configs.precision import FORMATS, Format
from inference.checkpoints.hf.quantized import words
from layers import quantized
from layers.quantized import OURS

Tensors = dict[str, tuple[tuple[int, ...], str]]  # ending: shape and type

WRITTEN = tuple(name for name in OURS if name != "mxfp4")

_TOKEN = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}


def check(path: str, format: str) -> None:
    """Raises an `InputError`, which names `path`, if a format has no counterpart."""
    if FORMATS[format].is_quantized and format not in WRITTEN:
        raise InputError(
            f"{path} is stored as {format}, which compressed-tensors has not; --dtype=bfloat16 "
            f"writes numbers; what is written packed is {', '.join(WRITTEN)}"
        )


def shapes(format: str, rows: int, width: int) -> Tensors:
    """The tensors of a matrix [rows, width]."""
    info = FORMATS[format]
    count = width // info.block_in(width)
    scales: Tensors = {"weight_scale": ((rows, count), "float32")}
    if _layout(info) != "pack-quantized":
        kind = "float8_e4m3fn" if _is_float(info) else "int8"
        return {"weight": ((rows, width), kind)} | scales
    packed: Tensors = {"weight_packed": ((rows, words.num_words(width, info.bits)), "int32")}
    zeros: Tensors = {}
    if info.asymmetric:
        zeros["weight_zero_point"] = ((words.num_words(rows, info.bits), count), "int32")
    return packed | scales | zeros | {"weight_shape": ((2,), "int64")}


def tensors(format: str, blocks_FX: np.ndarray, width: int) -> dict[str, np.ndarray]:
    """The tensors of a matrix, as `shapes` says them."""
    info, groups = FORMATS[format], quantized.unpack(format, blocks_FX, width)
    arrays = {"weight_scale": groups.scale_FG}
    if _layout(info) != "pack-quantized":
        return {"weight": groups.q_FD} | arrays
    q_FD = groups.q_FD.view(np.uint8) ^ 128 if info.bits == 8 else groups.q_FD
    arrays = {"weight_packed": words.pack(q_FD, info.bits)} | arrays
    if groups.zero_FG is not None:
        packed_GF = words.pack(groups.zero_FG.T, info.bits)
        arrays["weight_zero_point"] = np.ascontiguousarray(packed_GF.T)
    return arrays | {"weight_shape": np.array([len(blocks_FX), width], np.int64)}


def describe(modules: Mapping[str, str]) -> dict[str, object]:
    """A `quantization_config`, given the format of every module with a matrix."""
    kinds = [name for name in dict.fromkeys(modules.values()) if FORMATS[name].is_quantized]
    dense = [module for module, format in modules.items() if format not in kinds]
    groups = {}
    for number, name in enumerate(kinds):
        targets = [module for module, format in modules.items() if format == name]
        groups[f"group_{number}"] = _group(name, ["Linear"] if len(kinds) == 1 else targets)
    layouts = {_layout(FORMATS[name]) for name in kinds}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": dense,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _group(name: str, targets: list[str]) -> dict[str, object]:
    info = FORMATS[name]
    kind = "float" if _is_float(info) else "int"
    weights = {
        "num_bits": info.bits,
        "type": kind,
        "symmetric": not info.asymmetric,
        "strategy": "channel" if info.group is None else "group",
        "group_size": info.group,
        "dynamic": False,
    }
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": _TOKEN | {"type": kind} if info.activations else None,
        "output_activations": None,
        "format": _layout(info),
    }


def _is_float(info: Format) -> bool:
    return "fp8" in info.name


def _layout(info: Format) -> str:
    if _is_float(info):
        return "float-quantized"
    return "int-quantized" if info.activations else "pack-quantized"
