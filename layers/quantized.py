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
range, and int8's, whose integers have signs, 0. MXFP4 has e2m1 instead of integers.
"""

import dataclasses

import ml_dtypes
import numpy as np

from configs.precision import FORMATS, LARGEST_FP8, OURS, Format

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
    """

    q_FD: np.ndarray
    scale_FG: np.ndarray
    zero_FG: np.ndarray | None = None


def pack(format: str, groups: Groups) -> np.ndarray:
    """Blocks uint8 [F, bytes of a row]; raises ValueError if parts do not go with the format."""
    info = _checked(format)
    (F, D), G = groups.q_FD.shape, groups.scale_FG.shape[1]
    size = info.block_in(D)
    if G * size != D or groups.scale_FG.shape[0] != F:
        raise ValueError(f"{groups.scale_FG.shape} scales do not go with {(F, D)} of {format}")
    if (groups.zero_FG is not None) != info.asymmetric:
        raise ValueError(f"{format} {'needs' if info.asymmetric else 'has no'} zero points")
    parts = [_scale_bytes(format, groups.scale_FG)]
    if groups.zero_FG is not None:
        parts.append(groups.zero_FG.astype(np.uint8)[..., None])
    parts.append(_packed(groups.q_FD.reshape(F, G, size), info.bits))
    return np.concatenate(parts, axis=-1).reshape(F, -1)


def unpack(format: str, blocks_FX: np.ndarray, width: int) -> Groups:
    """The inverse of `pack`; `width` is D. Raises ValueError if the bytes are not of such rows."""
    info = _checked(format)
    size, (F, num_bytes) = info.block_in(width), blocks_FX.shape
    if width % size or num_bytes != info.bytes_for(width, width):
        raise ValueError(f"{num_bytes} bytes are not a row of {width} in {format}")
    blocks = blocks_FX.reshape(F, width // size, -1)
    if format == "mxfp4":
        exponent_FG = blocks[..., 0].astype(np.int32) - 127
        scale_FG, first = np.ldexp(np.float32(1), exponent_FG).astype(np.float32), 1
    else:
        scale_FG = np.ascontiguousarray(blocks[..., :_SCALE_BYTES]).view(np.float32)[..., 0]
        first = _SCALE_BYTES
    zero_FG = blocks[..., first] if info.asymmetric else None
    q_FD = _unpacked(blocks[..., first + info.asymmetric :], info.bits).reshape(F, width)
    if info.bits == 8:
        q_FD = q_FD.view(_FLOAT8 if "fp8" in format else np.int8)
    return Groups(q_FD, scale_FG, zero_FG)


def numbers(format: str, groups: Groups) -> np.ndarray:
    """What groups stand for: float32 [F, D]."""
    info = _checked(format)
    (F, D), G = groups.q_FD.shape, groups.scale_FG.shape[1]
    if format == "mxfp4":
        value_FD = np.concatenate([E2M1, -E2M1])[groups.q_FD]
    else:
        value_FD = groups.q_FD.astype(np.float32)
    value_FGX = value_FD.reshape(F, G, -1)
    if groups.zero_FG is not None:
        value_FGX = value_FGX - groups.zero_FG[..., None].astype(np.float32)
    elif info.bits < 8 and format != "mxfp4":
        value_FGX = value_FGX - np.float32(1 << (info.bits - 1))
    values_FGX: np.ndarray = value_FGX * groups.scale_FG[..., None]
    return values_FGX.reshape(F, D)


def dequantize(format: str, blocks_FX: np.ndarray, width: int) -> np.ndarray:
    """What blocks stand for, GGUF's too: float32 [F, width], or of a stack likewise."""
    shape = *blocks_FX.shape[:-1], width
    rows = np.ascontiguousarray(blocks_FX).reshape(-1, blocks_FX.shape[-1])
    if format in OURS:
        return numbers(format, unpack(format, rows, width)).reshape(shape)
    import gguf

    kind = gguf.GGMLQuantizationType[format.upper()]
    # One row of many blocks: the library works by 16 rows, 10 x slower when they are short.
    return gguf.dequantize(rows.reshape(1, -1), kind).reshape(shape)


def rounded(
    format: str, values_FD: np.ndarray, scale_FG: np.ndarray, zero_FG: np.ndarray | None = None
) -> Groups:
    """Each number as the nearest one of the format, for such scales (and zero points)."""
    info = _checked(format)
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
    info = _checked(format)
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


def _checked(format: str) -> Format:
    if format not in OURS:
        raise ValueError(f"{format!r} is none of {', '.join(OURS)}")
    return FORMATS[format]


def _scale_bytes(format: str, scale_FG: np.ndarray) -> np.ndarray:
    if format == "mxfp4":
        exponent_FG = np.frexp(scale_FG)[1] - 1 + 127
        return exponent_FG.astype(np.uint8)[..., None]
    whole = np.ascontiguousarray(scale_FG, np.float32)
    return whole.view(np.uint8).reshape(*scale_FG.shape, _SCALE_BYTES)


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
