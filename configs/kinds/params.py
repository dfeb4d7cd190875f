"""One declaration a parameter: random values, shardings, byte counts and checkpoint checks all
derive from it. No arrays here: `layers/params.py` makes them.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeAlias

from configs import precision
from configs.errors import InputError
from configs.precision import OUTLIERS

# Parameters by name, which may nest.
Declared: TypeAlias = "Mapping[str, Declaration]"
Declaration: TypeAlias = "ParamInfo | Declared | Sequence[Declaration]"
NORMS = "rms", "layer", "layer_unbiased", "layer_bare"  # of models
Formats = Mapping[str, tuple[str, ...]]  # path -> format, or one of each part of a stack


class Widths(Protocol):
    """What a layer kind is told of its model (`configs.model.ModelConfig`)."""

    @property
    def width(self) -> int:
        """D."""

    @property
    def norm(self) -> str:
        """One of `NORMS`: 'layer' has a bias, 'layer_bare' has nothing to learn."""

    @property
    def norm_offset(self) -> float:
        """Added to stored norm weights."""

    @property
    def dtype(self) -> str:
        """Of activations, and of weights whose format nothing else says."""


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """A parameter before it exists.

    Attributes:
        shape: matrices are [out, in], so that a product reads rows; those of experts, or of heads,
            lie one behind the other, [E, out, in].
        format: how it is stored, one of `configs.precision.FORMATS`.
        logical_axes: one name (or None) a dimension, for the rules that map names to mesh axes.
        init: 'normal' (variance 1 / fan-in), 'zeros', 'ones', or 'columns' (their numbers).
        stacked: rows of each of the parameters that are stacked into this one, which checkpoints
            may keep apart, all its matrices' rows being counted; (): it is one.
        kv_heads: key/value heads that all the stacked rows but the first part's belong to (all
            rows, where none are stacked): more chips than heads hold copies of them. 0: no rows do.
        is_table: rows are looked up, and no token is multiplied with it.
        is_bias: something is added of it, however many dimensions it has.
    """

    shape: tuple[int, ...]
    format: str
    logical_axes: tuple[str | None, ...]
    init: str = "normal"
    stacked: tuple[int, ...] = ()
    kv_heads: int = 0
    is_table: bool = False
    is_bias: bool = False

    @property
    def kv_rows(self) -> int:
        """Rows that belong to key/value heads."""
        if not self.kv_heads:
            return 0
        return sum(self.stacked[1:]) if self.stacked else self.shape[0]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether tokens are multiplied with it: norms, biases, the taps of a convolution and what
        each element of a state has of its own are no matrices.
        """
        is_elementwise = "taps" in self.logical_axes or "states" in self.logical_axes
        return len(self.shape) >= 2 and not self.is_bias and not is_elementwise

    @property
    def rows(self) -> int:
        """Rows of all its matrices."""
        return math.prod(self.shape[:-1])

    @property
    def in_rows(self) -> tuple[int, ...]:
        """Its shape where the matrices of a stack are one, whose rows follow one another; a vector
        stays one.
        """
        return in_rows(self.shape)

    @property
    def is_multiplied(self) -> bool:
        """Whether tokens are multiplied with it by `layers.linear`, which knows
        packed ones: no table.
        """
        return self.is_matrix and not self.is_table

    @property
    def num_experts(self) -> int | None:
        """Matrices of a mixture, of which a token meets a few; None: every token meets this one."""
        return self.shape[0] if self.logical_axes[0] == "experts" and self.is_matrix else None


