"""AWQ (Lin et al. 2023, arXiv 2306.00978): weights that meet large activations are made larger
before they are rounded, as far as that brings the results nearer; then each group is clipped
likewise.

How far results are off follows from the sum of x x^T: of an error e of a row, e^T (sum x x^T) e.
"""

from collections.abc import Mapping

import numpy as np

from inference.quantize.folds import Fold, Values
from inference.quantize.seen import Seen
from layers import quantized
from layers.quantized import Groups

_EXPONENTS = np.linspace(0, 1, 20, endpoint=False)  # of the mean activations
_SHARES = np.linspace(1, 0.5, 11)  # of a group's span
_LEAST = 1e-4  # of the largest mean: a factor's base is not smaller


def factors(
    fold: Fold, values: Values, inputs: Mapping[str, Seen], formats: Mapping[str, str]
) -> np.ndarray:
    """Of the elements of a fold: a power of their mean size, that which leaves the least error."""
    readers = [path for path in fold.readers if path in inputs]
    totals = [fold.gathered(inputs[path].sum_D, np.sum) for path in readers]
    mean = np.sum(totals, axis=0)
    mean = np.maximum(mean, _LEAST * max(float(mean.max()), 1e-30))
    best, least = np.ones(fold.shape), np.inf
    for exponent in _EXPONENTS:
        found = mean**exponent
        found /= np.sqrt(found.max() * found.min())
        columns = fold.spread(found).astype(np.float32)
        error = sum(_error(formats[path], values[path], inputs[path], columns) for path in readers)
        if error < least:
            best, least = found, error
    return best


def _error(format: str, value: np.ndarray, seen: Seen, columns: np.ndarray) -> float:
    """Of the results of a matrix, or of all of a stack, rounded with such factors."""
    assert seen.products_DD is not None
    stack = value if value.ndim > 2 else value[None]
    products = seen.products_DD if value.ndim > 2 else seen.products_DD[None]
    each = columns if columns.ndim > 1 else np.broadcast_to(columns, (len(stack), *columns.shape))
    total = 0.0
    for matrix_FD, products_DD, own_D in zip(stack, products, each, strict=True):
        larger_FD = matrix_FD * own_D
        groups = quantized.rounded(format, larger_FD, *quantized.scales(format, larger_FD))
        lost_FD = quantized.numbers(format, groups) / own_D - matrix_FD
        total += float(np.vdot(lost_FD @ products_DD.astype(np.float32), lost_FD))
    return total


def groups(format: str, values_FD: np.ndarray, seen: Seen) -> Groups:
    """Groups of a matrix, each clipped to the share of its span that leaves the least error."""
    assert seen.products_DD is not None
    F, D = values_FD.shape
    G = D // quantized.FORMATS[format].block_in(D)
    own_GXX = np.stack([
        seen.products_DD[n : n + D // G, n : n + D // G] for n in range(0, D, D // G)
    ]).astype(np.float32)  # fmt: skip
    best_FG, least_FG = np.ones((F, G), np.float32), np.full((F, G), np.inf, np.float32)
    for share in _SHARES:
        scales = quantized.scales(format, values_FD, float(share))
        found = quantized.rounded(format, values_FD, *scales)
        lost_FD = quantized.numbers(format, found) - values_FD
        lost_GFX = lost_FD.reshape(F, G, -1).swapaxes(0, 1)
        error_FG = ((lost_GFX @ own_GXX) * lost_GFX).sum(-1).T
        best_FG = np.where(error_FG < least_FG, np.float32(share), best_FG)
        least_FG = np.minimum(error_FG, least_FG)
    return quantized.rounded(format, values_FD, *quantized.scales(format, values_FD, best_FG))
