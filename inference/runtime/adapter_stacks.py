"""The adapters on the device: for each matrix that they may change two stacks of one slot each."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from configs import adapters
from configs.engine import Config
from configs.kinds.params import ParamInfo
from inference.runtime.adapter_weights import AdapterWeights
from layers.kernels.linear import adapted_cpu, packed
from layers.kernels.linear.packed import Packed, is_packed
from sharding import mesh as meshes
from sharding import rules
from sharding.mesh import ALIKE

Leaf = jax.Array | Packed
# What `adapters.factors` declares, of all slots, one behind the other: [N, ...] of a matrix or a
# table, [N E, ...] of a stack; and the ranks of each slot, i32[N], by path.
Stacks = dict[str, tuple[Leaf, Leaf, jax.Array]]

NAME = "adapters"  # among the parameters


def abstract(config: Config, mesh: Mesh | None = None) -> Stacks:
    """Their shapes, over the chips of a mesh; {} where an engine has no slots."""
    room, dtype = config.engine.adapters, config.model.dtype
    ranks = jax.ShapeDtypeStruct((room.slots,), jnp.int32)

    def leaves(info: ParamInfo) -> tuple[object, ...]:
        layouts = _layouts(config, info)
        shapes = (
            (room.slots * adapters.num_matrices(info), *factor.shape[-2:])
            for factor in adapters.factors(info, room)
        )
        return *(x.abstract(shape, dtype) for x, shape in zip(layouts, shapes, strict=True)), ranks

    if not room.slots:
        return {}
    chip_infos = adapters.adaptable(config.chip_model, room.extras).items()
    stacks = {path: cast("Any", leaves(info)) for path, info in chip_infos}
    return meshes.spread(mesh, stacks, _specs(config, stacks))


def specs(config: Config) -> dict[str, object]:
    """Partition specs of the stacks on a mesh, by their name; {} where an engine has no slots."""
    stacks = abstract(config)
    return {NAME: _specs(config, stacks)} if stacks else {}


class _Layout(NamedTuple):
    """How a factor lies on the device: its shape and type without its values, and its values."""

    abstract: Callable[[tuple[int, ...], str], object]
    place: Callable[[np.ndarray], object]


_PLAIN = _Layout(jax.ShapeDtypeStruct, jnp.asarray)
_PACKED = _Layout(packed.abstract, packed.pack)
_PACKED_UP = _Layout(adapted_cpu.abstract_up, adapted_cpu.pack_up)


def _layouts(config: Config, info: ParamInfo) -> tuple[_Layout, _Layout]:
    """Of both factors of a parameter."""
    if config.engine.kernels.linear != "ffi_cpu":
        return _PLAIN, _PLAIN
    if info.is_table:
        return _PACKED, _PLAIN
    return _PACKED, _PACKED if len(info.shape) > 2 else _PACKED_UP


def _specs(config: Config, stacks: Stacks) -> dict[str, object]:
    """Chips divide each slot as they divide its parameter."""
    room = config.engine.adapters
    infos = adapters.adaptable(config.model, room.extras)

    def spec(path: str, factor: ParamInfo, leaf: Leaf) -> object:
        axes = rules.spec(path, factor)
        axes = axes if len(factor.shape) > 2 else PartitionSpec(None, *axes)
        return leaf.specs(axes) if is_packed(leaf) else axes

    return {
        path: (
            *(
                spec(path, factor, leaf)
                for factor, leaf in zip(adapters.factors(infos[path], room), leaves, strict=False)
            ),
            PartitionSpec(None),
        )
        for path, leaves in stacks.items()
    }


class AdapterStacks:
    """Makes the stacks of an engine, over the chips of a mesh, and writes adapters into slots."""

    def __init__(self, config: Config, mesh: Mesh | None = None):
        self._config, self._mesh = config, mesh
        self._infos = adapters.adaptable(config.model, config.engine.adapters.extras)
        self._abstract = abstract(config)
        self._specs = _specs(config, self._abstract)
        self._write: Callable[..., Stacks] | None = None

    def empty(self) -> Stacks:
        """Stacks of zeros."""

        def zeros(group: int, chip: int) -> Stacks:
            return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self._abstract)

        return self._over_chips(self._specs, zeros)

    @property
    def is_ready(self) -> bool:
        """Whether `load` compiles nothing."""
        return self._write is not None

    def prepare(self, stacks: Stacks) -> None:
        """Compiles what `load` needs."""
        if self._write is None:
            slots = self._config.engine.adapters.slots
            factors = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((x.shape[0] // slots, *x.shape[1:]), x.dtype), stacks
            )
            slot = jax.ShapeDtypeStruct((), jnp.int32)
            takes = self._specs, self._specs, ALIKE
            write = meshes.jitted(self._mesh, _written, takes, self._specs, donate_argnums=0)
            self._write = write.lower(stacks, factors, slot).compile()

    def load(self, stacks: Stacks, slot: int, adapter: AdapterWeights) -> Stacks:
        """Queues the copy of an adapter into a slot; `stacks` are donated."""
        self.prepare(stacks)
        assert self._write is not None
        rank = adapters.padded_rank(self._config.engine.adapters)
        dtype = np.dtype(jnp.dtype(self._config.model.dtype))
        whole = {
            path: (
                *adapter.filled(path, info, rank, dtype),
                np.array([adapter.rank_of(path)], np.int32),
            )
            for path, info in self._infos.items()
        }
        factors = self._over_chips(self._specs, functools.partial(self._part, whole))
        return self._write(stacks, factors, meshes.to_global(self._mesh, ALIKE, np.int32(slot)))

    def _over_chips(self, specs: object, make_part: Callable[[int, int], Stacks]) -> Stacks:
        if self._mesh is None:
            return make_part(0, 0)
        return meshes.put(self._mesh, specs, make_part)

    def _part(self, whole: Mapping[str, tuple[np.ndarray, ...]], group: int, chip: int) -> Stacks:
        """What a chip has of an adapter, in the tree of its stacks, whose shapes are others."""
        config, parts = self._config, dict[str, tuple[object, ...]]()
        for path, (*both, ranks) in whole.items():
            info = self._infos[path]
            if self._mesh is not None:
                both = [
                    rules.part(config.model, path, factor, values, config.mesh, group, chip)
                    for factor, values in zip(
                        adapters.factors(info, config.engine.adapters), both, strict=True
                    )
                ]
            slot = (values.reshape(-1, *values.shape[-2:]) for values in both)
            layouts = _layouts(config, info)
            parts[path] = *(x.place(matrix) for x, matrix in zip(layouts, slot, strict=True)), ranks
        tree = jax.tree.structure(self._abstract)
        return jax.tree.unflatten(tree, jax.tree.leaves(parts))


def _written(stacks: Stacks, factors: Stacks, slot: jax.Array) -> Stacks:
    def write(stack: jax.Array, factor: jax.Array) -> jax.Array:
        first = slot * factor.shape[0]
        return jax.lax.dynamic_update_slice_in_dim(stack, factor, first, axis=0)

    return jax.tree.map(write, stacks, factors)
