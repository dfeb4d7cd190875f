"""Which matrices of a model are in a format of few bits: what calibration makes, and what weights
are rounded to while they are read.
"""

import dataclasses
from collections.abc import Sequence

from configs import precision
from configs.errors import InputError
from configs.kinds.params import ParamInfo, leaves
from configs.model import ModelConfig
from configs.precision import FORMATS, GROUPS, OURS, OUTLIERS

LLM_INT8 = "llm_int8"
_BESIDE_OUTLIERS = "w8a8"  # what `llm_int8` has of stacks, and beside its outliers
_TABLES = ("embed/table", "head/table", "inputs/table")


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


def formats(model: ModelConfig, name: str, skip: Sequence[str] = ()) -> dict[str, str]:
    """Formats of a model's matrices, by path: that of this name, but for the tables, which have at
    least eight bits and are rounded to nearest. What is of another type than the model's, such as
    routers, stays.

    Args:
        model: whatever formats it has.
        name: one of `precision.OURS`, of integers in groups with their size ('int4_g128') or
            without it: then each matrix has the largest that divides its rows; or 'llm_int8'.
        skip: paths, or parts of them, of what stays as it is: 'head', 'layers/0', 'mixer/out'.

    Raises:
        InputError: no such format, a row that is no whole blocks, or a path that nothing has.
    """
    if _exact(name) not in OURS and name != LLM_INT8:
        raise InputError(f"no format {name!r}; valid: {', '.join(OURS)}, {LLM_INT8}")
    half = dataclasses.replace(model, dtype="bfloat16", formats=())
    declared = {"/".join(path): info for path, info in leaves(half.parameters())}
    for part in skip:
        if not any(_is_in(part, path) for path in declared):
            raise InputError(f"--skip={part}: no parameter of {model.name} has that in its path")
    of_tables = "fp8" if "fp8" in name else "int8"
    formats = {}
    for path, info in declared.items():
        if info.format != half.dtype or any(_is_in(part, path) for part in skip):
            continue
        if path in _TABLES:
            formats[path] = of_tables
        elif info.is_multiplied:
            formats[path] = _of_matrix(name, info, path)
    return formats


def _of_matrix(name: str, info: ParamInfo, path: str) -> str:
    row = info.shape[-1]
    if name == LLM_INT8:
        if row <= OUTLIERS:
            raise InputError(f"{path} has rows of {row}, all of them outliers of {name}")
        return name if len(info.shape) == 2 else _BESIDE_OUTLIERS
    if (exact := _exact(name)) != name:
        FORMATS[exact].check_rows(row, path)
        return exact
    return precision.fitting(name, row, path)


def _exact(name: str) -> str:
    """The format that a name with its size means: the largest size has none of its own."""
    base = name.removesuffix(f"_g{GROUPS[0]}")
    has_sizes = base in FORMATS and FORMATS[base].group == GROUPS[0]
    return base if has_sizes else name


def _is_in(part: str, path: str) -> bool:
    return f"/{part.strip('/')}/" in f"/{path}/"
