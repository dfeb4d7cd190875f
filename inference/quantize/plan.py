"""By which method parameters get few bits."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from configs.errors import InputError
from configs.recipes.few_bits import LLM_INT8
from inference.layerwise.input_statistics import InputStatistics
from inference.layerwise.stream import Values
from inference.quantize.folds import Fold
from inference.quantize.methods import awq, gptq, percentile, rtn, smoothquant
from layers.quantized import Groups

# (format, values [F, D], what was seen of the inputs) -> groups.
Round = Callable[[str, np.ndarray, InputStatistics], Groups]
# (fold, values, what was seen of its readers' inputs, formats by path) -> factors of its elements.
Factors = Callable[[Fold, Values, Mapping[str, InputStatistics], Mapping[str, str]], np.ndarray]

QAT = "qat"


@dataclasses.dataclass(frozen=True)
class Method:
    """How a layer's matrices get few bits.

    Attributes:
        round: makes groups of a matrix.
        factors: moves between matrices before; None: nothing does.
        reads_text: whether it needs to see inputs.
        has_products: whether it needs their x x^T.
    """

    round: Round
    factors: Factors | None = None
    reads_text: bool = True
    has_products: bool = False


METHODS = {
    "rtn": Method(rtn.groups, reads_text=False),
    "percentile": Method(percentile.groups, reads_text=False),
    "smoothquant": Method(rtn.groups, smoothquant.factors),
    "awq": Method(awq.groups, awq.factors, has_products=True),
    "gptq": Method(gptq.groups, has_products=True),
    LLM_INT8: Method(rtn.groups),
    QAT: Method(rtn.groups, reads_text=False),  # of what is trained before
}


def method(name: str) -> Method:
    """One of `METHODS`; raises InputError if there is none of that name."""
    if name not in METHODS:
        raise InputError(f"no method {name!r}; valid: {', '.join(METHODS)}")
    return METHODS[name]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a checkpoint becomes.

    Attributes:
        method: one of `METHODS`.
        formats: by path; all other parameters stay.
        rotates: whether its residual stream is turned before.
    """

    method: str
    formats: Mapping[str, str]
    rotates: bool = False

    def __post_init__(self) -> None:
        method(self.method)