def in_rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a stack of matrices as one matrix; a vector stays one."""
    return shape if len(shape) < 2 else (math.prod(shape[:-1]), shape[-1])


def device_format(info: ParamInfo, platform: str) -> str:
    """How a parameter lies on a device: on a TPU norms and biases are float32, in which they are
    used, since converting one is an operation of its own in every step there.
    """
    is_converted = platform == "tpu" and not info.is_matrix and info.format != "int32"
    return "float32" if is_converted else info.format


def norm(model: Widths, width: int, axis: str | None) -> Declaration:
    """Declaration of the model's norm over [width], with a layer norm's bias beside its weight; at
    random it changes nothing: weight + offset = 1 for the offsets of 0 and 1 that families have.

    Raises:
        InputError: the model's norms have nothing to learn.
    """
    if model.norm == "layer_bare":
        raise InputError("norms without weights stand around mixers and feed-forwards alone")
    scale = ParamInfo((width,), model.dtype, (axis,), "zeros" if model.norm_offset else "ones")
    if model.norm != "layer":
        return scale
    return {"weight": scale, "bias": ParamInfo((width,), model.dtype, (axis,), "zeros")}


def around_part(model: Widths, name: str) -> dict[str, Declaration]:
    """Declaration by its name of a norm of the residual stream, if it has anything to learn."""
    return {} if model.norm == "layer_bare" else {name: norm(model, model.width, "embed")}


def leaves(
    declared: Declaration, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], ParamInfo]]:
    """(path, declaration) of every parameter."""
    if isinstance(declared, ParamInfo):
        yield path, declared
        return
    items = declared.items() if isinstance(declared, Mapping) else enumerate(declared)
    for name, node in items:
        yield from leaves(node, (*path, str(name)))


def _with_outliers(declared: ParamInfo) -> dict[str, ParamInfo]:
    """A matrix of which some features are multiplied apart: these columns of it, which they are,
    and the rest, where they are 0.
    """
    *axes, inner = declared.logical_axes
    *rows, _ = declared.shape
    return {
        "int8": dataclasses.replace(declared, format="w8a8"),
        "outliers": dataclasses.replace(
            declared, format="bfloat16", shape=(*rows, OUTLIERS), logical_axes=(*axes, None)
        ),
        "features": ParamInfo((OUTLIERS,), "int32", (inner,), "zeros"),
    }


def with_formats(declared: Declared, formats: Formats) -> Declared:
    """The declaration with parameters in formats of their own; a stack whose parts have different
    ones becomes a tuple of its parts, and a matrix in `llm_int8` its three parts by name.
    """
    return {name: _with_formats(node, formats, (name,)) for name, node in declared.items()}


def check_formats(declared: Declared, formats: Formats) -> None:
    """Refuses formats that parameters of a model cannot have.

    Raises:
        InputError: naming the path.
    """
    infos = {"/".join(path): info for path, info in leaves(declared)}
    for path, names in formats.items():
        if path not in infos:
            raise InputError(f"model.formats names {path!r}, which is no parameter")
        info = infos[path]
        if len(info.shape) > 2 and len(set(names)) > 1:
            raise InputError(f"model.formats names several formats for the matrices of {path}")
        if len(names) not in {1, len(info.stacked)}:
            raise InputError(f"model.formats names {len(names)} formats for the parts of {path}")
        for format in map(precision.get, names):
            format.check_rows(info.shape[-1], path)
        if "llm_int8" in names and (len(info.shape) > 2 or len(set(names)) > 1):
            raise InputError(f"model.formats: {path} is no one matrix: w8a8, not llm_int8")


def _with_formats(declared: Declaration, formats: Formats, path: tuple[str, ...]) -> Declaration:
    if isinstance(declared, ParamInfo):
        part_formats = formats.get("/".join(path), (declared.format,))
        if len(set(part_formats)) == 1:
            format = part_formats[0]
            if format == "llm_int8":
                return _with_outliers(declared)
            return dataclasses.replace(declared, format=format)
        parts = []
        for part, (rows, format) in enumerate(zip(declared.stacked, part_formats, strict=True)):
            shape, kv_heads = (rows, *declared.shape[1:]), declared.kv_heads if part else 0
            parts.append(
                dataclasses.replace(
                    declared, shape=shape, format=format, stacked=(), kv_heads=kv_heads
                )
            )
        return tuple(parts)
    if isinstance(declared, Mapping):
        return {
            name: _with_formats(node, formats, (*path, name)) for name, node in declared.items()
        }
    return tuple(_with_formats(n, formats, (*path, str(i))) for i, n in enumerate(declared))
