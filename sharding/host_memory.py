"""Arrays that leave their devices for the host's memory, and come back as they lay."""

import dataclasses
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

T = TypeVar("T")
_Index = tuple[tuple[int | None, int | None], ...]  # of a shard, in the whole array


@dataclasses.dataclass(frozen=True)
class HostArray:
    """What this process holds of an array; copies of one part are kept once."""

    shape: tuple[int, ...]
    sharding: Sharding
    parts: dict[_Index, np.ndarray]


def offload(tree: T) -> T:
    """Copies of a pytree's arrays as `HostArray`s. The devices' memory is free once nobody refers
    to the arrays themselves.
    """
    return jax.tree.map(_offload, tree)


def restore(tree: T) -> T:
    """The arrays of which `offload` made copies, on their devices."""
    return jax.tree.map(_restore, tree, is_leaf=lambda node: isinstance(node, HostArray))


def _offload(array: jax.Array) -> HostArray:
    shards = {_key(shard.index): shard for shard in array.addressable_shards}
    parts = {key: np.array(shard.data) for key, shard in shards.items()}
    return HostArray(array.shape, array.sharding, parts)


def _restore(host: HostArray) -> jax.Array:
    indices = host.sharding.addressable_devices_indices_map(host.shape)
    shards = [
        jax.device_put(host.parts[_key(index or ())], device, may_alias=False)
        for device, index in indices.items()
    ]
    return jax.make_array_from_single_device_arrays(host.shape, host.sharding, shards)


def _key(index: tuple[slice, ...]) -> _Index:
    return tuple((part.start, part.stop) for part in index)
