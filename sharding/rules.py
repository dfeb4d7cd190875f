"""Which mesh axis divides which logical axis, and what a chip holds of a parameter."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec

from configs.errors import InputError
from configs.kinds.params import ParamInfo
from configs.model import ModelConfig

RULES: Mapping[str, str | None] = {
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "ffn": "model",
    "experts": "expert",
    "embed": None,
}


def mesh_axis(path: str, info: ParamInfo) -> str | None:
    """The mesh axis that divides a parameter; None: each chip holds all of it.

    Raises:
        InputError: an axis that no rule names, or two that chips would divide.
    """
    names = [name for name in info.logical_axes if name is not None]
    if unknown := [name for name in names if name not in RULES]:
        raise InputError(
            f"{path}: no rule divides the axis {unknown[0]!r}; known: {', '.join(RULES)}"
        )
    found = [axis for name in names if (axis := RULES[name]) is not None]
    if len(found) > 1:
        raise InputError(f"{path}: chips would divide two of its axes, {', '.join(names)}")
    return found[0] if found else None


def spec(path: str, info: ParamInfo) -> PartitionSpec:
    """How the chips' parts of a parameter lie in one array (`sharding/mesh.py`)."""
    axis = mesh_axis(path, info)
    return PartitionSpec(axis) if axis else PartitionSpec()


def part(
    config: ModelConfig, path: str, info: ParamInfo, values: Any, chips: int, chip: int
) -> np.ndarray:
    """What one of `chips` along `model` holds of a parameter, as `ModelConfig.per_chip` declares
    it: its rows of each stacked matrix, or its columns; zeros stand for what is missing.

    Args:
        config: the whole model.
        path: of the parameter, 'layers/0/mixer/qkv'.
        info: its declaration in the whole model.
        values: all of it; rows may be bytes of blocks.
        chips, chip: how many divide it, and which one this is.
    """
    values = np.asarray(values)
    if mesh_axis(path, info) is None:
        return values
    names = enumerate(info.logical_axes)
    dim, axis = next((d, name) for d, name in names if name and RULES[name])
    if dim == len(info.shape) - 1 and dim:
        return _taken(config, path, axis, values, chips, chip)
    rows, parts, first = info.stacked or (info.shape[0],), [], 0
    for index, count in enumerate(rows):
        is_kv = info.kv_heads and (index or not info.stacked)
        own_axis = "kv_heads" if is_kv else axis
        own = np.moveaxis(values[first : first + count], 0, -1)
        parts.append(np.moveaxis(_taken(config, path, own_axis, own, chips, chip), -1, 0))
        first += count
    return np.ascontiguousarray(np.concatenate(parts))


def _taken(
    config: ModelConfig,
    path: str,
    axis: str,
    values: np.ndarray,
    chips: int,
    chip: int,
) -> np.ndarray:
    """A chip's part of the last axis: of heads or columns, or of the bytes of their blocks."""
    shares = _shares(config, path, axis, chips)
    own, whole = shares[chip], max(share.stop for share in shares)
    start, stop, most = (
        count * values.shape[-1] // whole for count in (own.start, own.stop, max(map(len, shares)))
    )
    found, missing = values[..., start:stop], most - (stop - start)
    return np.pad(found, [(0, 0)] * (values.ndim - 1) + [(0, missing)]) if missing else found


@functools.lru_cache(maxsize=4096)
def _shares(config: ModelConfig, path: str, axis: str, chips: int) -> tuple[range, ...]:
    return config.shares(tuple(path.split("/")), axis, chips)
