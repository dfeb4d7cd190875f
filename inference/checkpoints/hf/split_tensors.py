"""Tensors that a family stores in one piece, or in another order, as the matrices that we stack: of
each head (DeepSeek's way out of latent vectors) or of each expert (gpt-oss). And back.
"""

import dataclasses
from collections.abc import Callable, Iterator
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
    parts: dict[str, Part] = {}
    for tensor, stored, own in _wholes(config):
        shape = source.shapes.get(tensor)
        if shape is not None and shape != stored:
            raise InputError(
                f"{source.label}: {shown(tensor)} is {list(shape)}; expected {list(stored)}"
            )
        if shape is not None:
            parts |= own()
    if not parts:
        return source
    whole = {part.tensor for part in parts.values()}
    shapes = {name: shape for name, shape in source.shapes.items() if name not in whole}
    shapes |= {name: part.shape for name, part in parts.items()}
    dtypes = {name: source.dtypes.get(part.tensor, source.dtype) for name, part in parts.items()}

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        if name not in parts:
            return source.read(name, start, stop, columns)
        return parts[name].read(source)[start:stop, columns]

    return dataclasses.replace(source, shapes=shapes, read=read, dtypes={**source.dtypes, **dtypes})


def parts_of(config: ModelConfig) -> dict[str, Part]:
    """All parts, by the names that stand for them."""
    return {name: part for _, _, own in _wholes(config) for name, part in own().items()}


# A tensor, its shape, and what makes its parts.
_Whole = tuple[str, tuple[int, ...], Callable[[], dict[str, Part]]]


def _wholes(config: ModelConfig) -> Iterator[_Whole]:
    for index, layer in enumerate(config.layers):
        prefix = f"{names.FAMILIES[config.family].layers}.{index}"
        if isinstance(layer.mixer, Latent):
            yield _of_heads(f"{prefix}.self_attn.kv_b_proj", layer.mixer)
        if config.family == "gpt_oss" and isinstance(layer.ffn, Experts):
            yield from _of_experts(f"{prefix}.mlp.experts", layer.ffn, config.width)


def _of_heads(name: str, kind: Latent) -> _Whole:
    """A head's rows: its keys' elements, then its values'."""
    H, V, C = kind.nope_width, kind.value_width, kind.rank
    tensor, stored = f"{name}.weight", (kind.num_heads * (H + V), C)

    def parts() -> dict[str, Part]:
        found = {}
        for head in range(kind.num_heads):
            first = head * (H + V)
            keys, values = slice(first, first + H), slice(first + H, first + H + V)
            found[f"{name}.{head}.key"] = Part(tensor, stored, (C, H), keys, transposed=True)
            found[f"{name}.{head}.value"] = Part(tensor, stored, (V, C), values)
        return found

    return tensor, stored, parts


def _of_experts(name: str, kind: Experts, width: int) -> Iterator[_Whole]:
    """Matrices [in, out], in which gates and what they meet alternate."""
    E, D, F = kind.num_experts, width, kind.width
    gate_up, down, bias = f"{name}.gate_up_proj", f"{name}.down_proj", f"{name}.gate_up_proj_bias"

    def halves() -> dict[str, Part]:
        return {
            f"{gate_up}.{expert}.{half}": Part(
                gate_up, (E, D, 2 * F), (F, D), slice(expert, expert + 1),
                slice(first, None, 2), transposed=True,
            )
            for expert in range(E) for first, half in enumerate(("gate", "up"))
        }  # fmt: skip

    def downs() -> dict[str, Part]:
        return {
            f"{down}.{expert}": Part(
                down, (E, F, D), (D, F), slice(expert, expert + 1), transposed=True
            )
            for expert in range(E)
        }

    def ordered() -> dict[str, Part]:
        order = np.arange(2 * F).reshape(F, 2).T.ravel()
        return {f"{bias}.ordered": Part(bias, (E, 2 * F), (2 * E, F), slice(0, E), order)}

    yield gate_up, (E, D, 2 * F), halves
    yield down, (E, F, D), downs
    yield bias, (E, 2 * F), ordered
