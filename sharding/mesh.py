"""The devices of a mesh, and arrays that lie on them.

The step runs on each chip with that chip's own arrays (`jax.shard_map`). To JAX these are parts of
one array, one behind the other along the first axis, whatever axis of the parameter or of the cache
they divide.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from configs.errors import InputError
from configs.mesh import Mesh

AXES = ("data", "expert", "model")  # neighbours along `model` exchange most
EVERY_CHIP = PartitionSpec(AXES)
EACH_GROUP = PartitionSpec(AXES[:2])  # equal along `model`
ALIKE = PartitionSpec()


def provide(mesh: Mesh) -> None:
    """Has a CPU stand for as many chips as a mesh takes; before JAX looks for devices.

    Raises:
        InputError: as `of`, but for their number.
    """
    _check(mesh)
    asked: int = getattr(jax.config, "jax_num_cpu_devices")  # noqa: B009, mypy does not know it
    if mesh.num_chips > max(1, asked):
        jax.config.update("jax_num_cpu_devices", mesh.num_chips)


def of(mesh: Mesh, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh | None:
    """JAX's mesh, of the first of these devices (None: JAX's own); None for one chip.

    Raises:
        InputError: there are fewer, or sequences or experts would be divided, which is not there
            yet.
    """
    _check(mesh)
    devices = jax.devices() if devices is None else devices
    if mesh.num_chips > len(devices):
        raise InputError(f"mesh {mesh} takes {mesh.num_chips} chips, here are {len(devices)}")
    if mesh.num_chips == 1:
        return None
    chips = np.array(devices[: mesh.num_chips]).reshape(mesh.data, mesh.expert, mesh.model)
    return jax.sharding.Mesh(chips, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _check(mesh: Mesh) -> None:
    if mesh.num_groups > 1:
        raise InputError(f"mesh {mesh}: only `model` divides a step yet, as in mesh.model=2")


def put(mesh: jax.sharding.Mesh, spec: PartitionSpec, make_part: Callable[[int, int], Any]) -> Any:
    """A pytree of arrays over a mesh.

    Args:
        mesh: the devices.
        spec: `EVERY_CHIP`, `EACH_GROUP`, `ALIKE`, or another that divides the first axis only.
        make_part: (group, chip along `model`) -> the pytree that this chip holds.
    """
    parts = []
    for index, device in np.ndenumerate(mesh.devices):
        group = index[0] * mesh.shape["expert"] + index[1]
        with jax.default_device(device):  # another would hold two for a while
            parts.append(jax.device_put(make_part(group, index[2]), device))
    sharding = NamedSharding(mesh, spec)
    times = num_parts(mesh, spec)

    def joined(*arrays: jax.Array) -> jax.Array:
        first = arrays[0].shape
        shape = (first[0] * times, *first[1:])
        return jax.make_array_from_single_device_arrays(shape, sharding, list(arrays))

    return jax.tree.map(joined, *parts)


def over(
    mesh: jax.sharding.Mesh | None, function: Callable[..., Any], given: Any, returned: Any
) -> Callable[..., Any]:
    """The function on each chip, with that chip's parts of arrays; without a mesh, itself.

    Args:
        mesh: the devices.
        function: of a chip's arrays.
        given, returned: specs of the arguments and results.
    """
    if mesh is None:
        return function
    found: Callable[..., Any] = jax.shard_map(
        function, mesh=mesh, in_specs=given, out_specs=returned, check_vma=False
    )
    return found


def spread(mesh: jax.sharding.Mesh | None, parts: Sequence[Any], specs: Sequence[Any]) -> Any:
    """Shapes of arrays over a mesh, of the shapes of a chip's parts."""
    if mesh is None:
        return tuple(parts)

    def whole(spec: PartitionSpec) -> Callable[[Any], jax.ShapeDtypeStruct]:
        times, sharding = num_parts(mesh, spec), NamedSharding(mesh, spec)
        return lambda leaf: jax.ShapeDtypeStruct(
            (leaf.shape[0] * times, *leaf.shape[1:]), leaf.dtype, sharding=sharding
        )

    return tuple(jax.tree.map(whole(spec), part) for part, spec in zip(parts, specs, strict=True))


def num_parts(mesh: jax.sharding.Mesh, spec: PartitionSpec) -> int:
    """Parts that a spec divides the first axis into."""
    names = (spec[0] if isinstance(spec[0], tuple) else (spec[0],)) if len(spec) else ()
    return math.prod(mesh.shape[name] for name in names)
