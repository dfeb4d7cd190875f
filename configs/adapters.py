"""What adapters may change of a model, and what room for them takes."""

import dataclasses
import itertools

from configs.kinds.params import ParamInfo, leaves
from configs.model import ModelConfig
from configs.precision import FORMATS
from configs.settings.adapters import AdapterConfig

RANKS = 16  # of which a slot has a multiple, as kernels multiply them


def adaptable(config: ModelConfig) -> dict[str, ParamInfo]:
    """Declarations of the matrices that adapters may change, by path, whatever formats they have:
    those that all tokens of a layer meet.
    """
    return {
        "/".join(path): info
        for path, info in leaves(dataclasses.replace(config, formats=()).parameters())
        if path[0] == "layers" and info.is_multiplied and len(info.shape) == 2
    }


def num_modules(info: ParamInfo) -> int:
    """P, modules of which a matrix has the rows, one behind the other."""
    return len(info.stacked) or 1


def module_ends(info: ParamInfo) -> tuple[int, ...]:
    """The rows before the end of each of its modules."""
    return tuple(itertools.accumulate(info.stacked or info.shape[:1]))


def factors(info: ParamInfo, room: AdapterConfig) -> tuple[ParamInfo, ParamInfo]:
    """Declarations of what a slot has of a matrix [F, D]: A [P R, D] and B [F, R], whose rows meet
    the ranks of their own module. Chips divide their long sides as they divide the matrix.
    """
    (num_rows, num_columns), rank = info.shape, padded_rank(room)
    rows, columns = info.logical_axes
    down = dataclasses.replace(
        info, shape=(num_modules(info) * rank, num_columns), logical_axes=(None, columns),
        stacked=(), kv_heads=0,
    )  # fmt: skip
    return down, dataclasses.replace(info, shape=(num_rows, rank), logical_axes=(rows, None))


def padded_rank(room: AdapterConfig) -> int:
    """Ranks that a slot has room for."""
    return -(-room.rank // RANKS) * RANKS


def num_bytes(config: ModelConfig, room: AdapterConfig) -> int:
    """Bytes of all slots, which have the model's type."""
    elements = sum(
        room.slots * factor.elements
        for info in adaptable(config).values()
        for factor in factors(info, room)
    )
    return round(FORMATS[config.dtype].bytes_for(elements, 1))
