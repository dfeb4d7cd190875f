"""Weights of few bits as blocks of bytes: what calibration makes, checkpoints keep and devices get.

A row of D elements is its groups, one behind the other (`configs/precision.py`); a format without
groups has one. A group is

    scale       float32 (MXFP4: a byte e, for 2^(e - 127))
    zero point  a byte, where the format is asymmetric
    integers    of four bits: byte k has element k low and element k + n / 2 of n high;
                of three: byte k has the lower two bits of elements k, k + n / 4, k + n / 2 and
                k + 3 n / 4 from its lowest bit on, then byte k has the upper bit of elements k,
                k + n / 8, ...; of eight: int8 (fp8: e4m3)

and stands for scale * (integer - zero), where a symmetric format's zero is half of its integers'
range, and int8's, whose integers have signs, 0. MXFP4 and NVFP4 have e2m1 instead of integers. Of
NVFP4 the scale is an e4m3, and the row begins with a float32 that multiplies all of them. Of
`fp8_block` the last group of a row may have fewer numbers.
"""

import dataclasses

import ml_dtypes
import numpy as np

from configs.precision import FORMATS, LARGEST_FP8, OURS, ROW_FORMATS, Format

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # and the same below 0, from 8 on
_SCALE_BYTES = 4
LEAST_SCALE = 2.0**-126  # whose inverse is a float32
_TOGETHER = 1 << 16  # numbers that are rounded at a time: they stay in a processor's cache
_FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class Groups:
    """The integers, scales and zero points of a matrix's blocks.

    Attributes:
        q_FD: stored integers: uint8 from 0 on of three and four bits, and of e2m1's codes; int8 of
            eight bits; float8_e4m3fn of fp8.
        scale_FG: float32.
        zero_FG: uint8 zero points, None where the format is symmetric.
        row_F: float32, what multiplies all scales of a row, None where the format has none.
    """

    q_FD: np.ndarray
    scale_FG: np.ndarray
    zero_FG: np.ndarray | None = None
    row_F: np.ndarray | None = None

    @property
    def factor_FG(self) -> np.ndarray:
        """What a group's elements are multiplied with: float32."""
        return self.scale_FG if self.row_F is None else self.scale_FG * self.row_F[:, None]


def pack(format: str, groups: Groups) -> np.ndarray:
    """Blocks uint8 [F, bytes of a row]; raises ValueError if parts do not go with the format."""
    info = _checked(format)
    (F, D), G = groups.q_FD.shape, groups.scale_FG.shape[1]
    size = info.block_in(D)
    if _num_groups(info, D) != G or groups.scale_FG.shape[0] != F:
        raise ValueError(f"{groups.scale_FG.shape} scales do not go with {(F, D)} of {format}")
    if (groups.zero_FG is not None) != info.asymmetric:
        raise ValueError(f"{format} {'needs' if info.asymmetric else 'has no'} zero points")
    if (groups.row_F is not None) != (info.row_bits > 0):
        raise ValueError(f"{format} {'needs' if info.row_bits else 'has no'} scales of rows")
    parts = [_scale_bytes(format, groups.scale_FG)]
    if groups.zero_FG is not None:
        parts.append(groups.zero_FG.astype(np.uint8)[..., None])
    q_FGX = _padded(groups.q_FD, G * size).reshape(F, G, size)
    parts.append(_packed(q_FGX, info.bits))
    blocks_FX = np.concatenate(parts, axis=-1).reshape(F, -1)
    if groups.row_F is not None:
        whole = np.ascontiguousarray(groups.row_F, np.float32).view(np.uint8)
        blocks_FX = np.concatenate([whole.reshape(F, _SCALE_BYTES), blocks_FX], axis=1)
    return blocks_FX[:, : info.row_bytes(D)]


def unpack(format: str, blocks_FX: np.ndarray, width: int) -> Groups:
    """The inverse of `pack`; `width` is D. Raises ValueError if the bytes are not of such rows."""
    info = _checked(format)
    size, (F, num_bytes) = info.block_in(width), blocks_FX.shape
    G = _num_groups(info, width)
    if not G or num_bytes != info.row_bytes(width):
        raise ValueError(f"{num_bytes} bytes are not a row of {width} in {format}")
    row_F, head = None, info.row_bits // 8
    if head:
        row_F = np.ascontiguousarray(blocks_FX[:, :head]).view(np.float32)[:, 0]
    blocks = _padded(blocks_FX[:, head:], G * (info.row_bytes(size) - head)).reshape(F, G, -1)
    scale_FG = _scales_of_bytes(format, blocks)
    first = (info.scale_bits - 8 * info.asymmetric) // 8
    zero_FG = blocks[..., first] if info.asymmetric else None
    q_FD = _unpacked(blocks[..., first + info.asymmetric :], info.bits).reshape(F, -1)[:, :width]
    if info.bits == 8:
        q_FD = np.ascontiguousarray(q_FD).view(_FLOAT8 if "fp8" in format else np.int8)
    return Groups(q_FD, scale_FG, zero_FG, row_F)


