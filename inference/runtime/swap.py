"""Copies of what is cached: of pages between the device and host memory, and of states, so that
they outlive their sequences.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.stages import Compiled

from configs.cache import PageGroup
from configs.engine import Config
from inference.kv_pages.prefix_cache import Transfer
from inference.runtime.batch import device_pages, num_device_pages
from inference.runtime.executables import abstract
from inference.scheduling.step_schedule import Snapshot
from layers import kv_cache
from layers.kv_cache import Cache, CacheLeaf
from sharding import mesh as meshes
from sharding.mesh import EACH_GROUP

Transfers = tuple[tuple[Transfer, ...], ...]  # of each data shard

Snapshots = tuple[tuple[Snapshot, ...], ...]  # likewise

# Pages of a group: its layers' leaves, those alike stacked, [X, layers, ...] each.
PageCopies = tuple[CacheLeaf, ...]

# Pages of a group in the host's memory: the leaves of a `PageCopies`, [X, layers, ...] each.
HostPages = list[np.ndarray]

PAGES = 8  # that one call copies; more take several calls
_MOST_READS = 4  # in flight; each keeps PAGES pages on the device
_ROWS = 8  # snapshots that one call makes; more take several calls


class _PendingRead(NamedTuple):
    """Pages that the device reads, and where they belong in the host's memory."""

    group: int
    arrays: list[Any]  # [shards x pages, layers, ...] each
    host_pages: list[np.ndarray]  # of each data shard, int32 [pages]


