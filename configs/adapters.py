"""What adapters may change of a model, and what room for them takes."""

import dataclasses
import itertools
from collections.abc import Iterable

from configs.kinds.params import ParamInfo, leaves
from configs.model import ModelConfig
from configs.precision import FORMATS
from configs.settings.adapters import AdapterConfig

RANKS = 16  # of which a slot has a multiple, as kernels multiply them
RANK_BYTES = 4  # a slot and parameter
EMBEDDING, HEAD = "embed/table", "head/table"  # of a tied model two uses of one table


def adaptable(config: ModelConfig, extras: Iterable[str] = ()) -> dict[str, ParamInfo]:
    """Declarations of what adapters may change, by path, whatever formats it has: the matrices that
    all tokens of a layer meet, and `AdapterConfig.extras`. An embedding is a table.
    """
    exact = dataclasses.replace(config, formats=()).parameters()
    infos = {"/".join(path): info for path, info in leaves(exact)}
    chosen = {
        path: info
        for path, info in infos.items()
        if path.startswith("layers/")
        and info.is_multiplied
        and extra_of(path, info) in ("", *extras)
    }
    if "vocab" in extras:
        chosen[EMBEDDING] = dataclasses.replace(infos[EMBEDDING], is_table=True)
        chosen[HEAD] = dataclasses.replace(infos.get(HEAD, infos[EMBEDDING]), is_table=False)
    return chosen


def extra_of(path: str, info: ParamInfo) -> str:
    """Which of the extras a parameter is; "": none."""
    if path in (EMBEDDING, HEAD):
        return "vocab"
    if len(info.shape) == 2:
        return ""
    return {"heads": "latents", "experts": "experts"}.get(info.logical_axes[0] or "", "others")


def num_matrices(info: ParamInfo) -> int:
    """E, matrices of a stack; of a matrix 1."""
    return info.shape[0] if len(info.shape) > 2 else 1


def num_modules(info: ParamInfo) -> int:
    """P, modules of which a matrix has the rows, one behind the other."""
    return len(info.stacked) // num_matrices(info) or 1


def module_ends(info: ParamInfo) -> tuple[int, ...]:
    """The rows before the end of each module, of all matrices."""
    return tuple(itertools.accumulate(info.stacked or info.shape[:1]))


def factors(info: ParamInfo, room: AdapterConfig) -> tuple[ParamInfo, ParamInfo]:
    """Declarations of what a slot has of a parameter, whose long sides chips divide as they divide
    it.

    Of a matrix [F, D]: A [P R, D] and B [F, R], whose rows meet the ranks of their own module. Of a
    stack [E, F, D]: A [E, P R, D] and B [E, F, P R]. Of a table [V, D]: A transposed, [D, R], and
    B [V, R], a table.
    """
    *stack, num_rows, num_columns = info.shape
    *stack_axes, rows, columns = info.logical_axes
    rank = padded_rank(room)
    num_ranks = num_modules(info) * rank
    down = dataclasses.replace(
        info, shape=(*stack, num_ranks, num_columns), logical_axes=(*stack_axes, None, columns),
        stacked=(), kv_heads=0, is_table=False,
    )  # fmt: skip
    if info.is_table:
        down = dataclasses.replace(down, shape=(num_columns, rank), logical_axes=(columns, None))
    up = dataclasses.replace(
        info, shape=(*stack, num_rows, num_ranks if stack else rank),
        logical_axes=(*stack_axes, rows, None),
    )  # fmt: skip
    return down, up


def padded_rank(room: AdapterConfig) -> int:
    """Ranks that a slot has room for."""
    return -(-room.rank // RANKS) * RANKS


def num_elements(config: ModelConfig, room: AdapterConfig) -> int:
    """Numbers that a slot has room for."""
    return sum(
        factor.elements
        for info in adaptable(config, room.extras).values()
        for factor in factors(info, room)
    )


def num_bytes(config: ModelConfig, room: AdapterConfig) -> int:
    """Bytes of all slots, which have the model's type, and of their ranks."""
    elements = room.slots * num_elements(config, room)
    ranks = room.slots * len(adaptable(config, room.extras))
    return round(FORMATS[config.dtype].bytes_for(elements, 1)) + RANK_BYTES * ranks
