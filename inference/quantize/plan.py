"""Which parameters get few bits, in which format, and by which method."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from configs.errors import InputError
from configs.kinds.params import ParamInfo, leaves
from configs.model import ModelConfig
from configs.precision import FORMATS, GROUPS
from inference.checkpoints import load
from inference.quantize.folds import Fold, Values
from inference.quantize.methods import awq, gptq, llm_int8, percentile, rtn, smoothquant
from inference.quantize.seen import Seen
from layers.quantized import OURS, Groups

# (format, values [F, D], what was seen of the inputs) -> groups.
Round = Callable[[str, np.ndarray, Seen], Groups]
# (fold, values, what was seen of its readers' inputs, formats by path) -> factors of its elements.
Factors = Callable[[Fold, Values, Mapping[str, Seen], Mapping[str, str]], np.ndarray]

LLM_INT8, QAT = "llm_int8", "qat"
_TABLES = ("embed/table", "head/table", "inputs/table")


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
    """One of `METHODS`.

    Raises:
        InputError: there is none of that name.
    """
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


def integers(bits: int, group: int | None, asymmetric: bool) -> str:
    """The name of a format of integers; without a group, of whichever fits a row (`formats`).

    Raises:
        InputError: there is none.
    """
    if bits == 8:
        if group is not None or asymmetric:
            raise InputError("8 bits have one scale a row and no zero point: no group, symmetric")
        return "int8"
    if bits not in (3, 4):
        raise InputError(f"integers have 8, 4 or 3 bits, not {bits}")
    if group is not None and group not in GROUPS:
        raise InputError(f"groups have {', '.join(map(str, GROUPS))} numbers, not {group}")
    name = f"int{bits}{'_asym' if asymmetric else ''}"
    return name if group is None else f"{name}_g{group}"


def formats(config: ModelConfig, name: str, skip: Sequence[str]) -> dict[str, str]:
    """Formats of a model's matrices, by path: that of this name, but for the tables, which have at
    least eight bits.

    Args:
        config: the model.
        name: one of `layers.quantized.OURS`, of integers in groups with their size ('int4_g128') or
            without it: then each matrix has the largest that divides its rows; or 'llm_int8'.
        skip: paths, or parts of them, of what stays as it is: 'head', 'layers/0', 'mixer/out'.

    Raises:
        InputError: no such format, a row that is no whole blocks, or a path that nothing has.
    """
    if name.removesuffix(f"_g{GROUPS[0]}") not in OURS and name != LLM_INT8:
        raise InputError(f"no format {name!r}; valid: {', '.join(OURS)}, {LLM_INT8}")
    declared = {"/".join(path): info for path, info in leaves(config.parameters())}
    for part in skip:
        if not any(_is_in(part, path) for path in declared):
            raise InputError(f"--skip={part}: no parameter of {config.name} has that in its path")
    found = {path: _fitting(name, info, path) for path, info in _matrices(config, skip).items()}
    of_tables = "fp8" if "fp8" in name else "int8"
    found |= dict.fromkeys((path for path in _TABLES if path in _typed(config, skip)), of_tables)
    return found


def _fitting(name: str, info: ParamInfo, path: str) -> str:
    """The format of a matrix."""
    row = info.shape[-1]
    if name == LLM_INT8:
        if row <= llm_int8.FEATURES:
            raise InputError(f"{path} has rows of {row}, all of them outliers of {name}")
        return name if len(info.shape) == 2 else llm_int8.FORMAT
    if name in OURS and FORMATS[name].group == GROUPS[0]:
        sizes = [size for size in GROUPS if not row % size]
        if not sizes:
            raise InputError(f"{path} has rows of {row}, not a multiple of {GROUPS[-1]}: --skip it")
        return name if sizes[0] == GROUPS[0] else f"{name}_g{sizes[0]}"
    found = name.removesuffix(f"_g{GROUPS[0]}")
    FORMATS[found].check_rows(row, path)
    return found


def _typed(config: ModelConfig, skip: Sequence[str]) -> dict[str, ParamInfo]:
    declared = {"/".join(path): info for path, info in leaves(config.parameters())}
    kept = (path for path in load.typed_paths(config) if not any(_is_in(s, path) for s in skip))
    return {path: declared[path] for path in kept}


def _matrices(config: ModelConfig, skip: Sequence[str]) -> dict[str, ParamInfo]:
    """Those of layers, and what else tokens are multiplied with, without the tables."""
    typed = _typed(config, skip).items()
    return {path: i for path, i in typed if i.is_multiplied and path not in _TABLES}


def _is_in(part: str, path: str) -> bool:
    return f"/{part.strip('/')}/" in f"/{path}/"
