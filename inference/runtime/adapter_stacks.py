"""The adapters on the device: for each matrix that they may change two stacks of one slot each."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from configs import adapters
from configs.engine import Config
from configs.kinds.params import ParamInfo
from inference.runtime.adapter_weights import AdapterWeights
from layers.kernels.linear import adapted_cpu, packed
from layers.kernels.linear.packed import Packed

Leaf = jax.Array | Packed
# A [N, P R, D] and B [N, F, R], of P modules, and the ranks of each slot, i32[N], by path.
Stacks = dict[str, tuple[Leaf, Leaf, jax.Array]]

NAME = "adapters"  # among the parameters


def abstract(config: Config) -> Stacks:
    """Their shapes; {} where an engine has no slots."""
    room, dtype = config.engine.adapters, config.model.dtype
    packs = config.engine.kernels.linear == "ffi_cpu"
    ranks = jax.ShapeDtypeStruct((room.slots,), jnp.int32)

    def leaves(info: ParamInfo) -> tuple[object, ...]:
        down, up = adapters.stack_shapes(info, room)
        if packs:
            return packed.abstract(down, dtype), adapted_cpu.abstract_up(up, dtype), ranks
        return jax.ShapeDtypeStruct(down, dtype), jax.ShapeDtypeStruct(up, dtype), ranks

    if not room.slots:
        return {}
    infos = adapters.adaptable(config.model).items()
    return {path: cast("Any", leaves(info)) for path, info in infos}


class AdapterStacks:
    """Makes the stacks of an engine, and writes adapters into slots."""

    def __init__(self, config: Config):
        self._config = config
        self._infos = adapters.adaptable(config.model)
        self._write: Callable[..., Stacks] | None = None

    def empty(self) -> Stacks:
        """Stacks of zeros."""
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract(self._config))

    @property
    def is_ready(self) -> bool:
        """Whether `load` compiles nothing."""
        return self._write is not None

    def prepare(self, stacks: Stacks) -> None:
        """Compiles what `load` needs."""
        if self._write is None:
            factors = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacks)
            slot = jax.ShapeDtypeStruct((), jnp.int32)
            self._write = jax.jit(_written, donate_argnums=0).lower(stacks, factors, slot).compile()

    def load(self, stacks: Stacks, slot: int, adapter: AdapterWeights) -> Stacks:
        """Queues the copy of an adapter into a slot; `stacks` are donated."""
        self.prepare(stacks)
        assert self._write is not None
        rank = adapters.padded_rank(self._config.engine.adapters)
        dtype = np.dtype(jnp.dtype(self._config.model.dtype))
        packs = self._config.engine.kernels.linear == "ffi_cpu"
        factors: dict[str, tuple[object, ...]] = {}
        for path, info in self._infos.items():
            down, up = adapter.filled(path, info, rank, dtype)
            both = (packed.pack(down), adapted_cpu.pack_up(up)) if packs else (down, up)
            factors[path] = *both, np.int32(adapter.rank_of(path))
        tree = jax.tree.structure(stacks)  # of stacks, whose shapes are others
        factors = jax.tree.unflatten(tree, jax.tree.leaves(factors))
        return self._write(stacks, factors, np.int32(slot))


def _written(stacks: Stacks, factors: Stacks, slot: jax.Array) -> Stacks:
    write = functools.partial(jax.lax.dynamic_update_index_in_dim, index=slot, axis=0)
    return jax.tree.map(write, stacks, factors)
