"""Round to nearest: each group spans its numbers, from the least to the largest."""

import numpy as np

from inference.layerwise.input_statistics import InputStatistics
from layers import quantized
from layers.quantized import Groups


def groups(format: str, values_FD: np.ndarray, statistics: InputStatistics | None = None) -> Groups:
    """Groups of a matrix, whatever its inputs."""
    del statistics
    return quantized.rounded(format, values_FD, *quantized.scales(format, values_FD))