def _num_groups(info: Format, width: int) -> int:
    """Groups of a row; 0 where they do not divide it."""
    size = info.block_in(width)
    return -(-width // size) if info.rows > 1 or width % size == 0 else 0


def _padded(values_FX: np.ndarray, width: int) -> np.ndarray:
    """Rows with zeros behind them, up to so many."""
    missing = width - values_FX.shape[1]
    return np.pad(values_FX, [(0, 0), (0, missing)]) if missing else values_FX


def numbers(format: str, groups: Groups) -> np.ndarray:
    """What groups stand for: float32 [F, D]."""
    info = _checked(format)
    (F, D), G = groups.q_FD.shape, groups.scale_FG.shape[1]
    if is_e2m1(format):
        value_FD = np.concatenate([E2M1, -E2M1])[groups.q_FD]
    else:
        value_FD = groups.q_FD.astype(np.float32)
    value_FGX = _padded(value_FD, G * info.block_in(D)).reshape(F, G, -1)
    if groups.zero_FG is not None:
        value_FGX = value_FGX - groups.zero_FG[..., None].astype(np.float32)
    elif info.bits < 8 and not is_e2m1(format):
        value_FGX = value_FGX - np.float32(1 << (info.bits - 1))
    values_FGX: np.ndarray = value_FGX * groups.factor_FG[..., None]
    return values_FGX.reshape(F, -1)[:, :D]


def is_e2m1(format: str) -> bool:
    """Whether elements are e2m1's codes."""
    return "fp4" in format


def has_powers(format: str) -> bool:
    """Whether scales are powers of two, stored in a byte."""
    return format.startswith("mx")


def dequantize(format: str, blocks_FX: np.ndarray, width: int) -> np.ndarray:
    """What blocks stand for, GGUF's too: float32 [F, width], or of a stack likewise."""
    shape = *blocks_FX.shape[:-1], width
    rows = np.ascontiguousarray(blocks_FX).reshape(-1, blocks_FX.shape[-1])
    if format in ROW_FORMATS:
        return numbers(format, unpack(format, rows, width)).reshape(shape)
    import gguf

    kind = gguf.GGMLQuantizationType[format.upper()]
    # One row of many blocks: the library works by 16 rows, 10 x slower when they are short.
    return gguf.dequantize(rows.reshape(1, -1), kind).reshape(shape)


def rounded(
    format: str, values_FD: np.ndarray, scale_FG: np.ndarray, zero_FG: np.ndarray | None = None
) -> Groups:
    """Each number as the nearest one of the format, for such scales (and zero points)."""
    info = _checked(format, OURS)
    (F, D), G = values_FD.shape, scale_FG.shape[1]
    ratio_FGX = values_FD.reshape(F, G, -1).astype(np.float32) * inverse(scale_FG)[..., None]
    if "fp8" in format:
        q = np.clip(ratio_FGX, -LARGEST_FP8, LARGEST_FP8).astype(_FLOAT8)
    elif format == "mxfp4":
        middles = (E2M1[1:] + E2M1[:-1]) / 2
        q = np.searchsorted(middles, np.abs(ratio_FGX)).astype(np.uint8)
        q |= (np.signbit(ratio_FGX) & (q > 0)).astype(np.uint8) << 3
    elif info.bits == 8:
        q = np.clip(np.rint(ratio_FGX), -127, 127).astype(np.int8)
    else:
        levels = 1 << info.bits
        zero = levels // 2 if zero_FG is None else zero_FG[..., None].astype(np.float32)
        q = np.clip(np.rint(ratio_FGX) + zero, 0, levels - 1).astype(np.uint8)
    return Groups(q.reshape(F, D), scale_FG, zero_FG)


def scales(
    format: str, values_FD: np.ndarray, clip: float | np.ndarray = 1.0
) -> tuple[np.ndarray, np.ndarray | None]:
    """Scales (and zero points) that span each group's numbers, from the least to the largest (of a
    symmetric format, as far below 0 as above): [F, G]. `clip` is the covered share of the span, of
    all groups or [F, G]; what lies beyond is clipped.
    """
    info = _checked(format, OURS)
    F, D = values_FD.shape
    values_FGX = values_FD.reshape(F, D // info.block_in(D), -1).astype(np.float32)
    if info.asymmetric:
        low_FG = np.minimum(values_FGX.min(-1), 0) * clip
        high_FG = np.maximum(values_FGX.max(-1), 0) * clip
        scale_FG = ((high_FG - low_FG) / np.float32((1 << info.bits) - 1)).astype(np.float32)
        return scale_FG, np.rint(-low_FG * inverse(scale_FG)).astype(np.uint8)
    top_FG = np.abs(values_FGX).max(-1) * np.float32(clip)
    if format == "mxfp4":  # the power of two below that of the largest, as OCP has it
        exponent = np.frexp(np.maximum(top_FG, np.float32(2.0**-120)))[1] - 1 - 2
        return np.ldexp(np.float32(1), exponent).astype(np.float32), None
    # Of few bits the largest number may lie half a step beyond what is above 0.
    largest = 127.0 if info.bits == 8 else ((1 << info.bits) - 1) / 2
    largest = LARGEST_FP8 if "fp8" in format else largest
    return (top_FG / np.float32(largest)).astype(np.float32), None


def inverse(scale_FG: np.ndarray) -> np.ndarray:
    """1 / scale; 0 where that is no float32."""
    is_there_FG = scale_FG >= LEAST_SCALE
    return np.divide(1, scale_FG, where=is_there_FG, out=np.zeros_like(scale_FG))


def quantize(format: str, values_FD: np.ndarray) -> np.ndarray:
    """Blocks of numbers, each rounded to the nearest: uint8 [F, bytes of a row], or of a stack
    [E, F, D] likewise. No more than some of them are ever there in float32.
    """
    rows = values_FD.reshape(-1, values_FD.shape[-1])
    step = max(1, _TOGETHER // rows.shape[1])
    chunks = []
    for start in range(0, len(rows), step):
        some = np.asarray(rows[start : start + step], np.float32)
        chunks.append(pack(format, rounded(format, some, *scales(format, some))))
    return np.concatenate(chunks).reshape(*values_FD.shape[:-1], -1)


def _checked(format: str, valid: tuple[str, ...] = ROW_FORMATS) -> Format:
    if format not in valid:
        raise ValueError(f"{format!r} is none of {', '.join(valid)}")
    return FORMATS[format]


def stored_scales(format: str, scale_FG: np.ndarray) -> np.ndarray:
    """Scales as blocks have them: exponents from -127 on or e4m3 as uint8, or float32."""
    if has_powers(format):
        return (np.frexp(scale_FG)[1] - 1 + 127).astype(np.uint8)
    if FORMATS[format].scale_bits == 8:
        return scale_FG.astype(_FLOAT8).view(np.uint8)
    return np.ascontiguousarray(scale_FG, np.float32)


def _scale_bytes(format: str, scale_FG: np.ndarray) -> np.ndarray:
    stored = stored_scales(format, scale_FG)
    return stored.view(np.uint8).reshape(*scale_FG.shape, -1)


def _scales_of_bytes(format: str, blocks_FGX: np.ndarray) -> np.ndarray:
    """Scales at the beginning of blocks: float32 [F, G]."""
    if has_powers(format):
        exponent_FG = blocks_FGX[..., 0].astype(np.int32) - 127
        return np.ldexp(np.float32(1), exponent_FG).astype(np.float32)
    if FORMATS[format].scale_bits == 8:
        return np.ascontiguousarray(blocks_FGX[..., 0]).view(_FLOAT8).astype(np.float32)
    return np.ascontiguousarray(blocks_FGX[..., :_SCALE_BYTES]).view(np.float32)[..., 0]


def _packed(q_FGX: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return np.ascontiguousarray(q_FGX).view(np.uint8)
    q_FGX = q_FGX.astype(np.uint8)
    if bits == 4:
        low, high = np.split(q_FGX, 2, axis=-1)
        return low | high << 4
    lower = sum(part << 2 * n for n, part in enumerate(np.split(q_FGX & 3, 4, axis=-1)))
    upper = sum(part << n for n, part in enumerate(np.split(q_FGX >> 2, 8, axis=-1)))
    return np.concatenate([lower, upper], axis=-1)


def _unpacked(bytes_FGX: np.ndarray, bits: int) -> np.ndarray:
    if bits == 8:
        return np.ascontiguousarray(bytes_FGX)
    if bits == 4:
        return np.concatenate([bytes_FGX & 15, bytes_FGX >> 4], axis=-1)
    count = bytes_FGX.shape[-1] * 2 // 3  # bytes of lower bits
    lower, upper = bytes_FGX[..., :count], bytes_FGX[..., count:]
    lower = np.concatenate([lower >> 2 * n & 3 for n in range(4)], axis=-1)
    upper = np.concatenate([upper >> n & 1 for n in range(8)], axis=-1)
    return lower | upper << 2
