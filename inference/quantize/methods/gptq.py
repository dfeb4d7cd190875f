"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): columns are rounded one after the other, and what
each loses is made up for by those that follow, as far as their inputs go together.

With H the sum of x x^T over calibration inputs and U the upper Cholesky factor of its inverse,
rounding column j by an error e adds -e U[j, k] / U[j, j] to each later column k. The columns whose
inputs are largest come first (activation order); scales are those of the groups as they are stored,
found beforehand, so that the order of columns on disk stays.
"""

import numpy as np

from inference.layerwise.input_statistics import InputStatistics
from layers import quantized
from layers.quantized import Groups

_DAMPING = 0.01  # of H's mean diagonal, added to all of it
_BLOCK = 128  # columns whose errors reach later ones together


def groups(format: str, values_FD: np.ndarray, statistics: InputStatistics) -> Groups:
    """Groups of a matrix that reads inputs such as were seen."""
    assert statistics.products_DD is not None
    scale_FG, zero_FG = quantized.scales(format, values_FD)
    F, D = values_FD.shape
    order_D = np.argsort(-np.diagonal(statistics.products_DD), kind="stable")
    upper_DD = _upper(statistics.products_DD[np.ix_(order_D, order_D)])
    residual_FD = values_FD[:, order_D].astype(np.float64)
    group_D = order_D // (D // scale_FG.shape[1])
    columns: list[np.ndarray] = [np.empty(0)] * D
    for start in range(0, D, _BLOCK):
        stop = min(start + _BLOCK, D)
        error_FX = np.empty((F, stop - start))
        for j in range(start, stop):
            column_group = slice(group_D[j], group_D[j] + 1)
            zero_F1 = None if zero_FG is None else zero_FG[:, column_group]
            column = quantized.rounded(
                format, residual_FD[:, j : j + 1], scale_FG[:, column_group], zero_F1
            )
            lost_F = residual_FD[:, j] - quantized.numbers(format, column)[:, 0]
            error_FX[:, j - start] = lost_F / upper_DD[j, j]
            residual_FD[:, j + 1 : stop] -= np.outer(
                error_FX[:, j - start], upper_DD[j, j + 1 : stop]
            )
            columns[order_D[j]] = column.q_FD[:, 0]
        residual_FD[:, stop:] -= error_FX @ upper_DD[start:stop, stop:]
    return Groups(np.stack(columns, axis=1), scale_FG, zero_FG)


def _upper(products_DD: np.ndarray) -> np.ndarray:
    """The upper Cholesky factor of the inverse of H, float64, which is damped in place."""
    diagonal_D = np.einsum("dd->d", products_DD)
    diagonal_D += _DAMPING * diagonal_D.mean() or 1.0
    upper_DD: np.ndarray = np.linalg.cholesky(np.linalg.inv(products_DD)).T
    return upper_DD
