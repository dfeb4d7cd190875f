"""Clipping: a group spans all but its largest few numbers, by a percentile of their size."""

import numpy as np

from configs.precision import FORMATS
from inference.layerwise.input_statistics import InputStatistics
from layers import quantized
from layers.quantized import Groups

# Of the numbers of a row, or of a group of few bits.
_SPANNED = {8: 0.9999, 4: 0.99, 3: 0.97}


def groups(format: str, values_FD: np.ndarray, statistics: InputStatistics | None = None) -> Groups:
    """Groups of a matrix, whatever its inputs."""
    del statistics
    info = FORMATS[format]
    F, D = values_FD.shape
    size_FGX = np.abs(values_FD).reshape(F, D // info.block_in(D), -1)
    spanned_FG = np.quantile(size_FGX, _SPANNED[info.bits], axis=-1, method="lower")
    whole_FG = size_FGX.max(-1)
    # Of a lone number, all others being 0, the whole span: it would be lost.
    share_FG = np.divide(spanned_FG, whole_FG, where=spanned_FG > 0, out=np.ones_like(spanned_FG))
    scales = quantized.scales(format, values_FD, share_FG.astype(np.float32))
    return quantized.rounded(format, values_FD, *scales)
