"""What Hopper kernels (Pallas, Mosaic GPU) read into registers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

_TAKES_INDEX = jax.__version_info__ < (0, 11)  # beside the reference; later it is deprecated
_load: Callable[..., jax.Array]
_load = functools.partial(plgpu.load, idx=None) if _TAKES_INDEX else plgpu.load


def load(ref: Any, layout: Any, interpret: object) -> jax.Array:
    """Reads a reference of device or shared memory by the threads that use it.

    Args:
        layout: of the array in registers, as `plgpu.Layout`; None: the compiler chooses it.
    """
    return ref[...] if interpret else _load(ref, layout=layout, optimized=False)
