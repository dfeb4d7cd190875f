"""Floats of few bits in groups whose scales have eight: NVFP4, MXFP4 and MXFP8."""

import ml_dtypes
import numpy as np

from configs.errors import InputError, shown
from configs.precision import LARGEST_FP8
from inference.checkpoints.hf.quantized.layouts import Module, Values
from layers import quantized
from layers.quantized import Groups

# Of names: the codes, their scales, and one of the tensor, which multiplies these or divides them.
WEIGHTS = "weight_packed", "weight"
_SCALE, _MULTIPLIER, _DIVISOR = "weight_scale", "weight_scale_2", "weight_global_scale"
_ACTIVATIONS = "input_scale", "input_global_scale"
ENDINGS = (*WEIGHTS, _SCALE, _MULTIPLIER, _DIVISOR, *_ACTIVATIONS)
_NO_NUMBER = 255  # of a power of two


def shape(module: Module) -> tuple[int, int]:
    """(F, D); raises an `InputError` if a tensor is not as the scheme has it."""
    scheme, codes = module.scheme, _codes(module)
    stored = module.shape(codes)
    if len(stored) != 2:
        raise InputError(f"{module.source.label}: {module.name}.{codes} is no matrix")
    module.need(codes, stored, dtype="uint8" if scheme.bits == 4 else "float8_e4m3fn")
    rows, width = stored[0], stored[1] * 8 // scheme.bits
    count = module.groups(width)
    types = ("uint8", "float8_e8m0fnu") if scheme.has_powers else ("float8_e4m3fn",)
    stored_type = module.source.dtypes.get(f"{module.name}.{_SCALE}", "")
    module.need(_SCALE, (rows, count), dtype=stored_type if stored_type in types else types[0])
    if scheme.has_tensor_scale:
        if module.has(_MULTIPLIER) == module.has(_DIVISOR):
            raise InputError(
                f"{module.source.label}: {shown(module.name)} needs one of {_MULTIPLIER} and "
                f"{_DIVISOR} as {scheme.described}"
            )
        module.need(_tensor_scale(module), (), (1,), (1, 1))
    return rows, width


def values(module: Module, start: int, stop: int) -> Values:
    """Some rows."""
    codes = module.read(_codes(module), slice(start, stop))
    stored = module.read(_SCALE, slice(start, stop))
    scheme, of_rows = module.scheme, None
    if scheme.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
    if scheme.has_powers:
        exponents = stored.view(np.uint8)
        if (exponents == _NO_NUMBER).any():
            raise InputError(
                f"{module.source.label}: {shown(f'{module.name}.{_SCALE}')} holds {_NO_NUMBER}, "
                "which is no power of two"
            )
        scale_FG = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)
    else:
        scale_FG = stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        of_rows = np.full(len(codes), _whole(module), np.float32)
    rows = Scaled(codes, scale_FG, np.zeros(scale_FG.shape, np.int8), None, of_rows)
    largest = quantized.E2M1.max() if scheme.bits == 4 else LARGEST_FP8
    rows.require_finite(f"{module.source.label}: {shown(f'{module.name}.{_SCALE}')}", largest)
    return rows


def _whole(module: Module) -> np.float32:
    """What multiplies all scales of a tensor; raises an `InputError` if it is no finite number."""
    ending = _tensor_scale(module)
    stored = np.asarray(module.read(ending), np.float32).ravel()[0]
    with np.errstate(divide="ignore", over="ignore"):
        whole = np.float32(1) / stored if ending == _DIVISOR else stored
    if not (np.isfinite(stored) and np.isfinite(whole)):
        valid = "a number but 0, with a finite inverse" if ending == _DIVISOR else "a finite number"
        name = shown(f"{module.name}.{ending}")
        raise InputError(f"{module.source.label}: {name} is {stored:g}; valid: {valid}")
    return np.float32(whole)


class Scaled(Values):
    """Floats, their groups' scales, and what multiplies these of each row."""

    def numbers(self) -> np.ndarray:
        return quantized.numbers(self._format, self._groups)

    def blocks(self, format: str, repeats: int) -> np.ndarray:
        return quantized.pack(format, self._groups)

    @property
    def _groups(self) -> Groups:
        return Groups(self.q_FD, self.scale_FG, None, self.row_F)

    @property
    def _format(self) -> str:
        if self.row_F is not None:
            return "nvfp4"
        return "mxfp4" if self.q_FD.dtype == np.uint8 else "mxfp8"


def _codes(module: Module) -> str:
    return next((ending for ending in WEIGHTS if module.has(ending)), WEIGHTS[0])


def _tensor_scale(module: Module) -> str:
    return _DIVISOR if module.has(_DIVISOR) else _MULTIPLIER
