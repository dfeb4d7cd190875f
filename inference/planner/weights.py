"""What a model's parameters come to, whole and on a chip: sums over their declarations."""

import functools
import math
from typing import NamedTuple

from configs import precision
from configs.kinds import operations, params
from configs.mesh import Mesh
from configs.model import ModelConfig
from inference.planner.cost import Precision


class WeightGroup(NamedTuple):
    """Weights of a model that lie alike: in memory, and over chips.

    Attributes:
        elements: all of them.
        row: how many lie in a row.
        format: 'weights' (of a layer's matrices), 'rest', or a format by name.
        is_split, by_expert: whether chips along `model` and `expert` divide them.
        by_context: whether those along `context` divide what those along `model` do.
        kv_elements, kv_heads: of the elements, those that belong to so many key/value heads.
    """

    elements: int
    row: int
    format: str
    is_split: bool
    by_expert: bool = False
    by_context: bool = False
    kv_elements: int = 0
    kv_heads: int = 1


def fitting(config: ModelConfig, name: str) -> precision.Format:
    """Returns the format of that name that divides rows of all matrices of a model's layers; raises
    InputError if none does.
    """
    rows = []
    for path, info in params.leaves(config.parameters()["layers"]):
        if info.is_matrix:
            rows.append(info.shape[-1])
            precision.fitting(name, rows[-1], f"layers/{'/'.join(path)}")
    return precision.FORMATS[precision.fitting(name, math.gcd(*rows), config.name)]


@functools.lru_cache(maxsize=64)  # a sweep asks for the same model thousands of times
def weight_groups(config: ModelConfig) -> tuple[WeightGroup, ...]:
    """All weights: tables, norms and biases, and the matrices of each layer."""
    groups = []
    for path, info in params.leaves(config.parameters()):
        if not info.is_matrix:
            continue
        format = operations.stored_as(info, config, "rest" if path[-1] == "table" else "weights")
        groups.append(
            WeightGroup(
                info.elements, info.shape[-1], format, operations.is_divided(info),
                info.num_experts is not None, operations.is_by_context(info),
                info.kv_rows * info.shape[-1], max(1, info.kv_heads),
            )
        )  # fmt: skip
    vectors = config.vectors.items()
    return (*groups, *(WeightGroup(count, config.width, *how) for how, count in vectors))


def num_parameters(config: ModelConfig) -> int:
    """All weights, a tied head counted once."""
    return sum(part.elements for part in weight_groups(config))


def num_active_parameters(config: ModelConfig) -> int:
    """Weights that one token is multiplied with, the head included and the embedding not."""
    flops = sum(
        layers * coefficient
        for operation, layers in config.operations.items()
        if operation.rows
        for coefficient, _ in operation.flops
    )
    return int(flops) // 2


def weight_bytes(config: ModelConfig, precision: Precision | None = None) -> float:
    """Bytes of all weights, in the model's own precision unless another is given; those in a format
    of their own as they are.
    """
    formats = precision or Precision.of(config)
    return sum(_bytes(part, formats) for part in weight_groups(config))


def chip_weight_bytes(config: ModelConfig, precision: Precision, mesh: Mesh) -> float:
    """Bytes of the weights that one chip of a mesh holds: heads, columns and tables divided over
    `model` (key/value heads as far as there are any), all of these but heads over `context` too,
    experts and their biases over `expert` too, other vectors and undivided matrices whole.
    """
    total = 0.0
    for part in weight_groups(config):
        whole = _bytes(part, precision) / (mesh.expert if part.by_expert else 1)
        chips = (mesh.group_chips if part.by_context else mesh.model) if part.is_split else 1
        total += divided(whole, chips, part.kv_elements / part.elements, part.kv_heads)
    return total


def _bytes(part: WeightGroup, precision: Precision) -> float:
    return precision.format(part.format).bytes_for(part.elements, part.row)


def divided(whole: float, chips: int, copied: float, parts: int) -> float:
    """A chip's part of what `chips` divide, where the share `copied` of it has so many parts."""
    return whole * (1 - copied) / chips + whole * copied / min(chips, parts)
