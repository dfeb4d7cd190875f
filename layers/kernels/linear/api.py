"""The implementations of products with weights, and which one a configuration gets."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from configs.engine import Config
from configs.errors import InputError
from configs.kinds.params import ParamInfo
from layers import params as parameters
from layers.kernels.cpu import library
from layers.kernels.device import target_device
from layers.kernels.linear import packed
from layers.params import Params


def choose(config: Config) -> str:
    """The implementation that `engine.linear` names; None: 'ffi_cpu' where it can run.

    Raises:
        InputError: the named implementation cannot run here.
    """
    platform, name = target_device().platform, config.engine.linear
    reason = None
    if platform != "cpu":
        reason = f"runs on CPUs, not on {platform}"
    elif not library.is_loaded():
        reason = "needs the native library, which is not there"
    if name == "ffi_cpu" and reason is not None:
        raise InputError(f"engine.linear=ffi_cpu {reason}; 'reference' runs anywhere")
    return name or ("reference" if reason else "ffi_cpu")


def placement(config: Config) -> Callable[[ParamInfo, np.ndarray], Any]:
    """What makes a leaf of a parameter's values (or blocks), as the chosen implementation reads it:
    (info, values) -> leaf.
    """

    def place(info: ParamInfo, values: np.ndarray) -> Any:
        if info.format in packed.BLOCKS:
            return packed.pack_blocks(values, info.format, info.shape[-1])
        packs = config.engine.linear == "ffi_cpu" and info.is_multiplied
        return packed.pack(values) if packs else jax.device_put(values)

    return place


def abstract(config: Config, infos: Any) -> Any:
    """Shapes and dtypes of what `placement` makes of a declaration's values."""

    def leaf(info: ParamInfo) -> Any:
        is_block = info.format in packed.BLOCKS
        if is_block or (config.engine.linear == "ffi_cpu" and info.is_multiplied):
            return packed.abstract(info.shape, info.format)
        return jax.ShapeDtypeStruct(info.shape, info.format)

    return jax.tree.map(leaf, infos, is_leaf=parameters.is_info)


def pack_params(config: Config, params: Params, infos: Any) -> Params:
    """Parameters as the chosen implementation reads them; those that are so already stay.

    Raises:
        InputError: they are packed, and XLA's products are chosen.
    """
    place = placement(config)

    def placed(info: ParamInfo, leaf: Any) -> Any:
        if packed.is_packed(leaf) and config.engine.linear != "ffi_cpu":
            raise InputError("packed parameters go with engine.linear=ffi_cpu only")
        return leaf if packed.is_packed(leaf) else place(info, leaf)

    return jax.tree.map(placed, infos, params, is_leaf=parameters.is_info)
