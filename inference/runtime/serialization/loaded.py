"""An executable that was compiled by another process, called as if JAX had compiled it here."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding
from jaxlib import xla_client


@dataclasses.dataclass(frozen=True)
class Signature:
    """Arguments and results of a program: pytrees of `jax.ShapeDtypeStruct`, on a mesh with their
    shardings.
    """

    arguments: tuple[Any, ...]
    results: tuple[Any, ...]


class LoadedExecutable:
    """A program on its devices."""

    def __init__(self, data: bytes, devices: Sequence[jax.Device], signature: Signature):
        """Loads the bytes that the runtime's `serialize` gave.

        Raises:
            jax.errors.JaxRuntimeError: the runtime cannot read them.
        """
        client: Any = devices[0].client
        on: Any = xla_client.DeviceList(tuple(devices))
        self._executable: Any = client.deserialize_executable(data, on)
        structure: Any
        self._expected, structure = jax.tree.flatten(signature.arguments)
        self._structure = structure
        self._returned, self._result_structure = jax.tree.flatten(signature.results)
        self._device = devices[0]
        self._is_checked = False

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program; what it was compiled to take by donation is gone afterwards.

        Raises:
            TypeError: arguments of other shapes, types or leaves than it was compiled for, or on
                other devices.
        """
        leaves, structure = jax.tree.flatten(arguments)
        if structure != self._structure:
            raise TypeError(f"compiled for arguments {self._structure}, not {structure}")
        if not self._is_checked:
            self._check(leaves)
            self._is_checked = True
        outside = [at for at, leaf in enumerate(leaves) if not isinstance(leaf, jax.Array)]
        placed = jax.device_put(
            [leaves[at] for at in outside], [self._place(self._expected[at]) for at in outside]
        )
        for at, array in zip(outside, placed, strict=True):
            leaves[at] = array
        found = self._executable.execute_sharded(leaves).disassemble_into_single_device_arrays()
        results = map(_joined, found, self._returned)
        return jax.tree.unflatten(self._result_structure, results)

    def _place(self, leaf: jax.ShapeDtypeStruct) -> NamedSharding | jax.Device:
        return leaf.sharding if isinstance(leaf.sharding, NamedSharding) else self._device

    def _check(self, leaves: Sequence[Any]) -> None:
        for leaf, expected in zip(leaves, self._expected, strict=True):
            if (leaf.shape, leaf.dtype) != (expected.shape, expected.dtype):
                raise TypeError(f"compiled for {expected}, not {leaf.dtype}{leaf.shape}")
            place = self._place(expected)
            if isinstance(leaf, jax.Array) and not _lies(leaf, place):
                raise TypeError(f"compiled for {expected} on {place}, not on {leaf.sharding}")


def _lies(array: jax.Array, place: NamedSharding | jax.Device) -> bool:
    if isinstance(place, NamedSharding):
        return array.sharding.is_equivalent_to(place, array.ndim)
    return array.devices() == {place}


def _joined(parts: list[jax.Array], leaf: jax.ShapeDtypeStruct) -> jax.Array:
    if not isinstance(leaf.sharding, NamedSharding):
        return parts[0]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts)
