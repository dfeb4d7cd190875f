"""Rotation of the residual stream (QuaRot, Ashkboos et al. 2024, arXiv 2404.00456): every matrix
that reads it or adds to it is turned by one orthogonal matrix, which spreads what is large in few
elements over all of them and leaves the model's function as it is.

The weights of norms move into the matrices behind them first, since an RMS norm without weights
commutes with a rotation. A head that is the embedding becomes one of its own.
"""

import dataclasses

import numpy as np

from configs.errors import InputError
from configs.kinds.params import leaves
from configs.model import ModelConfig
from inference.layerwise.stream import Values
from inference.quantize import folds

_WRITERS = "mixer/out", "ffn/down", "ffn/experts/down", "ffn/shared/down"
_TABLES = "embed/table", "positions/table", "head/table"
FINAL_NORM = "final_norm"


def untied(config: ModelConfig) -> ModelConfig:
    """The model that a rotated one is; raises InputError if it cannot be rotated."""
    if config.norm != "rms":
        raise InputError(f"--rotate goes with RMS norms, and {config.name} has layer norms")
    if any(config.norms_of(layer) != (True, False) for layer in config.pattern):
        raise InputError(
            f"--rotate goes with norms of what layers read, and {config.name} has norms of what "
            "they add"
        )
    if config.hyper_connections is not None:
        raise InputError(f"--rotate goes with one residual stream, and {config.name} has several")
    if any(layer.factors for layer in config.pattern):
        raise InputError(f"--rotate: the residual stream of {config.name} goes on from its norms")
    if any(layer.parallel_norms == 1 for layer in config.pattern):
        raise InputError(f"--rotate: mixers and feed-forwards of {config.name} read one norm")
    declared = config.declared_layers
    for layer in declared[: len(config.pattern)]:
        infos = {"/".join(path): info for path, info in leaves(layer)}
        turned = {f"{path}{end}" for path in _WRITERS for end in ("", "_bias")}
        for part in ("mixer", "ffn"):
            turned |= {f"{part}_norm", *folds.normed_readers(part, infos)}
        for path, info in infos.items():
            if "embed" in info.logical_axes and path not in turned:
                raise InputError(f"--rotate does not go with {config.name}: {path} is not turned")
    return dataclasses.replace(config, tied=False)


def orthogonal(width: int, seed: int = 0) -> np.ndarray:
    """A Hadamard matrix with random signs, float64 [width, width]; where the width is no power of
    two, that of the largest power in it, times a random orthogonal matrix of the rest.
    """
    rng = np.random.default_rng(seed)
    power = width & -width
    dense_XX, _ = np.linalg.qr(rng.normal(size=(width // power, width // power)))
    turn_DD = np.ones((1, 1))
    while len(turn_DD) < power:
        turn_DD = np.kron(turn_DD, np.array([[1, 1], [1, -1]]) * 0.5**0.5)
    turn_DD = np.kron(dense_XX, turn_DD)
    turned: np.ndarray = rng.choice([-1.0, 1.0], size=width)[:, None] * turn_DD
    return turned


class Rotation:
    """One of a model, whose last norm has the weights `final_norm_D`."""

    def __init__(self, config: ModelConfig, final_norm_D: np.ndarray):
        self._config, self._turn_DD = config, orthogonal(config.width)
        self._last_D = final_norm_D.astype(np.float64) + config.norm_offset

    def layer(self, values: Values) -> Values:
        """A turned layer, by path."""
        turned_values = dict(values)
        for part in ("mixer", "ffn"):
            norm = f"{part}_norm"
            if norm not in values:
                continue
            scale_D = values[norm].astype(np.float64) + self._config.norm_offset
            for path in folds.normed_readers(part, values):
                turned_values[path] = self._turned(values[path] * scale_D)
            turned_values[norm] = self._ones(values[norm])
        for path in _WRITERS:
            if path in values:
                turned = self._turn_DD.T @ values[path].astype(np.float64)
                turned_values[path] = turned.astype(np.float32)
            if f"{path}_bias" in values:
                turned_values[f"{path}_bias"] = self._turned(values[f"{path}_bias"])
        return turned_values

    def rest(self, path: str, rows: np.ndarray) -> np.ndarray:
        """Rows of what belongs to no layer, turned."""
        if path == FINAL_NORM:
            return self._ones(rows)
        if path == "head/table":
            return self._turned(rows * self._last_D)
        return self._turned(rows) if path in _TABLES else rows

    def _turned(self, values: np.ndarray) -> np.ndarray:
        turned: np.ndarray = (values.astype(np.float64) @ self._turn_DD).astype(np.float32)
        return turned

    def _ones(self, norm_D: np.ndarray) -> np.ndarray:
        return np.full_like(norm_D, 1 - self._config.norm_offset)
