"""Pages in host memory, and the programs that carry them there and back."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.engine import Config
from inference.kv_pages.prefix_cache import Transfer
from inference.runtime.batch import device_pages
from layers.kv_cache import Cache

_PAGES = 8  # a call carries as many; more take several calls


class HostTier:
    """Copies of pages that the device has no room for."""

    def __init__(self, config: Config, cache: Cache):
        """Reserves addresses for `config.num_host_pages`; memory is taken as it is used."""
        self._config = config
        self._stored = []  # a group: [pages, layers, tokens, elements]
        for group, num_pages in zip(config.model.page_groups, config.num_host_pages, strict=True):
            _, *widths = cache[group.layers[0]].shape
            shape = (num_pages * config.device_pages, len(group.layers), *widths)
            self._stored.append(np.empty(shape, cache[group.layers[0]].dtype))
        self._compiled: dict[tuple[int, bool], Any] = {}

    def warm_up(self, cache: Cache) -> None:
        """Compiles what `carry` may need."""
        for group, num_pages in enumerate(self._config.num_host_pages):
            if num_pages > 1:
                self._program(cache, group, to_host=True)
                self._program(cache, group, to_host=False)

    def is_ready(self, transfers: tuple[Transfer, ...]) -> bool:
        """Whether nothing has to be compiled for them."""
        return all(_kind(transfer) in self._compiled for transfer in transfers)

    def prepare(self, cache: Cache, transfers: tuple[Transfer, ...]) -> None:
        """Compiles what they need."""
        for kind in set(map(_kind, transfers)):
            self._program(cache, *kind)

    def carry(self, cache: Cache, transfers: tuple[Transfer, ...]) -> Cache:
        """Copies pages in the order given; returns the cache, with those that came back."""
        for (group, to_host), same in itertools.groupby(transfers, _kind):
            rest = list(same)
            while rest:
                some, rest = rest[:_PAGES], rest[_PAGES:]
                cache = self._carry(cache, group, to_host, some)
        return cache

    def _carry(self, cache: Cache, group: int, to_host: bool, some: list[Transfer]) -> Cache:
        stored, program = self._stored[group], self._program(cache, group, to_host)
        pages = np.zeros(_PAGES, np.int32)  # padded with sinks
        pages[: len(some)] = [transfer.page for transfer in some]
        page_X = device_pages(pages, self._config)
        host_X = device_pages(np.array([t.host_page for t in some], np.int32), self._config)
        if to_host:
            stored[host_X] = np.asarray(program(cache, page_X))[: len(host_X)]
            return cache
        data = np.zeros((len(page_X), *stored.shape[1:]), stored.dtype)
        data[: len(host_X)] = stored[host_X]
        return program(cache, page_X, data)

    def _program(self, cache: Cache, group: int, to_host: bool) -> Any:
        if (group, to_host) not in self._compiled:
            layers = self._config.model.page_groups[group].layers
            page_X = jax.ShapeDtypeStruct((_PAGES * self._config.device_pages,), jnp.int32)
            leaves = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), cache)
            if to_host:
                lowered = jax.jit(functools.partial(_read, layers=layers)).lower(leaves, page_X)
            else:
                stored = self._stored[group]
                data = jax.ShapeDtypeStruct((*page_X.shape, *stored.shape[1:]), stored.dtype)
                write = jax.jit(functools.partial(_write, layers=layers), donate_argnums=0)
                lowered = write.lower(leaves, page_X, data)
            self._compiled[group, to_host] = lowered.compile()
        return self._compiled[group, to_host]


def _kind(transfer: Transfer) -> tuple[int, bool]:
    return transfer.group, transfer.to_host


def _read(cache: Cache, page_X: jax.Array, layers: tuple[int, ...]) -> jax.Array:
    """Pages of all layers of a group, [X, layers, tokens, elements]."""
    return jnp.stack([cache[layer][page_X] for layer in layers], axis=1)


def _write(cache: Cache, page_X: jax.Array, data: jax.Array, layers: tuple[int, ...]) -> Cache:
    """The cache with these pages in place; sinks may be written."""
    order = {layer: i for i, layer in enumerate(layers)}
    return tuple(
        leaf.at[page_X].set(data[:, order[layer]], mode="promise_in_bounds")
        if layer in order
        else leaf
        for layer, leaf in enumerate(cache)
    )
