"""Host memory for offloaded pages, and the copies between it and the device."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from configs.engine import Config
from inference.kv_pages.prefix_cache import Transfer
from inference.runtime.batch import device_pages
from layers.kv_cache import Cache, CacheLeaf

_PAGES = 8  # that one call copies; more take several calls


class PageSwapper:
    """Copies pages to host memory and back."""

    def __init__(self, config: Config, cache: Cache):
        """Reserves address space for `config.num_host_pages`; memory is taken as it is used."""
        self._config = config
        self._stored = []  # a group: a leaf's arrays, [pages, layers, ...] each
        for group, num_pages in zip(config.model.page_groups, config.num_host_pages, strict=True):
            first = num_pages * config.device_pages, len(group.layers)
            self._stored.append(
                jax.tree.map(
                    lambda x, first=first: np.empty(first + x.shape[1:], x.dtype),
                    cache[group.layers[0]],
                )
            )
        self._compiled: dict[tuple[int, bool], Compiled] = {}

    def warm_up(self, cache: Cache) -> None:
        """Compiles everything that `transfer` may need."""
        for group, num_pages in enumerate(self._config.num_host_pages):
            if num_pages > 1:
                self._executable(cache, group, to_host=True)
                self._executable(cache, group, to_host=False)

    def is_ready(self, transfers: tuple[Transfer, ...]) -> bool:
        """Whether these transfers need no compilation."""
        return all(_kind(transfer) in self._compiled for transfer in transfers)

    def prepare(self, cache: Cache, transfers: tuple[Transfer, ...]) -> None:
        """Compiles what these transfers need."""
        for kind in set(map(_kind, transfers)):
            self._executable(cache, *kind)

    def transfer(self, cache: Cache, transfers: tuple[Transfer, ...]) -> Cache:
        """Copies pages in the order given; returns the cache with the restored ones."""
        for (group, to_host), same in itertools.groupby(transfers, _kind):
            rest = list(same)
            while rest:
                some, rest = rest[:_PAGES], rest[_PAGES:]
                cache = self._copy(cache, group, to_host, some)
        return cache

    def _copy(self, cache: Cache, group: int, to_host: bool, some: list[Transfer]) -> Cache:
        stored, executable = self._stored[group], self._executable(cache, group, to_host)
        pages = np.zeros(_PAGES, np.int32)  # padded with sinks
        pages[: len(some)] = [transfer.page for transfer in some]
        page_X = device_pages(pages, self._config)
        host_X = device_pages(np.array([t.host_page for t in some], np.int32), self._config)
        if to_host:
            read = jax.tree.leaves(executable(cache, page_X))
            for kept, pages in zip(jax.tree.leaves(stored), read, strict=True):
                kept[host_X] = np.asarray(pages)[: len(host_X)]
            return cache

        def padded(kept: np.ndarray) -> np.ndarray:
            data = np.zeros((len(page_X), *kept.shape[1:]), kept.dtype)
            data[: len(host_X)] = kept[host_X]
            return data

        return executable(cache, page_X, jax.tree.map(padded, stored))

    def _executable(self, cache: Cache, group: int, to_host: bool) -> Compiled:
        if (group, to_host) not in self._compiled:
            layers = self._config.model.page_groups[group].layers
            page_X = jax.ShapeDtypeStruct((_PAGES * self._config.device_pages,), jnp.int32)
            leaves = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), cache)
            if to_host:
                lowered = jax.jit(functools.partial(_read, layers=layers)).lower(leaves, page_X)
            else:
                data = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(page_X.shape + x.shape[1:], x.dtype),
                    self._stored[group],
                )
                write = jax.jit(functools.partial(_write, layers=layers), donate_argnums=0)
                lowered = write.lower(leaves, page_X, data)
            self._compiled[group, to_host] = lowered.compile()
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
