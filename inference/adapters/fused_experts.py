"""Factors of all experts of a layer in one tensor, as `peft` has those of a stack (its
`target_parameters`): A [E r, D], one expert's rows behind the other's, and B [F, r E], whose
columns are the experts' in turn.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping

import numpy as np

from inference.adapters.modules import Module
from inference.adapters.stored import Stored
from inference.checkpoints.tensor_source import Read, TensorSource

_FUSED = re.compile(r"(.+\.experts)(\.base_layer)*")  # of a layer's stacks one is inside the other
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.\w+")
_STACKS = ("gate_proj", "up_proj"), ("down_proj",)


@dataclasses.dataclass(frozen=True)
class _Part:
    """What an expert's module has of a fused tensor: all of A's columns, some rows of B."""

    tensor: str
    expert: int
    num_experts: int
    rows: slice | None = None  # of B

    def of(self, fused: np.ndarray) -> np.ndarray:
        if self.rows is None:
            return fused.reshape(self.num_experts, -1, fused.shape[1])[self.expert]
        return fused.reshape(len(fused), -1, self.num_experts)[self.rows, :, self.expert]


def split(stored: Stored) -> Stored:
    """The tensors of each expert's modules in place of fused ones; what fits no stack of the model
    stays as it is.
    """
    shapes, tensors = dict(stored.source.shapes), dict(stored.tensors)
    counts, parts = _counts(stored.modules), dict[str, _Part]()
    for name, (down, up) in stored.tensors.items():
        match = _FUSED.fullmatch(name)
        if match is None or match[1] not in counts or not shapes.keys() >= {down, up}:
            continue
        experts, num_experts = match[1], counts[match[1]]
        endings = _stack_of(stored.modules, experts, shapes[down], shapes[up])
        if endings is None or shapes[down][0] % num_experts:
            continue
        del tensors[name], shapes[up]
        rank, first = shapes.pop(down)[0] // num_experts, 0
        for ending in endings:
            rows, columns = stored.modules[f"{experts}.0.{ending}"].shape
            for expert in range(num_experts):
                module = f"{experts}.{expert}.{ending}"
                tensors[module] = both = f"{module}: A", f"{module}: B"
                shapes |= {both[0]: (rank, columns), both[1]: (rows, rank)}
                parts[both[0]] = _Part(down, expert, num_experts)
                parts[both[1]] = _Part(up, expert, num_experts, slice(first, first + rows))
            first += rows
    source = dataclasses.replace(stored.source, shapes=shapes, read=_reader(stored.source, parts))
    return stored._replace(source=source, tensors=tensors)


def _counts(modules: Mapping[str, Module]) -> dict[str, int]:
    """Experts of each mixture, by what their names begin with."""
    counts: dict[str, int] = {}
    for name in modules:
        if match := _EXPERT.fullmatch(name):
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    return counts


def _stack_of(
    modules: Mapping[str, Module], experts: str, down: tuple[int, ...], up: tuple[int, ...]
) -> tuple[str, ...] | None:
    """The modules of an expert whose stack has factors of these shapes; None: it has none."""
    for endings in _STACKS:
        names = [f"{experts}.0.{ending}" for ending in endings]
        if all(name in modules for name in names):
            num_rows = sum(modules[name].shape[0] for name in names)
            if down[1:] == modules[names[0]].shape[1:] and up == (num_rows, *down[:1]):
                return endings
    return None


def _reader(source: TensorSource, parts: Mapping[str, _Part]) -> Read:
    @functools.lru_cache(maxsize=2)
    def fused(tensor: str) -> np.ndarray:
        return np.array(source.read(tensor, 0, source.shapes[tensor][0]))

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        if name not in parts:
            return source.read(name, start, stop, columns)
        part = parts[name]
        return part.of(fused(part.tensor))[start:stop, columns]

    return read
