"""Tensors that a family stores in one piece, or in another order, as the matrices that we stack: of
each head (DeepSeek's way out of latent vectors) or of each expert (gpt-oss). And back.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from configs.errors import InputError, shown
from configs.kinds.experts import Experts
from configs.kinds.latent import Latent
from configs.model import ModelConfig
from inference.checkpoints import names
from inference.checkpoints.tensor_source import TensorSource


@dataclasses.dataclass(frozen=True)
class Part:
    """A matrix, or a table, inside of a stored tensor.

    Attributes:
        tensor: its name, and `stored` the shape that it must have.
        shape: of the part.
        rows: of the tensor; of a stack, one matrix.
        columns: of the last axis, those that are taken, in their order; None: all of them.
        transposed: it is stored [in, out].
    """

    tensor: str
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    rows: slice
    columns: Any = None
    transposed: bool = False

    def read(self, source: TensorSource) -> np.ndarray:
        """All of it."""
        found = source.read(self.tensor, self.rows.start, self.rows.stop)
        found = found if self.columns is None else found[..., self.columns]
        return found.reshape(self.shape[::-1]).T if self.transposed else found.reshape(self.shape)

    def write(self, whole: np.ndarray, values: np.ndarray) -> None:
        """Its values into the tensor: the inverse of `read`."""
        target = whole[self.rows]
        columns = slice(None) if self.columns is None else self.columns
        values = values.T if self.transposed else values
        target[..., columns] = values.reshape(target[..., columns].shape)


def split(source: TensorSource, config: ModelConfig) -> TensorSource:
    """The source with parts in place of the tensors that hold them.

    Raises:
        InputError: such a tensor has another shape.
    """
    parts = parts_of(config)
    for part in parts.values():
        shape = source.shapes.get(part.tensor, part.stored)
        if shape != part.stored:
            raise InputError(
                f"{source.label}: {shown(part.tensor)} is {list(shape)}; "
                f"expected {list(part.stored)}"
            )
    whole = {part.tensor for part in parts.values()}
    shapes = {name: shape for name, shape in source.shapes.items() if name not in whole}
    shapes |= {n: part.shape for n, part in parts.items() if part.tensor in source.shapes}
    if len(shapes) == len(source.shapes):
        return source

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        if name not in parts:
            return source.read(name, start, stop, columns)
        return parts[name].read(source)[start:stop, columns]

    types = {
        n: source.dtypes[part.tensor] for n, part in parts.items() if part.tensor in source.dtypes
    }
    return dataclasses.replace(source, shapes=shapes, read=read, dtypes={**source.dtypes, **types})


def parts_of(config: ModelConfig) -> dict[str, Part]:
    """All parts, by the names that stand for them."""
    return dict(_parts(config))


def _parts(config: ModelConfig) -> Iterator[tuple[str, Part]]:
    for index, layer in enumerate(config.layers):
        prefix = f"{names.FAMILIES[config.family].layers}.{index}"
        if isinstance(layer.mixer, Latent):
            yield from _of_heads(f"{prefix}.self_attn.kv_b_proj", layer.mixer)
        if config.family == "gpt_oss" and isinstance(layer.ffn, Experts):
            yield from _of_experts(f"{prefix}.mlp.experts", layer.ffn, config.width)


def _of_heads(name: str, kind: Latent) -> Iterator[tuple[str, Part]]:
    """A head's rows: its keys' elements, then its values'."""
    H, C, each = kind.nope_width, kind.rank, kind.nope_width + kind.value_width
    stored = kind.num_heads * each, C
    for head in range(kind.num_heads):
        first, last = head * each, (head + 1) * each
        keys, values = slice(first, first + H), slice(first + H, last)
        yield f"{name}.{head}.key", Part(f"{name}.weight", stored, (C, H), keys, transposed=True)
        shape = kind.value_width, C
        yield f"{name}.{head}.value", Part(f"{name}.weight", stored, shape, values)


def _of_experts(name: str, kind: Experts, width: int) -> Iterator[tuple[str, Part]]:
    """Matrices [in, out], in which gates and what they meet alternate."""
    E, D, F = kind.num_experts, width, kind.width
    for expert in range(E):
        rows = slice(expert, expert + 1)
        for first, half in enumerate(("gate", "up")):
            yield (
                f"{name}.gate_up_proj.{expert}.{half}",
                Part(
                    f"{name}.gate_up_proj", (E, D, 2 * F), (F, D), rows, slice(first, None, 2), True
                ),
            )
        yield (
            f"{name}.down_proj.{expert}",
            Part(f"{name}.down_proj", (E, F, D), (D, F), rows, transposed=True),
        )
    order = np.arange(2 * F).reshape(F, 2).T.ravel()
    yield (
        f"{name}.gate_up_proj_bias.ordered",
        Part(f"{name}.gate_up_proj_bias", (E, 2 * F), (2 * E, F), slice(0, E), order),
    )
