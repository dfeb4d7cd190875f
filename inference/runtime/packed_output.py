"""A step's outputs as one array, so that they leave the device in one copy."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inference.scheduling.step_output import StepOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedOutput:
    """The fields of a `StepOutput`, one behind the other; then those of the next data shard."""

    words_X: Any  # i32[X]: integers, the bits of floats, 0 and 1
    layout: tuple[tuple[tuple[int, ...], str], ...] = dataclasses.field(metadata={"static": True})


def pack(output: StepOutput[jax.Array]) -> PackedOutput:
    """Fields of int32, float32 or bool; inside of a program."""
    fields = [getattr(output, field.name) for field in dataclasses.fields(output)]
    words_X = jnp.concatenate([_words(x).ravel() for x in fields])
    return PackedOutput(words_X, tuple((x.shape, str(x.dtype)) for x in fields))


def unpack(packed: PackedOutput) -> StepOutput[np.ndarray]:
    """Waits for the fields and returns them as views where possible, data shards joined."""
    sizes = [math.prod(shape) for shape, _ in packed.layout]
    words_SX = np.asarray(packed.words_X).reshape(-1, sum(sizes))
    arrays, start = [], 0
    for (shape, dtype), size in zip(packed.layout, sizes, strict=True):
        part = words_SX[:, start : start + size].reshape(len(words_SX) * shape[0], *shape[1:])
        arrays.append(part != 0 if dtype == "bool" else part.view(dtype))
        start += size
    return StepOutput(*arrays)


def _words(x: jax.Array) -> jax.Array:
    is_float = x.dtype == jnp.float32
    return jax.lax.bitcast_convert_type(x, jnp.int32) if is_float else x.astype(jnp.int32)
