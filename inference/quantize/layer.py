"""One layer: what a method makes of its matrices, and how far their results are off."""

from collections.abc import Mapping

import jax
import numpy as np

from configs.kinds.params import ParamInfo
from configs.precision import FORMATS
from inference.quantize.methods import rtn
from inference.quantize.plan import Method
from inference.quantize.seen import Seen
from layers import quantized


def rounded(
    method: Method,
    values: Mapping[str, np.ndarray],
    infos: Mapping[str, ParamInfo],
    inputs: Mapping[str, Seen],
) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """A layer as it is stored, and the errors of its matrices' results.

    Args:
        method: makes groups.
        values: float32, by path.
        infos: in which format each is stored.
        inputs: what was seen of the inputs of matrices in few bits; what saw nothing, such as an
            expert that no token visits, is rounded to nearest.
    """
    made: dict[str, np.ndarray] = {}
    errors: dict[str, float] = {}
    for path, info in infos.items():
        value, own = values[path], inputs.get(path)
        if not FORMATS[info.format].is_quantized:
            made[path] = value.astype(jax.numpy.dtype(info.format))
            continue
        stack = value if value.ndim > 2 else value[None]
        each = [own] * len(stack)
        if own is not None and value.ndim > 2:
            each = [own.of(nth) for nth in range(len(stack))]
        parts = []
        wrong = right = 0.0
        for matrix_FD, seen in zip(stack, each, strict=True):
            if seen is None or not seen.count:
                parts.append(quantized.pack(info.format, rtn.groups(info.format, matrix_FD)))
                continue
            groups = method.round(info.format, matrix_FD, seen)
            parts.append(quantized.pack(info.format, groups))
            results_RF = seen.rows_RD @ matrix_FD.T
            own_FD = quantized.numbers(info.format, groups)
            own_RF = _as_read(info.format, seen.rows_RD) @ own_FD.T
            wrong += float(np.square(own_RF - results_RF).sum())
            right += float(np.square(results_RF).sum())
        made[path] = np.stack(parts).reshape(*info.shape[:-1], -1)
        if right:
            errors[path] = (wrong / right) ** 0.5
    return made, errors


def _as_read(format: str, rows_RD: np.ndarray) -> np.ndarray:
    """Inputs as a product of that format rounds them, a scale each."""
    activations = FORMATS[format].activations
    if activations is None:
        return rows_RD
    return quantized.dequantize(
        activations, quantized.quantize(activations, rows_RD), rows_RD.shape[1]
    )
