"""What stays of a tree of drafts once it is verified: the accepted path, made a chain."""

import dataclasses

import jax
import jax.numpy as jnp

from configs.cache import PageGroup
from layers.kv_cache import Cache
from layers.ragged import Ragged, Rectangle


def take(x_RN: jax.Array, path_RW: jax.Array) -> jax.Array:
    """What belongs to the path's nodes: [R, N, ...] -> [R, W, ...]."""
    index = jnp.maximum(path_RW, 0).reshape(*path_RW.shape, *[1] * (x_RN.ndim - 2))
    return jnp.take_along_axis(x_RN, index, axis=1)


class AcceptedPath:
    """The accepted paths of a step whose first rectangle was trees; `ragged` as if fed alone."""

    def __init__(self, ragged: Ragged, path_RW: jax.Array):
        """`ragged`: the step; `path_RW` as `trees.Accepted` has it."""
        trees, *prompts = ragged.rectangles
        is_kept_RW = (path_RW >= 0) & trees.valid_YW[:, :1]
        nth_W = jnp.arange(path_RW.shape[1], dtype=jnp.int32)
        root_R1, newest_R1 = trees.position_YW[:, :1], trees.position_YW.max(1, keepdims=True)

        def at(nth_RW: jax.Array) -> Rectangle:
            position_RW = jnp.where(is_kept_RW, root_R1 + nth_RW, newest_R1)
            return Rectangle(trees.slot_Y, position_RW, is_kept_RW, trees.tables)

        self._fed, self._path_RW = ragged, path_RW
        self._before, after = at(path_RW), at(jnp.broadcast_to(nth_W, path_RW.shape))
        self.ragged = dataclasses.replace(ragged, rectangles=(after, *prompts))

    def along(self, x_T: jax.Array) -> jax.Array:
        """What was fed, [T, ...], as `ragged` packs it."""
        trees, *prompts = self._fed.split(x_T)
        return self.ragged.pack([take(trees, self._path_RW), *prompts])

    def moved(self, cache: Cache, groups: tuple[PageGroup, ...]) -> Cache:
        """Each layer's cache with the path's entries one behind the other."""
        chain, leaves = self.ragged.rectangles[0], list(cache)
        for index, group in enumerate(groups):  # of tokens, one by one: others know no trees
            for layer in group.layers:
                size = jax.tree.leaves(cache[layer])[0].shape[1]
                source, target = (Ragged((r,)).page_T(index, size) for r in (self._before, chain))
                leaves[layer] = cache[layer].move(source, target)
        return tuple(leaves)
