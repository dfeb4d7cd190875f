"""Host memory for offloaded pages, and the copies between it and the device."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from configs.engine import Config
from inference.kv_pages.prefix_cache import Transfer
from inference.runtime.batch import device_pages
from layers.kv_cache import Cache, CacheLeaf
from sharding import mesh as meshes
from sharding.mesh import ALIKE, EVERY_CHIP

_PAGES = 8  # that one call copies; more take several calls


class PageSwapper:
    """Copies pages to host memory and back."""

    def __init__(self, config: Config, cache: Cache, mesh: Mesh | None = None):
        """Reserves address space for `config.num_host_pages`; memory is taken as it is used.

        Args:
            config: model and engine.
            cache: leaves of a chip, or their shapes.
            mesh: the chips, if there are several.
        """
        self._config, self._mesh, self._cache = config, mesh, cache
        self._chips = config.mesh.num_chips
        self._stored = []  # a group: a leaf's arrays, [chips, pages, layers, ...] each
        groups = config.chip_model.page_groups
        for group, num_pages in zip(groups, config.num_host_pages, strict=True):
            first = self._chips, num_pages * config.device_pages, len(group.layers)
            self._stored.append(
                jax.tree.map(
                    lambda x, first=first: np.empty(first + x.shape[1:], x.dtype),
                    cache[group.layers[0]],
                )
            )
        self._compiled: dict[tuple[int, bool], Compiled] = {}

    def warm_up(self) -> None:
        """Compiles everything that `transfer` may need."""
        for group, num_pages in enumerate(self._config.num_host_pages):
            if num_pages > 1:
                self._executable(group, to_host=True)
                self._executable(group, to_host=False)

    def is_ready(self, transfers: tuple[Transfer, ...]) -> bool:
        """Whether these transfers need no compilation."""
        return all(_kind(transfer) in self._compiled for transfer in transfers)

    def prepare(self, transfers: tuple[Transfer, ...]) -> None:
        """Compiles what these transfers need."""
        for kind in set(map(_kind, transfers)):
            self._executable(*kind)

    def transfer(self, cache: Cache, transfers: tuple[Transfer, ...]) -> Cache:
        """Copies pages in the order given; returns the cache with the restored ones."""
        for (group, to_host), same in itertools.groupby(transfers, _kind):
            rest = list(same)
            while rest:
                some, rest = rest[:_PAGES], rest[_PAGES:]
                cache = self._copy(cache, group, to_host, some)
        return cache

    def _copy(self, cache: Cache, group: int, to_host: bool, some: list[Transfer]) -> Cache:
        stored, executable = self._stored[group], self._executable(group, to_host)
        pages = np.zeros(_PAGES, np.int32)  # padded with sinks
        pages[: len(some)] = [transfer.page for transfer in some]
        page_X = device_pages(pages, self._config)
        host_X = device_pages(np.array([t.host_page for t in some], np.int32), self._config)
        if to_host:
            read = jax.tree.leaves(executable(cache, page_X))
            for kept, pages in zip(jax.tree.leaves(stored), read, strict=True):
                each = np.asarray(pages).reshape(self._chips, -1, *kept.shape[2:])
                kept[:, host_X] = each[:, : len(host_X)]
            return cache

        def padded(kept: np.ndarray) -> np.ndarray:
            data = np.zeros((self._chips, len(page_X), *kept.shape[2:]), kept.dtype)
            data[:, : len(host_X)] = kept[:, host_X]
            return data.reshape(-1, *kept.shape[2:])

        return executable(cache, page_X, jax.tree.map(padded, stored))

    def _executable(self, group: int, to_host: bool) -> Compiled:
        if (group, to_host) not in self._compiled:
            layers = self._config.chip_model.page_groups[group].layers
            page_X = jax.ShapeDtypeStruct((_PAGES * self._config.device_pages,), jnp.int32)
            leaves = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self._cache
            )
            given, parts = [EVERY_CHIP, ALIKE], [leaves, page_X]
            own: Any = functools.partial(_read if to_host else _write, layers=layers)
            if not to_host:
                parts.append(
                    jax.tree.map(
                        lambda x: jax.ShapeDtypeStruct(page_X.shape + x.shape[2:], x.dtype),
                        self._stored[group],
                    )
                )
                given.append(EVERY_CHIP)
            function = meshes.over(self._mesh, own, tuple(given), EVERY_CHIP)
            jitted = jax.jit(function, donate_argnums=() if to_host else 0)
            arguments = meshes.spread(self._mesh, parts, given)
            self._compiled[group, to_host] = jitted.lower(*arguments).compile()
        return self._compiled[group, to_host]


def _kind(transfer: Transfer) -> tuple[int, bool]:
    return transfer.group, transfer.to_host


def _read(cache: Cache, page_X: jax.Array, layers: tuple[int, ...]) -> CacheLeaf:
    """Pages of all layers of a group: a leaf's arrays, [X, layers, ...] each."""
    leaves = [cache[layer] for layer in layers]
    return jax.tree.map(lambda *arrays: jnp.stack([x[page_X] for x in arrays], axis=1), *leaves)


def _write(cache: Cache, page_X: jax.Array, data: CacheLeaf, layers: tuple[int, ...]) -> Cache:
    """The cache with these pages in place; sinks may be written."""
    leaves = list(cache)
    for i, layer in enumerate(layers):
        leaves[layer] = jax.tree.map(
            lambda pages, new, i=i: pages.at[page_X].set(new[:, i], mode="promise_in_bounds"),
            leaves[layer], data,
        )  # fmt: skip
    return tuple(leaves)
