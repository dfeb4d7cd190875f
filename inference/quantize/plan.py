"""Which parameters get few bits, in which format, and by which method."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from configs import precision
from configs.errors import InputError
from configs.kinds.params import ParamInfo, leaves
from configs.model import ModelConfig
from configs.precision import GROUPS
from inference.checkpoints import load
from inference.quantize.methods import gptq, rtn
from inference.quantize.seen import Seen
from layers.quantized import OURS, Groups

# (format, values [F, D], what was seen of the inputs; None: nothing) -> groups.
Round = Callable[[str, np.ndarray, Seen], Groups]

_TABLES = ("embed/table", "head/table", "inputs/table")


@dataclasses.dataclass(frozen=True)
class Method:
    """How a layer's matrices get few bits.

    Attributes:
        round: makes groups of a matrix.
        reads_text: whether it needs to see inputs.
        has_products: whether it needs their x x^T.
    """

    round: Round
    reads_text: bool = True
    has_products: bool = False


METHODS = {
    "rtn": Method(rtn.groups, reads_text=False),
    "gptq": Method(gptq.groups, has_products=True),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a checkpoint becomes.

    Attributes:
        method: one of `METHODS`.
        formats: by path; all other parameters stay.
    """

    method: str
    formats: Mapping[str, str]

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InputError(f"no method {self.method!r}; valid: {', '.join(METHODS)}")


def format_name(
    config: ModelConfig, bits: int, group: int | None, asymmetric: bool, skip: Sequence[str]
) -> str:
    """The format of integers of so many bits in groups of such a size; without one, of the largest
    size that divides the rows of all matrices.

    Raises:
        InputError: there is none.
    """
    if bits == 8:
        if group is not None or asymmetric:
            raise InputError("8 bits have one scale a row and no zero point: no group, symmetric")
        return "int8"
    if bits not in (3, 4):
        raise InputError(f"integers have 8, 4 or 3 bits, not {bits}")
    if group is None:
        rows = {info.shape[-1] for info in _matrices(config, skip).values()}
        found = (size for size in GROUPS if not any(row % size for row in rows))
        group = next(found, GROUPS[-1])
    if group not in GROUPS:
        raise InputError(f"groups have {', '.join(map(str, GROUPS))} numbers, not {group}")
    name = f"int{bits}{'_asym' if asymmetric else ''}"
    return name if group == GROUPS[0] else f"{name}_g{group}"


def formats(config: ModelConfig, name: str, skip: Sequence[str]) -> dict[str, str]:
    """Formats of a model's matrices, by path: that of this name, but for the tables, which have at
    least eight bits.

    Args:
        config: the model.
        name: one of `layers.quantized.OURS`.
        skip: paths, or parts of them, of what stays as it is: 'head', 'layers/0', 'mixer/out'.

    Raises:
        InputError: no such format, a row that is no whole blocks, or a path that nothing has.
    """
    if name not in OURS:
        raise InputError(f"no format {name!r}; valid: {', '.join(OURS)}")
    declared = {"/".join(path): info for path, info in leaves(config.parameters())}
    for part in skip:
        if not any(_is_in(part, path) for path in declared):
            raise InputError(f"--skip={part}: no parameter of {config.name} has that in its path")
    of_tables = "fp8" if "fp8" in name else "int8"
    found = dict.fromkeys(_matrices(config, skip), name)
    found |= dict.fromkeys((path for path in _TABLES if path in _typed(config, skip)), of_tables)
    for path, own in found.items():
        precision.get(own).check_rows(declared[path].shape[-1], path)
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
