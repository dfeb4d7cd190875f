"""Weights of few bits as others store them, as integers, scales and zero points of rows.

The tensors of a module are named by what is behind its name: `weight_packed` and `weight_scale`
(compressed-tensors), `qweight`, `qzeros` and `scales` (AWQ, GPTQ), `weight` and `weight_scale_inv`
(fp8). A layout says what they are and reads some rows of the matrix [F, D] that they stand for.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from configs.errors import InputError, shown
from configs.precision import FORMATS
from inference.checkpoints.hf.quantized import words
from inference.checkpoints.hf.quantized.schemes import Scheme
from inference.checkpoints.tensor_source import TensorSource
from layers import quantized
from layers.quantized import Groups

_OF_ACTIVATIONS = (
    "input_scale",
    "activation_scale",
    "qscale_act",
)  # constants, where these are rounded by one
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word the next of eight columns is


@dataclasses.dataclass(frozen=True)
class Values:
    """Some rows: integers as they are stored (uint8; int8 and e4m3 of eight bits; e2m1 of four),
    their groups' scales and zero points, each element's group, None where they follow one another,
    and what multiplies the scales of a row, None where nothing does.
    """

    q_FD: np.ndarray
    scale_FG: np.ndarray
    zero_FG: np.ndarray
    group_D: np.ndarray | None = None
    row_F: np.ndarray | None = None

    def numbers(self) -> np.ndarray:
        """What they stand for: float32 [F, D]."""
        width, count = self.q_FD.shape[1], self.scale_FG.shape[1]
        of_D = np.arange(width) // (width // count) if self.group_D is None else self.group_D
        centred_FD = self.q_FD.astype(np.float32) - self.zero_FG.astype(np.float32)[:, of_D]
        return centred_FD * self.scale_FG[:, of_D]

    def require_finite(self, label: str, largest: float) -> None:
        """Raises an `InputError` if a number is not finite because of its scale.

        Args:
            label: file and name of the scales.
            largest: the largest number without a scale; few scales are beyond what that allows.
        """
        limit = np.finfo(np.float32).max / largest
        with np.errstate(over="ignore", invalid="ignore"):
            row_F1 = np.ones((1, 1), np.float32) if self.row_F is None else self.row_F[:, None]
            if np.abs(self.scale_FG).max(initial=0) * np.abs(row_F1).max(initial=0) <= limit:
                return
            factor_FG = self.scale_FG * row_F1
            numbers_FGX = self.numbers().reshape(*factor_FG.shape, -1)
        is_far_FG = ~(np.abs(factor_FG) <= limit)  # so is what is no number
        is_wrong_FG = is_far_FG & ~np.isfinite(numbers_FGX).all(-1)
        if is_wrong_FG.any():
            raise InputError(
                f"{label} multiplies a group by {factor_FG[is_wrong_FG][0]:g}, and a number of it "
                f"is then not finite; valid: {limit:.4g} at most"
            )

    def blocks(self, format: str, repeats: int) -> np.ndarray:
        """Blocks of a format of ours that has so many groups for each of these."""
        width, size = self.q_FD.shape[1], FORMATS[format].block_in(self.q_FD.shape[1])
        both, count = (self.scale_FG, self.zero_FG), -(-width // size)
        scale_FG, zero_FG = (np.repeat(x_FG, repeats, axis=1)[:, :count] for x_FG in both)
        zeros = zero_FG.astype(np.uint8) if "_asym" in format else None
        codes_FD = self.q_FD.view(np.uint8) if format == "mxfp4" else self.q_FD
        return quantized.pack(format, Groups(codes_FD, scale_FG, zeros))


class Module(NamedTuple):
    """A module whose weight is stored in few bits."""

    source: TensorSource
    name: str
    scheme: Scheme

    def has(self, ending: str) -> bool:
        return f"{self.name}.{ending}" in self.source.shapes

    def need(self, ending: str, *shapes: tuple[int, ...], dtype: str | None = None) -> None:
        """Refuses a tensor of another shape than one of these, or of another type.

        Raises:
            InputError: it is missing, too.
        """
        shape = self.shape(ending)
        if shape not in shapes:
            expected = " or ".join(str(list(valid)) for valid in shapes)
            name = shown(f"{self.name}.{ending}")
            raise InputError(
                f"{self.source.label}: {name} is {list(shape)}; expected {expected} for "
                f"{self.scheme.described}"
            )
        self.need_type(ending, dtype)

    def need_type(self, ending: str, dtype: str | None) -> None:
        """Refuses a tensor of another type; None: of one that is no number's."""
        name = f"{self.name}.{ending}"
        stored = self.source.dtypes.get(name)
        powers = ("float8_e8m0fnu",) if self.scheme.is_float else ()
        is_number = stored in ("bfloat16", "float32", "float64", *powers)
        if (dtype is None and not is_number) or dtype not in (None, stored):
            raise InputError(
                f"{self.source.label}: {shown(name)} is {stored}; expected {dtype or 'numbers'}"
            )

    def shape(self, ending: str) -> tuple[int, ...]:
        """The shape of a tensor; raises an `InputError` if it is missing."""
        name = f"{self.name}.{ending}"
        if name not in self.source.shapes:
            raise InputError(
                f"{self.source.label}: tensor {shown(name)} is missing; {self.name} is stored as "
                f"{self.scheme.described}"
            )
        return self.source.shapes[name]

    def read(
        self, ending: str, rows: slice | None = None, columns: slice | None = None
    ) -> np.ndarray:
        name = f"{self.name}.{ending}"
        count = (self.source.shapes[name] or (1,))[0]
        first, last, _ = (rows or slice(None)).indices(count)
        return self.source.read(name, first, last, columns or slice(None))

    def groups(self, width: int) -> int:
        """The number of groups of a row; raises an `InputError` if they do not divide it."""
        size = self.scheme.group or width
        if width % size:
            raise InputError(
                f"{self.source.label}: {self.name} has rows of {width}, not a multiple of its "
                f"groups of {size}"
            )
        return width // size

    def in_order(self, ending: str, width: int) -> np.ndarray | None:
        """Each element's group; None where they follow one another.

        Raises:
            InputError: they do not, and nothing said so; or such a group is not there.
        """
        size = self.scheme.group or width
        if not self.has(ending):
            if self.scheme.has_order_in(width):
                self.shape(ending)
            return None
        self.need(ending, (width,), dtype="int32")
        group_D = self.read(ending)
        if np.array_equal(group_D, np.arange(width) // size):
            return None
        name = f"{self.source.label}: {self.name}.{ending}"
        if group_D.min() < 0 or group_D.max() >= width // size:
            raise InputError(f"{name} names a group that is not there")
        if not self.scheme.has_order:
            raise InputError(
                f"{name}: groups are in an order of their own, of which config.json says nothing "
                "(desc_act, actorder)"
            )
        return np.asarray(group_D)


class Layout(NamedTuple):
    """How the weight of a module is stored.

    Attributes:
        endings: of the names of its tensors, first that of the weight.
        shape: (module) -> (F, D), all shapes and types having been compared.
        values: (module, start, stop) -> these rows of it.
    """

    endings: tuple[str, ...]
    shape: Callable[[Module], tuple[int, int]]
    values: Callable[[Module, int, int], Values]


def _packed_shape(module: Module) -> tuple[int, int]:
    packed, bits = module.shape("weight_packed"), module.scheme.bits
    if len(packed) != 2:
        raise InputError(f"{module.source.label}: {module.name}.weight_packed is no matrix")
    rows, width = packed[0], packed[1] * words.WORD // bits
    if module.has("weight_shape"):
        module.need("weight_shape", (2,), dtype="int64")
        stated_rows, width = stated = module.read("weight_shape").tolist()
        if stated_rows != rows or packed[1] not in words.lengths(width, bits) or width < 1:
            raise InputError(
                f"{module.source.label}: {module.name}.weight_shape is {stated}, which "
                f"{list(packed)} words of {bits} bits are not"
            )
    module.need("weight_packed", packed, dtype="int32")
    count = module.groups(width)
    module.need("weight_scale", *_scale_shapes(module, rows, count))
    if not module.scheme.is_symmetric:
        shapes = ((length, count) for length in words.lengths(rows, bits))
        module.need("weight_zero_point", *shapes, dtype="int32")
    return rows, width


def _packed_values(module: Module, start: int, stop: int) -> Values:
    bits, (rows, width) = module.scheme.bits, _packed_shape(module)
    q_FD = words.unpack(module.read("weight_packed", slice(start, stop)), bits, width)
    scale_FG = _scales(module, start, stop)
    zero_FG = np.full(scale_FG.shape, 1 << (bits - 1), np.uint8)
    if not module.scheme.is_symmetric:
        packed_FG = module.read("weight_zero_point")
        zero_FG = words.unpack(packed_FG.T, bits, rows).T[start:stop]
    if bits == 8 and module.scheme.is_symmetric:
        q_FD, zero_FG = (q_FD ^ 128).view(np.int8), np.zeros(scale_FG.shape, np.int8)
    return Values(q_FD, scale_FG, zero_FG, module.in_order("weight_g_idx", width))


def _scale_shapes(module: Module, rows: int, count: int) -> tuple[tuple[int, ...], ...]:
    shared = module.scheme.shares_rows
    if shared is None:
        return (), (1,), (1, 1)
    if shared > 1:
        return ((-(-rows // shared), count),)
    return ((rows, count), (rows,)) if count == 1 else ((rows, count),)


def _scales(module: Module, start: int, stop: int, ending: str = "weight_scale") -> np.ndarray:
    shared = module.scheme.shares_rows
    if shared == 1:
        scales = module.read(ending, slice(start, stop))
        return np.asarray(scales, np.float32).reshape(stop - start, -1)
    shape = module.shape(ending)
    name = f"{module.name}.{ending}"
    whole = np.asarray(module.source.read(name, 0, shape[0] if shape else 1), np.float32)
    if shared is None:
        return np.full((stop - start, 1), whole.ravel()[0])
    return whole[np.arange(start, stop) // shared]


def _plain_shape(module: Module, scales: str = "weight_scale") -> tuple[int, int]:
    shape, scheme = module.shape("weight"), module.scheme
    if len(shape) != 2:
        raise InputError(f"{module.source.label}: {module.name}.weight is no matrix")
    module.need_type("weight", "float8_e4m3fn" if scheme.is_float else "int8")
    blocks = scheme.shares_rows is not None and scheme.shares_rows > 1
    # Blocks at the end of a row may reach beyond it.
    count = -(-shape[1] // (scheme.group or shape[1])) if blocks else module.groups(shape[1])
    module.need(scales, *_scale_shapes(module, shape[0], count))
    if not scheme.is_symmetric:
        module.need("weight_zero_point", *_scale_shapes(module, shape[0], count), dtype="int8")
    return shape[0], shape[1]


def _plain_values(module: Module, start: int, stop: int, scales: str = "weight_scale") -> Values:
    width = module.shape("weight")[1]
    q_FD = module.read("weight", slice(start, stop))
    scale_FG = _scales(module, start, stop, scales)
    zero_FG = np.zeros(scale_FG.shape, np.int8)
    if not module.scheme.is_symmetric:
        zero_FG = _scales(module, start, stop, "weight_zero_point")
    group_D = module.in_order("weight_g_idx", width)
    if group_D is None and module.scheme.group and width % module.scheme.group:
        group_D = np.arange(width) // module.scheme.group
    return Values(q_FD, scale_FG, zero_FG, group_D)


def _fp8_scales(module: Module) -> str:
    names = "weight_scale_inv", "weight_scale", "qscale_weight"  # the last of Mistral's own files
    return next(filter(module.has, names), names[0])


def _fp4_shape(module: Module) -> tuple[int, int]:
    packed = module.shape("weight")
    if len(packed) != 2:
        raise InputError(f"{module.source.label}: {module.name}.weight is no matrix")
    module.need("weight", packed, dtype="int8")
    rows, width = packed[0], 2 * packed[1]
    module.need("weight_scale_inv", (rows, module.groups(width)))
    return rows, width


def _fp4_values(module: Module, start: int, stop: int) -> Values:
    both = np.asarray(module.read("weight", slice(start, stop))).view(np.uint8)
    codes_FD = np.stack([both & 15, both >> 4], axis=-1).reshape(len(both), -1)
    scale_FG = _scales(module, start, stop, "weight_scale_inv")
    zero_FG = np.zeros(scale_FG.shape, np.int8)
    rows = Values(codes_FD.view(ml_dtypes.float4_e2m1fn), scale_FG, zero_FG)
    name = f"{module.name}.weight_scale_inv"
    rows.require_finite(f"{module.source.label}: {shown(name)}", quantized.E2M1.max())
    return rows


def _gptq_shape(module: Module) -> tuple[int, int]:
    bits, packed = module.scheme.bits, module.shape("qweight")
    if len(packed) != 2 or packed[0] * words.WORD % bits:
        raise InputError(
            f"{module.source.label}: {module.name}.qweight is {list(packed)}, no words of {bits} "
            "bits"
        )
    width, rows = packed[0] * words.WORD // bits, packed[1]
    module.need("qweight", packed, dtype="int32")
    count = module.groups(width)
    module.need("scales", (count, rows))
    module.need("qzeros", (count, words.num_words(rows, bits)), dtype="int32")
    return rows, width


def _gptq_values(module: Module, start: int, stop: int) -> Values:
    (rows, width), scheme = _gptq_shape(module), module.scheme
    columns = slice(start, stop)
    q_FD = words.unpack(module.read("qweight", columns=columns).T, scheme.bits, width)
    scale_FG = np.asarray(module.read("scales", columns=columns), np.float32).T
    stored_GF = words.unpack(module.read("qzeros"), scheme.bits, rows)[:, columns]
    # Those below 0 that are stored as the largest come back as 0.
    mask = np.uint8((1 << scheme.bits) - 1)
    zero_FG = ((stored_GF + np.uint8(scheme.zero_offset)) & mask).T
    if scheme.is_symmetric:
        _check_centred(module, stored_GF)
    if scheme.bits == 8 and scheme.is_symmetric:
        q_FD, zero_FG = (q_FD ^ 128).view(np.int8), np.zeros(scale_FG.shape, np.int8)
    return Values(q_FD, scale_FG, zero_FG, module.in_order("g_idx", width))


def _check_centred(module: Module, stored_GF: np.ndarray) -> None:
    """Refuses zero points, as they are stored, that are not in the middle of the integers."""
    offset = module.scheme.zero_offset
    expected = (1 << (module.scheme.bits - 1)) - offset
    wrong = stored_GF[stored_GF != expected]
    if not wrong.size:
        return
    format = "gptq, which stores zero points less 1" if offset else "gptq_v2"
    remedy = "sym=false"
    if offset and (wrong == expected + 1).all():
        remedy = "checkpoint_format=gptq_v2, if they are stored as they are"
    raise InputError(
        f"{module.source.label}: {module.name}.qzeros hold {wrong.flat[0]}; expected {expected}, "
        f"because config.json says sym=true and checkpoint_format={format}; it should say {remedy}"
    )


def _awq_shape(module: Module) -> tuple[int, int]:
    packed = module.shape("qweight")
    if len(packed) != 2:
        raise InputError(f"{module.source.label}: {module.name}.qweight is no matrix")
    width, rows = packed[0], packed[1] * len(_AWQ_ORDER)
    module.need("qweight", packed, dtype="int32")
    count = module.groups(width)
    module.need("scales", (count, rows))
    module.need("qzeros", (count, packed[1]), dtype="int32")
    return rows, width


def _awq_values(module: Module, start: int, stop: int) -> Values:
    per_word = len(_AWQ_ORDER)
    first, last = start // per_word, -(-stop // per_word)
    span = slice(start - first * per_word, stop - first * per_word)

    def columns(ending: str) -> np.ndarray:
        packed = module.read(ending, columns=slice(first, last))
        flat = words.unpack(packed, 4, packed.shape[1] * per_word)
        ordered = flat.reshape(len(flat), -1, per_word)[..., _AWQ_ORDER]
        return ordered.reshape(len(flat), -1)[:, span].T

    scale_FG = np.asarray(module.read("scales", columns=slice(start, stop)), np.float32).T
    return Values(columns("qweight"), scale_FG, columns("qzeros"))


LAYOUTS: dict[str, Layout] = {
    "packed": Layout(
        ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        _packed_shape,
        _packed_values,
    ),
    "plain": Layout(
        ("weight", "weight_scale", "weight_zero_point", "weight_g_idx", *_OF_ACTIVATIONS),
        _plain_shape,
        _plain_values,
    ),
    "fp8": Layout(
        ("weight", "weight_scale_inv", "weight_scale", "qscale_weight", *_OF_ACTIVATIONS),
        lambda module: _plain_shape(module, _fp8_scales(module)),
        lambda module, start, stop: _plain_values(module, start, stop, _fp8_scales(module)),
    ),
    "mxfp4": Layout(("weight", "weight_scale_inv"), _fp4_shape, _fp4_values),
    "gptq": Layout(("qweight", "qzeros", "scales", "g_idx"), _gptq_shape, _gptq_values),
    "awq": Layout(("qweight", "qzeros", "scales"), _awq_shape, _awq_values),
}