class PageSwapper:
    """Copies pages to host memory and back. Those for the host are stored while later steps run, as
    the device reads them behind the steps before; more than `_MOST_READS` times `PAGES` in one step
    wait for these.
    """

    def __init__(self, config: Config, cache: Cache, mesh: Mesh | None = None):
        """Reserves address space for `config.num_host_pages`; memory is taken as it is used.
        `cache` has leaves of a chip, or their shapes.
        """
        self._config, self._mesh, self._cache = config, mesh, cache
        self._specs: Cache | None = None
        if mesh is not None:
            self._specs = kv_cache.specs(config.model, config.chip_model)
        whole = meshes.spread(mesh, abstract(cache), self._specs)
        # A group: of each kind of leaf its layers, and its arrays, [shards, pages, layers, ...].
        self._layers = [_alike(cache, group, self._specs) for group in config.cached_groups]
        self._stored: list[PageCopies] = []
        for index, num_pages in enumerate(config.num_host_pages):
            group, parts_a_page = config.cached_groups[index], num_device_pages(config, index)
            stored = []
            for layers in self._layers[index]:
                first = config.mesh.num_groups, num_pages * parts_a_page, len(layers)
                stored.append(
                    jax.tree.map(
                        lambda x, first=first: np.empty(first + x.shape[1:], x.dtype),
                        whole[layers[0]].part(group.part),
                    )
                )
            self._stored.append(tuple(stored))
        self._compiled: dict[tuple[int, bool], Compiled] = {}
        self._zeros: dict[int, PageCopies] = {}
        self._reads: deque[_PendingRead] = deque()  # that are not stored yet, oldest first

    def warm_up(self) -> None:
        num_pages = self._config.num_host_pages
        self.compile_copies(group for group, n in enumerate(num_pages) if n > 1)

    def is_ready(self, transfers: Transfers) -> bool:
        return all(transfer.kind in self._compiled for shard in transfers for transfer in shard)

    def prepare(self, transfers: Transfers) -> None:
        for kind in {transfer.kind for shard in transfers for transfer in shard}:
            self._executable(*kind)

    def transfer(self, cache: Cache, transfers: Transfers) -> Cache:
        """Copies pages, each data shard's in order; returns the cache with the restored ones. Pages
        for the host are stored later, at the latest before a restore. Raises JaxRuntimeError if the
        device failed, perhaps in a read of an earlier call.
        """
        while self._reads and all(array.is_ready() for array in self._reads[0].arrays):
            self._store_oldest()
        due = [deque(shard) for shard in transfers]
        while kinds := [shard[0].kind for shard in due if shard]:
            kind = kinds[0]
            taken = [[s.popleft() for _ in range(PAGES) if s and s[0].kind == kind] for s in due]
            cache = self._copy(cache, *kind, taken)
        return cache

    def read(self, cache: Cache, group: int, pages: Sequence[int]) -> PageCopies:
        """Reads at most `PAGES` pages of a group of one data shard, padded with sinks."""
        padded = np.zeros(PAGES, np.int32)
        padded[: len(pages)] = pages
        page_X = device_pages(padded, self._config, group)
        data: PageCopies = self._executable(group, to_host=True)(cache, page_X)
        return data

    def receive(
        self, cache: Cache, group: int, pages: Sequence[int], data: PageCopies, shard: int
    ) -> Cache:
        """The cache with what another chip's `read` has read in these pages of a data shard."""
        num_shards = self._config.mesh.num_groups
        if self._mesh is None or num_shards == 1:
            data = meshes.moved(data, self._mesh, self._copy_specs(group))
        else:
            data = meshes.moved_to_group(data, self._mesh, shard, self._nothing(group, data))
        return self._write(cache, group, pages, data, shard)

    def receive_host(
        self, cache: Cache, group: int, pages: Sequence[int], data: Sequence[HostPages], shard: int
    ) -> Cache:
        """As `receive`, of pages in the host's memory."""
        num_shards = self._config.mesh.num_groups

        def padded(*arrays: np.ndarray) -> np.ndarray:
            parts, *shape = arrays[0].shape
            whole = np.zeros((num_shards, PAGES * parts, *shape), arrays[0].dtype)
            whole[shard, : len(arrays) * parts] = np.concatenate(arrays)
            return whole.reshape(-1, *shape)

        leaves = [padded(*arrays) for arrays in zip(*data, strict=True)]
        copies = jax.tree.unflatten(jax.tree.structure(self._stored[group]), leaves)
        return self._write(cache, group, pages, copies, shard)

    def _write(
        self, cache: Cache, group: int, pages: Sequence[int], data: PageCopies, shard: int
    ) -> Cache:
        page_SX = np.zeros((self._config.mesh.num_groups, PAGES), np.int32)
        page_SX[shard, : len(pages)] = pages
        page_X = device_pages(page_SX, self._config, group).ravel()
        written: Cache = self._executable(group, to_host=False)(cache, page_X, data)
        return written

    def host_pages(self, group: int, num_pages: int, data: PageCopies | None = None) -> HostPages:
        """The first `num_pages` of what `read` has read, which it waits for; else room for so many
        of a group's pages.
        """
        num_parts = num_pages * num_device_pages(self._config, group)
        if data is None:
            leaves = jax.tree.leaves(self._stored[group])
            return [np.empty((num_parts, *x.shape[2:]), x.dtype) for x in leaves]
        return [np.asarray(x)[:num_parts] for x in jax.tree.leaves(data)]

    def store(self) -> None:
        """Stores all pages for the host; after a JaxRuntimeError the rest stay pending."""
        while self._reads:
            self._store_oldest()

    def forget_reads(self) -> None:
        """Drops unstored pages, which the device may have lost; so must the prefix cache."""
        self._reads.clear()

    def free(self) -> None:
        """Frees what `receive` keeps on the device, which is made again when it is needed."""
        self._zeros.clear()

    def _store_oldest(self) -> None:
        group, arrays, host_pages = self._reads[0]
        shards = len(host_pages)
        for leaf, array in zip(jax.tree.leaves(self._stored[group]), arrays, strict=True):
            pages = np.asarray(array).reshape(shards, -1, *leaf.shape[2:])
            for shard, host_X in enumerate(host_pages):
                leaf[shard][host_X] = pages[shard][: len(host_X)]
        self._reads.popleft()  # last: after an interrupt it is stored again

    def _nothing(self, group: int, data: PageCopies) -> PageCopies:
        if group not in self._zeros:
            assert self._mesh is not None
            self._zeros[group] = meshes.put(
                self._mesh,
                self._copy_specs(group),
                lambda *_: jax.tree.map(
                    lambda x: jnp.zeros(x.sharding.shard_shape(x.shape), x.dtype), data
                ),
            )
        return self._zeros[group]

    def compile_copies(self, groups: Iterable[int]) -> None:
        for group in groups:
            self._executable(group, to_host=True)
            self._executable(group, to_host=False)

    def _copy(self, cache: Cache, group: int, to_host: bool, shards: list[list[Transfer]]) -> Cache:
        """At most `PAGES` of each data shard, which come back to all of its chips."""
        stored, executable = self._stored[group], self._executable(group, to_host)
        page_SX = np.zeros((len(shards), PAGES), np.int32)  # padded with sinks
        for page_X, some in zip(page_SX, shards, strict=True):
            page_X[: len(some)] = [transfer.page for transfer in some]
        pages = device_pages(page_SX, self._config, group)
        host_pages = [
            device_pages(
                np.array([transfer.host_page for transfer in some], np.int32), self._config, group
            )
            for some in shards
        ]
        if to_host:
            arrays = jax.tree.leaves(executable(cache, pages.ravel()))
            for array in arrays:
                array.copy_to_host_async()
            self._reads.append(_PendingRead(group, arrays, host_pages))
            if len(self._reads) > _MOST_READS:
                self._store_oldest()
            return cache
        self.store()

        def padded(host_array: np.ndarray) -> np.ndarray:
            data = np.zeros((*pages.shape, *host_array.shape[2:]), host_array.dtype)
            for shard, host_X in enumerate(host_pages):
                data[shard][: len(host_X)] = host_array[shard][host_X]
            return data.reshape(-1, *host_array.shape[2:])

        return executable(cache, pages.ravel(), jax.tree.map(padded, stored))

    def _executable(self, group: int, to_host: bool) -> Compiled:
        if (group, to_host) not in self._compiled:
            num_pages = PAGES * num_device_pages(self._config, group)
            page_X = jax.ShapeDtypeStruct((num_pages,), jnp.int32)
            cached, copied = self._config.cached_groups[group], self._copy_specs(group)
            read = functools.partial(_read, group=cached, alike=self._layers[group])
            write = functools.partial(_write, group=cached, alike=self._layers[group])
            state = abstract(self._cache), page_X
            in_specs: tuple[object, ...] = self._specs, EACH_GROUP
            function: Callable[..., PageCopies] = read
            arguments: tuple[object, ...] = meshes.spread(self._mesh, state, in_specs)
            if not to_host:
                copies = jax.eval_shape(read, *state)
                arguments += (meshes.spread(self._mesh, copies, copied),)
                in_specs, function = (*in_specs, copied), write
            out_specs = copied if to_host else self._specs
            donated = () if to_host else 0
            jitted = meshes.jitted(
                self._mesh, function, in_specs, out_specs, donate_argnums=donated
            )
            self._compiled[group, to_host] = jitted.lower(*arguments).compile()
        return self._compiled[group, to_host]

    def _copy_specs(self, group: int) -> object:
        """Of copies of a group's pages: those of the pages, whose layers are stacked."""
        if self._specs is None:
            return None
        parts = [
            self._specs[layers[0]].part(self._config.cached_groups[group].part)
            for layers in self._layers[group]
        ]
        return jax.tree.map(lambda spec: PartitionSpec(spec[0], None, *spec[1:]), tuple(parts))


