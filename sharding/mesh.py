"""The devices of a mesh, and arrays that lie on them.

The step runs on each chip with that chip's own arrays (`jax.shard_map`). To JAX these are parts of
one array, along the axes that a `PartitionSpec` names: those which the chips divide.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.stages import Wrapped

from configs.engine import Config
from configs.errors import InputError
from configs.mesh import Mesh
from sharding import hosts

T = TypeVar("T")

AXES = ("data", "expert", "context", "model")  # neighbours along `model` exchange most
GROUPS = AXES[:2]
EACH_GROUP = PartitionSpec(GROUPS)  # equal along `context` and `model`
ALIKE = PartitionSpec()

_MOST_VIRTUAL_CHIPS = 256  # threads of a CPU


def provide(mesh: Mesh, num_chips: int) -> None:
    """Has a CPU stand for so many chips, those of a mesh among them, if that is not beyond reason,
    or for this host's part of them; before JAX looks for devices. Raises InputError if hosts would
    have different numbers of them.
    """
    count = hosts.current().count
    if num_chips % count:
        raise InputError(f"mesh {mesh}: {num_chips} chips are not equal parts of {count} hosts")
    num_chips //= count
    num_virtual: int = getattr(jax.config, "jax_num_cpu_devices")  # noqa: B009, mypy does not know it
    if max(1, num_virtual) < num_chips <= _MOST_VIRTUAL_CHIPS:
        jax.config.update("jax_num_cpu_devices", num_chips)


def of(mesh: Mesh, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh | None:
    """JAX's mesh, of the first of these devices (None: JAX's own); None for one chip. Raises
    InputError if there are fewer.
    """
    devices = jax.devices() if devices is None else devices
    if mesh.num_chips > len(devices):
        raise InputError(f"mesh {mesh} takes {mesh.num_chips} chips, here are {len(devices)}")
    if mesh.num_chips < len(devices) and jax.process_count() > 1:
        raise InputError(
            f"mesh {mesh} takes {mesh.num_chips} chips, the hosts have {len(devices)}: a mesh of "
            "several hosts has all of them"
        )
    return None if mesh.num_chips == 1 else _joined(devices[: mesh.num_chips], mesh)


def for_prefill(config: Config) -> jax.sharding.Mesh:
    """The chips that compute prompts for others, of JAX's own; a mesh even of one. Raises
    InputError if there are fewer, or several hosts, which would not see steps end alike.
    """
    if jax.process_count() > 1:
        raise InputError("prefill.chips goes with one host: leave it out, or the other hosts")
    first, chips, devices = config.prefill.first(config.mesh), config.prefill.chips, jax.devices()
    if config.num_chips > len(devices):
        raise InputError(
            f"prefill takes chips {first} to {config.num_chips - 1}, here are {len(devices)}"
        )
    return _joined(devices[first : first + chips], Mesh(model=chips))


def _joined(devices: Sequence[jax.Device], mesh: Mesh) -> jax.sharding.Mesh:
    chips = np.array(devices).reshape(mesh.data, mesh.expert, mesh.context, mesh.model)
    return jax.sharding.Mesh(chips, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def put(mesh: jax.sharding.Mesh, specs: object, make_part: Callable[[int, int], T]) -> T:
    """A pytree of arrays over a mesh, with a tree of specs or a prefix of one; this process makes
    the parts of its own chips by `make_part(group, chip)`, chips of a group in the order of
    `rules.RULES`: those along `context` lie next to each other.
    """
    parts = []
    for index, device in np.ndenumerate(mesh.devices):
        if device.process_index != jax.process_index():
            continue
        data, expert, context, model = index
        group = data * mesh.shape["expert"] + expert
        chip = model * mesh.shape["context"] + context
        with jax.default_device(device):  # another would hold two for a while
            parts.append(jax.device_put(make_part(group, chip), device))

    def joined(spec: PartitionSpec, *arrays: jax.Array) -> jax.Array:
        shape = whole_shape(mesh, spec, arrays[0].shape)
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_single_device_arrays(shape, sharding, list(arrays))

    def whole(spec: PartitionSpec, *trees: T) -> T:
        return jax.tree.map(functools.partial(joined, spec), *trees)

    joined_tree: T = jax.tree.map(whole, specs, *parts)
    return joined_tree


def to_global(mesh: jax.sharding.Mesh | None, spec: PartitionSpec, tree: T) -> T:
    """The global arrays of a mesh over several hosts, of numpy arrays that each host has whole;
    on one host the arrays themselves, which JAX divides.
    """
    if mesh is None or not mesh.is_multi_process:
        return tree
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
        lambda array: jax.make_array_from_callback(array.shape, sharding, array.__getitem__), tree
    )


def jitted(
    mesh: jax.sharding.Mesh | None,
    function: Callable[..., object],
    in_specs: object,
    out_specs: object,
    **options: Any,
) -> Wrapped:
    """`jax.jit`, with its options, of a function that runs on each chip with that chip's parts of
    arrays, whose specs are trees or prefixes of some; without a mesh, of the function itself.
    """
    if mesh is None:
        return jax.jit(function, **options)
    on_chips = jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )
    takes, returns = _named(mesh, in_specs), _named(mesh, out_specs)
    return jax.jit(on_chips, in_shardings=takes, out_shardings=returns, **options)


def _named(mesh: jax.sharding.Mesh, specs: object) -> object:
    return jax.tree.map(functools.partial(NamedSharding, mesh), specs)


def moved(tree: T, mesh: jax.sharding.Mesh | None, specs: object) -> T:
    """A pytree whose arrays lie on other chips as `specs` (a tree or a prefix of one) say, on as
    many of this mesh (None: on JAX's default device), with no copy on the host.
    """
    if mesh is None:
        return jax.device_put(tree, jax.devices()[0])
    return jax.device_put(tree, _named(mesh, specs))


def moved_to_group(tree: T, mesh: jax.sharding.Mesh, group: int, base: T) -> T:
    """A pytree over a mesh of as many chips as divide the model, on those of one group of another,
    each from device to device; the other groups' parts are those of `base`, which has the specs of
    the tree.
    """
    chips = mesh.devices.reshape(num_parts(mesh, EACH_GROUP), -1)[group]

    def joined(array: jax.Array, base_array: jax.Array) -> jax.Array:
        parts = {shard.device: shard.data for shard in base_array.addressable_shards}
        parts |= {  # shards are in the order of their mesh
            chip: jax.device_put(shard.data, chip)
            for chip, shard in zip(chips, array.addressable_shards, strict=True)
        }
        return jax.make_array_from_single_device_arrays(
            base_array.shape, base_array.sharding, list(parts.values())
        )

    return jax.tree.map(joined, tree, base)


def spread(mesh: jax.sharding.Mesh | None, tree: T, specs: object) -> T:
    """Shapes of arrays over a mesh, of the shapes of a chip's parts; of specs a tree or a prefix of
    one.
    """
    if mesh is None:
        return tree

    def whole(spec: PartitionSpec, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape, sharding = whole_shape(mesh, spec, leaf.shape), NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    of_chips: T = jax.tree.map(
        lambda spec, part: jax.tree.map(functools.partial(whole, spec), part), specs, tree
    )
    return of_chips


def whole_shape(
    mesh: jax.sharding.Mesh, spec: PartitionSpec, shape: Sequence[int]
) -> tuple[int, ...]:
    """The shape of an array over a mesh whose parts have a shape."""
    return tuple(size * num_parts(mesh, spec, axis) for axis, size in enumerate(shape))


def num_parts(mesh: jax.sharding.Mesh, spec: PartitionSpec, axis: int = 0) -> int:
    """Parts that a spec divides an axis into."""
    names = spec[axis] if axis < len(spec) else None
    names = names if isinstance(names, tuple) else (names,) if names else ()
    return math.prod(mesh.shape[name] for name in names)
