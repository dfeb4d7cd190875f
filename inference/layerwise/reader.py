"""A checkpoint's parameters as numbers, a layer at a time."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from configs.errors import InputError
from configs.kinds.params import ParamInfo, leaves
from configs.model import ModelConfig
from inference.checkpoints import load
from inference.checkpoints.checkpoint import Contents
from inference.checkpoints.names import Stored
from inference.checkpoints.tensor_source import TensorSource
from inference.layerwise.stream import Values

LOOKED_UP = "embed/table", "inputs/table"  # by tokens
LAST = "head/table", "final_norm"  # behind the layers


class Reader:
    """Reads a model's parameters as float32, whatever they are stored as."""

    def __init__(self, contents: Contents, config: ModelConfig):
        self.config = dataclasses.replace(config, dtype="float32", formats=(), cache_format=None)
        self._source, self._name_map = contents.source, contents.name_map
        self.infos = {"/".join(path): info for path, info in leaves(self.config.parameters())}

    def whole(self, path: str) -> np.ndarray:
        """Returns a parameter; raises InputError if a number of it is not finite."""
        return read(self._source, self._name_map(path), path, self.infos[path])

    def layer(self, index: int) -> Values:
        """Returns a layer's parameters, by their paths in it; raises as `whole`."""
        prefix = f"layers/{index}/"
        paths = [path for path in self.infos if path.startswith(prefix)]
        return {path.removeprefix(prefix): self.whole(path) for path in paths}

    def embedding(self, ids: np.ndarray) -> Values:
        """Returns what tokens are embedded with, the rows of these ids; raises as `whole`."""
        return {
            path: self._rows(path, ids) if path in LOOKED_UP else self.whole(path)
            for path in self.infos
            if not path.startswith(("layers/", *LAST))
        }

    def blocks(self, path: str) -> Iterator[np.ndarray]:
        """Yields a table's rows some at a time; raises as `whole`."""
        for block in load.rows_of(self._source, self._name_map(path)):
            rows = np.asarray(block, np.float32)
            check_finite(path, rows)
            yield rows

    def _rows(self, path: str, ids: np.ndarray) -> np.ndarray:
        rows = np.empty((len(ids), self.infos[path].shape[1]), np.float32)
        start = 0
        for block in self.blocks(path):
            inside = (ids >= start) & (ids < start + len(block))
            rows[inside] = block[ids[inside] - start]
            start += len(block)
        return rows


def read(source: TensorSource, stored: Stored, path: str, info: ParamInfo) -> np.ndarray:
    """Returns a parameter, float32; raises InputError if a number of it is not finite."""
    info = dataclasses.replace(info, format="float32")
    values = np.asarray(load.StoredParameter(source, stored, info))
    check_finite(path, values)
    return values


def check_finite(path: str, values: np.ndarray) -> None:
    """Raises InputError if a parameter holds a number that is not finite."""
    if not np.isfinite(values).all():
        raise InputError(f"{path} holds numbers that are not finite")