def _alike(cache: Cache, group: PageGroup, specs: Cache | None) -> list[list[int]]:
    """Layers of a group by what a page of theirs is, on a chip and over a mesh; states may differ
    from layer to layer.
    """
    layers_of: dict[tuple[object, ...], list[int]] = {}
    for layer in group.layers:
        leaves, structure = jax.tree.flatten(cache[layer].part(group.part))
        over_chips = jax.tree.leaves(specs[layer].part(group.part)) if specs else ()
        kind = structure, *((leaf.shape[1:], leaf.dtype) for leaf in leaves), *over_chips
        layers_of.setdefault(kind, []).append(layer)
    return list(layers_of.values())


def _read(cache: Cache, page_X: jax.Array, group: PageGroup, alike: list[list[int]]) -> PageCopies:
    return tuple(
        jax.tree.map(
            lambda *arrays: jnp.stack([x[page_X] for x in arrays], axis=1),
            *(cache[layer].part(group.part) for layer in layers),
        )
        for layers in alike
    )


def _write(
    cache: Cache, page_X: jax.Array, data: PageCopies, group: PageGroup, alike: list[list[int]]
) -> Cache:
    """The cache with these pages in place; sinks may be written."""
    leaves = list(cache)
    for layers, copies in zip(alike, data, strict=True):
        for i, layer in enumerate(layers):
            part = jax.tree.map(
                lambda pages, new, i=i: pages.at[page_X].set(new[:, i], mode="promise_in_bounds"),
                cache[layer].part(group.part), copies,
            )  # fmt: skip
            leaves[layer] = cache[layer].with_part(group.part, part)
    return tuple(leaves)


class StateSnapshots:
    """Copies states from slots to snapshots."""

    def __init__(self, config: Config, cache: Cache, mesh: Mesh | None = None):
        """`cache` are leaves of a chip, or their shapes; `mesh` the chips, if there are several."""
        self._config, self._mesh, self._cache = config, mesh, cache
        self._compiled: Compiled | None = None

    @property
    def is_ready(self) -> bool:
        return self._compiled is not None or not self._config.num_snapshots

    def prepare(self) -> None:
        if self.is_ready:
            return
        rows_A = jax.ShapeDtypeStruct((_ROWS,), np.int32)
        specs: object = None
        if self._mesh is not None:
            specs = kv_cache.specs(self._config.model, self._config.chip_model)
        in_specs = specs, EACH_GROUP, EACH_GROUP, EACH_GROUP
        parts = abstract(self._cache), rows_A, rows_A, rows_A
        arguments = meshes.spread(self._mesh, parts, in_specs)
        keep = meshes.jitted(self._mesh, kv_cache.keep_states, in_specs, specs, donate_argnums=0)
        self._compiled = keep.lower(*arguments).compile()

    def keep(self, cache: Cache, snapshots: Snapshots) -> Cache:
        """The cache with these snapshots of what the last step left in its slots."""
        if not any(snapshots):
            return cache
        self.prepare()
        assert self._compiled is not None
        for first in range(0, max(map(len, snapshots)), _ROWS):
            rows = [self._rows(shard[first : first + _ROWS]) for shard in snapshots]
            arrays = np.concatenate(rows, axis=1)
            global_arrays = (meshes.to_global(self._mesh, EACH_GROUP, array) for array in arrays)
            cache = self._compiled(cache, *global_arrays)
        return cache

    def _rows(self, snapshots: tuple[Snapshot, ...]) -> np.ndarray:
        """Slots, lengths and numbers, padded with sinks: int32 [3, `_ROWS`]."""
        rows_3A = np.zeros((3, _ROWS), np.int32)
        rows_3A[0] = self._config.engine.max_seqs
        for row, snapshot in enumerate(snapshots):
            rows_3A[:, row] = snapshot.slot, snapshot.num_tokens, snapshot.number
        return rows_3A
