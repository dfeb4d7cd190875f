"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): where some activations are much larger than
others, a part of their size moves to the weights that read them.
"""

from collections.abc import Mapping

import numpy as np

from inference.layerwise.input_statistics import InputStatistics
from inference.layerwise.stream import Values
from inference.quantize.folds import Fold

_ALPHA = 0.5  # of the activations' size moves, on a logarithmic scale
_LEAST = 1e-5


def factors(
    fold: Fold, values: Values, inputs: Mapping[str, InputStatistics], formats: Mapping[str, str]
) -> np.ndarray:
    """Of the elements of a fold: max |x| ** alpha / max |w| ** (1 - alpha)."""
    del formats
    largest = [(fold.gathered(inputs[path].largest_D, np.max),
             fold.gathered(np.abs(values[path]).max(-2), np.max))
            for path in fold.readers if path in inputs]  # fmt: skip
    of_inputs = np.max([x for x, _ in largest], axis=0)
    of_weights = np.max([w for _, w in largest], axis=0)
    ratio = np.maximum(of_inputs, _LEAST) ** _ALPHA / np.maximum(of_weights, _LEAST) ** (1 - _ALPHA)
    return np.where((of_inputs > 0) & (of_weights > 0), ratio, 1.0)
