"""What adapters may change of a model, and what room for them takes."""

from configs.kinds.params import ParamInfo, leaves
from configs.model import ModelConfig
from configs.precision import FORMATS
from configs.settings.adapters import AdapterConfig


def adaptable(config: ModelConfig) -> dict[str, ParamInfo]:
    """Declarations of the matrices that adapters may change, by path: those that all tokens of a
    layer meet.
    """
    return {
        "/".join(path): info
        for path, info in leaves(config.parameters())
        if path[0] == "layers" and info.is_multiplied and len(info.shape) == 2
    }


def num_modules(info: ParamInfo) -> int:
    """P, modules of which a matrix has the rows, one behind the other."""
    return len(info.stacked) or 1


def stack_shapes(info: ParamInfo, room: AdapterConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of a matrix [F, D] the shapes of its slots' factors: A [N, P R, D] and B [N, F, P R]."""
    (num_rows, num_columns), num_ranks = info.shape, num_modules(info) * room.rank
    return (room.slots, num_ranks, num_columns), (room.slots, num_rows, num_ranks)


def num_bytes(config: ModelConfig, room: AdapterConfig) -> int:
    """Bytes of all slots, which have the model's type."""
    elements = sum(
        slots * rows * columns
        for info in adaptable(config).values()
        for slots, rows, columns in stack_shapes(info, room)
    )
    return round(FORMATS[config.dtype].bytes_for(elements, 1))
