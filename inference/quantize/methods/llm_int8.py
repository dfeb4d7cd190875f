"""LLM.int8() (Dettmers et al. 2022, arXiv 2208.07339): the few features of the activations that are
much larger than all others are multiplied in bfloat16, the rest in int8, weights and activations.
"""

import ml_dtypes
import numpy as np

from configs.precision import OUTLIER_SIZE, OUTLIERS
from inference.layerwise.input_statistics import InputStatistics
from layers import quantized


def parts(values_FD: np.ndarray, statistics: InputStatistics | None) -> dict[str, np.ndarray]:
    """A matrix as its three parts, which `native.blocks.joined` puts together: `int8`, blocks of
    all but the outliers, whose columns are 0; `outliers`, bfloat16 [F, 32]; and `features`, int32
    [32], which columns these are, in order: those whose inputs were the largest, or (of a matrix
    that nothing was seen of) the first ones.
    """
    size_D = np.zeros(values_FD.shape[1]) if statistics is None else statistics.largest_D
    features = np.sort(np.argsort(-size_D, kind="stable")[:OUTLIERS])
    usual_FD = values_FD.copy()
    usual_FD[:, features] = 0
    return {
        "int8": quantized.quantize("w8a8", usual_FD),
        "outliers": values_FD[:, features].astype(ml_dtypes.bfloat16),
        "features": features.astype(np.int32),
    }


def as_read(rows_RD: np.ndarray, features: np.ndarray) -> np.ndarray:
    """Inputs as the product rounds them (`layers.linear`): float32 [R, D]."""
    usual_RD = rows_RD.copy()
    usual_RD[:, features] = 0
    size_R1 = np.sqrt(np.square(usual_RD).mean(1, keepdims=True))
    is_large_RD = np.abs(usual_RD) > OUTLIER_SIZE * size_R1
    parts = np.where(is_large_RD, 0, usual_RD), np.where(is_large_RD, usual_RD, 0)
    read_RD: np.ndarray = sum(
        quantized.dequantize("int8", quantized.quantize("int8", part), rows_RD.shape[1])
        for part in parts
    )  # type: ignore[assignment]
    read_RD[:, features] = rows_RD[:, features]
    return read_RD
