"""The weights of a model with less to cache (`configs/recipes/smaller_caches.py`): means of those
that made its keys and values.

Layers that share a cache get the mean of their projections, as a beginning for a short training
(models of Brandon et al. 2024, arXiv 2405.12981, are trained like that from the first step), heads
that become one the mean of theirs (Ainslie et al. 2023, arXiv 2305.13245). Biases and norms of keys
go with them.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from configs.kinds.params import ParamInfo
from configs.model import ModelConfig
from inference.checkpoints import load, names
from inference.checkpoints.checkpoint import Contents
from inference.checkpoints.tensor_source import TensorSource
from layers import decoder, params

_OF_KEYS = ("k_norm", "kv_down", "kv_norm")  # they make keys, or latents, and nothing else


@dataclasses.dataclass(frozen=True)
class _Origin:
    """How a parameter follows from those of the larger model.

    Attributes:
        query_path: path of that whose first rows are kept, those that make queries.
        num_queries: how many rows these are.
        averaged: paths of those whose further rows are averaged; (): these rows are dropped.
        heads: of the averaged rows so many heads become one.
        head_rows: rows of one head.
    """

    query_path: str
    num_queries: int
    averaged: tuple[str, ...]
    heads: int
    head_rows: int

    def values(self, stored: Contents) -> np.ndarray:
        """Its rows, float32."""
        queries = _whole(stored, self.query_path)[: self.num_queries]
        if not self.averaged:
            return queries
        parts = [_whole(stored, path)[self.num_queries :] for path in self.averaged]
        rows = functools.reduce(np.add, parts) / np.float32(len(parts))
        shape = -1, self.heads, self.head_rows, *rows.shape[1:]
        return np.concatenate([queries, rows.reshape(shape).mean(1).reshape(-1, *rows.shape[1:])])


def contents(old: ModelConfig, new: ModelConfig, stored: Contents) -> Contents:
    """What a checkpoint holds, as the model that it becomes.

    Args:
        new: that of `shared_by`, `with_kv_heads` or both.

    Raises:
        InputError: the checkpoint does not hold `old`.
    """
    plain = (dataclasses.replace(model, formats=()) for model in (old, new))
    before, after = (params.flatten(decoder.param_infos(model)) for model in plain)
    load.check(before, stored.source, stored.name_map)
    origins = {path: origin for path in after if (origin := _origin(path, old, new, before))}

    def stream(path: str) -> Iterator[np.ndarray]:
        if path in origins:
            yield origins[path].values(stored)
        else:
            yield from load.rows_of(stored.source, stored.name_map(path))

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        rows = np.concatenate(list(stream(name)))[start:stop]
        return rows[:, columns] if rows.ndim > 1 else rows

    def dtype(path: str) -> str:
        origin = origins.get(path)
        paths = (path,) if origin is None else (origin.query_path, *origin.averaged)
        return stored.source.widest(name for p in paths for name in stored.name_map(p).names)

    source = TensorSource(
        stored.source.label, {path: info.in_rows for path, info in after.items()}, read,
        stored.source.dtype, stream, dtypes={path: dtype(path) for path in after},
    )  # fmt: skip
    return Contents(source, names.identity, stored.read_files)


def _origin(
    path: str, old: ModelConfig, new: ModelConfig, before: dict[str, ParamInfo]
) -> _Origin | None:
    """How a parameter is made; None where it stays as it is."""
    parts = path.split("/")
    if parts[0] != "layers" or parts[2] != "mixer":
        return None
    layer, name = int(parts[1]), parts[3]
    was: Any = old.layers[layer].mixer
    mixer: Any = new.layers[layer].mixer
    if path not in before:  # the queries of a layer that no longer has keys
        candidates = (path.replace("/q", f"/{inputs}") for inputs in ("qkv", "qk"))
        fused = next(path for path in candidates if path in before)
        return _Origin(fused, before[fused].stacked[0], (), 1, 1)
    info = before[path]
    if not info.kv_heads and name not in _OF_KEYS:
        return None
    is_of_all = not (name == "k_norm" and mixer.qk_norm == "head")
    heads = was.num_kv_heads // mixer.num_kv_heads if is_of_all and mixer.cached_heads else 1
    sharers = (other for other, spec in enumerate(new.cache_specs) if spec.owner == layer)
    members = (path, *(path.replace(f"/{layer}/", f"/{other}/") for other in sharers))
    averaged = tuple(member for member in members if member in before)
    if len(averaged) == heads == 1:
        return None
    num_queries = info.stacked[0] if info.stacked else 0
    return _Origin(path, num_queries, averaged, heads, mixer.head_width if heads > 1 else 1)


def _whole(stored: Contents, path: str) -> np.ndarray:
    blocks = load.rows_of(stored.source, stored.name_map(path))
    return np.concatenate([np.asarray(block, np.float32) for block in blocks])
