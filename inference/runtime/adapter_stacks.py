"""The adapters on the device: for each matrix that they may change two stacks of one slot each."""

import functools
from collections.abc import Callable
from typing import Any, cast

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
# A [N, P R, D] and B [N, F, R], of P modules, and the ranks of each slot, i32[N], by path.
Stacks = dict[str, tuple[Leaf, Leaf, jax.Array]]

NAME = "adapters"  # among the parameters


def abstract(config: Config, mesh: Mesh | None = None) -> Stacks:
    """Their shapes, over the chips of a mesh; {} where an engine has no slots."""
    room, dtype = config.engine.adapters, config.model.dtype
    packs = config.engine.kernels.linear == "ffi_cpu"
    ranks = jax.ShapeDtypeStruct((room.slots,), jnp.int32)

    def leaves(info: ParamInfo) -> tuple[object, ...]:
        down, up = ((room.slots, *factor.shape) for factor in adapters.factors(info, room))
        if packs:
            return packed.abstract(down, dtype), adapted_cpu.abstract_up(up, dtype), ranks
        return jax.ShapeDtypeStruct(down, dtype), jax.ShapeDtypeStruct(up, dtype), ranks

    if not room.slots:
        return {}
    chip_infos = adapters.adaptable(config.chip_model).items()
    stacks = {path: cast("Any", leaves(info)) for path, info in chip_infos}
    return meshes.spread(mesh, stacks, _specs(config, stacks))


def specs(config: Config) -> dict[str, object]:
    """Partition specs of the stacks on a mesh, by their name; {} where an engine has no slots."""
    stacks = abstract(config)
    return {NAME: _specs(config, stacks)} if stacks else {}


def _specs(config: Config, stacks: Stacks) -> dict[str, object]:
    """Chips divide each slot as they divide its matrix."""
    infos, room = adapters.adaptable(config.model), config.engine.adapters

    def spec(path: str, factor: ParamInfo, leaf: Leaf) -> object:
        spec = PartitionSpec(None, *rules.spec(path, factor))
        return leaf.specs(spec) if is_packed(leaf) else spec

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
        self._infos = adapters.adaptable(config.model)
        self._abstract = abstract(config)
        self._specs = _specs(config, self._abstract)
        self._slot_specs = jax.tree.map(lambda spec: PartitionSpec(*spec[1:]), self._specs)
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
            factors = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacks)
            slot = jax.ShapeDtypeStruct((), jnp.int32)
            takes = self._specs, self._slot_specs, ALIKE
            write = meshes.jitted(self._mesh, _written, takes, self._specs, donate_argnums=0)
            self._write = write.lower(stacks, factors, slot).compile()

    def load(self, stacks: Stacks, slot: int, adapter: AdapterWeights) -> Stacks:
        """Queues the copy of an adapter into a slot; `stacks` are donated."""
        self.prepare(stacks)
        assert self._write is not None
        rank = adapters.padded_rank(self._config.engine.adapters)
        dtype = np.dtype(jnp.dtype(self._config.model.dtype))
        whole = {
            path: (*adapter.filled(path, info, rank, dtype), np.int32(adapter.rank_of(path)))
            for path, info in self._infos.items()
        }
        factors = self._over_chips(self._slot_specs, functools.partial(self._part, whole))
        return self._write(stacks, factors, meshes.to_global(self._mesh, ALIKE, np.int32(slot)))

    def _over_chips(self, specs: object, make_part: Callable[[int, int], Stacks]) -> Stacks:
        if self._mesh is None:
            return make_part(0, 0)
        return meshes.put(self._mesh, specs, make_part)

    def _part(
        self, whole: dict[str, tuple[np.ndarray, np.ndarray, np.int32]], group: int, chip: int
    ) -> Stacks:
        """What a chip has of an adapter, in the tree of its stacks, whose shapes are others."""
        config, parts = self._config, dict[str, tuple[object, ...]]()
        packs = config.engine.kernels.linear == "ffi_cpu"
        for path, (*both, rank) in whole.items():
            if self._mesh is not None:
                infos = adapters.factors(self._infos[path], config.engine.adapters)
                both = [
                    rules.part(config.model, path, info, values, config.mesh, group, chip)
                    for info, values in zip(infos, both, strict=True)
                ]
            down, up = both
            parts[path] = (packed.pack(down), adapted_cpu.pack_up(up)) if packs else (down, up)
            parts[path] += (rank,)
        tree = jax.tree.structure(self._abstract)
        return jax.tree.unflatten(tree, jax.tree.leaves(parts))


def _written(stacks: Stacks, factors: Stacks, slot: jax.Array) -> Stacks:
    write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=slot, axis=0)
    return jax.tree.map(write, stacks, factors)
