"""AWQ (Lin et al. 2023, arXiv 2306.00978): weights that meet large activations are made larger
before they are rounded, as far as that brings the results nearer; then each group is clipped
likewise, one after the other and several times, so that what one loses others may make up for.

How far results are off follows from the sum of x x^T: of an error e of a row, e^T (sum x x^T) e.
"""

from collections.abc import Mapping

import numpy as np

from configs.precision import FORMATS
from inference.layerwise.input_statistics import InputStatistics
from inference.layerwise.stream import Values
from inference.quantize.folds import Fold
from inference.quantize.methods import rtn
from layers import quantized
from layers.quantized import Groups

_EXPONENTS = np.linspace(0, 1, 20, endpoint=False)  # of the mean activations
_SHARES = np.linspace(1, 0.6, 41)  # of a group's span
_PASSES = 3  # over all groups
_ELEMENTS = 1 << 23  # of errors that are held at a time
_LEAST = 1e-4  # of the largest mean: a factor's base is not smaller


def factors(
    fold: Fold, values: Values, inputs: Mapping[str, InputStatistics], formats: Mapping[str, str]
) -> np.ndarray:
    """Of the elements of a fold: a power of their mean size, that which leaves the least error."""
    readers = [path for path in fold.readers if path in inputs]
    totals = [fold.gathered(inputs[path].sum_D, np.sum) for path in readers]
    mean = np.sum(totals, axis=0)
    mean = np.maximum(mean, _LEAST * max(float(mean.max()), 1e-30))
    best, least = np.ones(fold.shape), np.inf
    for exponent in _EXPONENTS:
        candidate = mean**exponent
        candidate /= np.sqrt(candidate.max() * candidate.min())
        columns = fold.spread(candidate).astype(np.float32)
        error = sum(_error(formats[path], values[path], inputs[path], columns) for path in readers)
        if error < least:
            best, least = candidate, error
    return best


def _error(
    format: str, value: np.ndarray, statistics: InputStatistics, columns: np.ndarray
) -> float:
    """Of the results of a matrix, or of all of a stack, rounded with such factors."""
    assert statistics.products_DD is not None
    is_stack, products_EDD, total = value.ndim > 2, statistics.products_DD, 0.0
    value_EFD, products_EDD = (x if is_stack else x[None] for x in (value, products_EDD))
    scale_ED = np.broadcast_to(columns, (len(value_EFD), columns.shape[-1]))
    for matrix_FD, products_DD, scale_D in zip(value_EFD, products_EDD, scale_ED, strict=True):
        groups = rtn.groups(format, matrix_FD * scale_D)
        lost_FD = quantized.numbers(format, groups) / scale_D - matrix_FD
        total += float(np.vdot(lost_FD @ products_DD.astype(np.float32), lost_FD))
    return total


def groups(format: str, values_FD: np.ndarray, statistics: InputStatistics) -> Groups:
    """Groups of a matrix, each clipped to that share of its span which leaves the least error."""
    assert statistics.products_DD is not None
    products_DD, (F, D) = statistics.products_DD.astype(np.float32), values_FD.shape
    step = max(_ELEMENTS // (D * len(_SHARES)), 1)
    blocks = (values_FD[start : start + step] for start in range(0, F, step))
    shares = [_shares(format, block_FD, products_DD) for block_FD in blocks]
    scales = quantized.scales(format, values_FD, np.concatenate(shares))
    return quantized.rounded(format, values_FD, *scales)


def _shares(format: str, values_FD: np.ndarray, products_DD: np.ndarray) -> np.ndarray:
    """The share of each group: float32 [F, G]."""
    F, D = values_FD.shape
    size = FORMATS[format].block_in(D)
    candidates = [
        quantized.rounded(format, values_FD, *quantized.scales(format, values_FD, float(share)))
        for share in _SHARES
    ]
    lost_SFD = np.stack([quantized.numbers(format, groups) - values_FD for groups in candidates])
    chosen_FG, residual_FD, row_F = np.zeros((F, D // size), int), lost_SFD[0].copy(), np.arange(F)
    for _ in range(_PASSES):
        for group in range(D // size):
            columns = slice(group * size, (group + 1) * size)
            group_SFX, group_XX = lost_SFD[:, :, columns], products_DD[columns, columns]
            outer_FX = residual_FD @ products_DD[:, columns] - residual_FD[:, columns] @ group_XX
            error_SF = ((group_SFX @ group_XX + 2 * outer_FX) * group_SFX).sum(-1)
            chosen_FG[:, group] = error_SF.argmin(0)
            residual_FD[:, columns] = group_SFX[chosen_FG[:, group], row_F]
    return _SHARES[chosen_FG].astype(np.float32)
