"""The device side of the cache: one leaf a layer, laid out by its `CacheSpec`.

Pages are token-major, [pages, page tokens, elements], unless the implementation of attention lays
its own out (`layers/kernels/attention/contract.py`); `layers/page_rows.py` has the rows in them.
Page 0, snapshot 0 and the last slot are sinks: padding writes them, nothing reads them. Attention's
sinks (`sinks_N`) are logits instead.

Recurrent states are arrays float32 [slots + 1, 1 + k, ...] of the shapes that a spec names: the
state after position p lives at index p mod (1 + k), so that the committed length alone names the
one to read.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self, cast

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from configs.cache import SNAPSHOTS, CacheSpec, PageFormat, PageGroup
from configs.model import ModelConfig
from layers.backends import backends
from layers.kernels.attention.contract import AttendPages, Options
from layers.page_rows import stored_dtype, token_major
from layers.ragged import Rectangle
from sharding.mesh import GROUPS

# Pages and offsets of tokens, as `Ragged.page_T` gives them.
Places = tuple[jax.Array, jax.Array]


class CacheLeaf:
    """A layer's memory of the past, a frozen pytree; a mixer returns it with the step's tokens."""

    @property
    def as_paged(self) -> "Paged | None":
        """Itself, where attention reads its pages through a page table."""
        return None

    def part(self, number: int) -> "Part":
        """What one page group holds of the leaf, as `CacheSpec.parts` counts them, or its snapshots
        (`cache.SNAPSHOTS`): arrays whose first axis is pages, or snapshots.
        """
        return self

    def with_part(self, number: int, part: "Part") -> "CacheLeaf":
        """The leaf with another such part, of the same structure."""
        assert isinstance(part, CacheLeaf)
        return part

    def copy_pages(self, number: int, source_X: jax.Array, target_X: jax.Array) -> "CacheLeaf":
        """The leaf with whole pages of a part copied, all read before any is written."""
        part = jax.tree.map(
            lambda pages: pages.at[target_X].set(pages[source_X], mode="promise_in_bounds"),
            self.part(number),
        )
        return self.with_part(number, part)

    def move(self, source: Places, target: Places) -> "CacheLeaf":
        """The leaf with tokens' rows copied, all read before any is written."""

        def moved(pages: jax.Array) -> jax.Array:
            row_TX = pages.at[source].get(mode="promise_in_bounds")
            # Fused with what it reads from, the write would need a copy of all pages.
            row_TX = jax.lax.optimization_barrier(row_TX)
            return pages.at[target].set(row_TX, mode="promise_in_bounds")

        return self.with_part(0, jax.tree.map(moved, self.part(0)))

    def start_states(
        self, slot_A: jax.Array, source_A: jax.Array, num_tokens_A: jax.Array, snapshot_A: jax.Array
    ) -> Self:
        """The leaf with the states of started slots: those of the slot that a sequence forks (-1:
        none), those after so many tokens in a snapshot (0: none), or zeros.
        """
        return self

    def keep_states(
        self, slot_A: jax.Array, num_tokens_A: jax.Array, snapshot_A: jax.Array
    ) -> Self:
        """The leaf with snapshots, i32[A] by number, of slots' states after so many tokens."""
        return self


Part = CacheLeaf | tuple[jax.Array, ...]
Cache = tuple[CacheLeaf, ...]  # a leaf a layer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Empty(CacheLeaf):
    """Of a layer that keeps nothing, or reads what an earlier one keeps."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Dense(CacheLeaf):
    """The step's keys and values of a layer without a cache, for layers that share them.

    Attributes:
        k_TKH, v_TKH: of the packed tokens; of latents the key and the latent vector in it.
    """

    k_TKH: jax.Array
    v_TKH: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Paged(CacheLeaf):
    """Pages of keys and values, [pages, page tokens, ...], as the implementation of attention lays
    them out; none is written if `is_read_only`, as tokens are in their pages already.
    """

    pages: jax.Array
    is_read_only: ClassVar[bool] = False

    @property
    def as_paged(self) -> "Paged":
        return self

    @property
    def page_tokens(self) -> int:
        return self.pages.shape[1]

    def with_pages(self, pages: jax.Array) -> Self:
        return dataclasses.replace(self, pages=pages)

    def attend(
        self,
        attend_pages: AttendPages,
        q_YWNH: jax.Array,
        rectangle: Rectangle,
        group: int,
        page_format: PageFormat,
        options: Options,
    ) -> tuple[jax.Array, Self]:
        """What `attend_pages` reads of the pages, and the leaf after that."""
        return attend_pages(q_YWNH, self.pages, rectangle, group, page_format, options), self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Indexed(Paged):
    """Pages, and an index by which queries choose what they read of them.

    Attributes:
        index: an indexer's keys, [pages, page tokens, width]; or the extremes of each element of
            the keys, [pages, 2, K H], arbitrary for a page that is not full
            (`layers/sparse/quest.py`).
    """

    index: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pooled(CacheLeaf):
    """A layer's leaf in two page groups (`CacheSpec.beside`).

    Attributes:
        entries: of several tokens each, [pages, page tokens / stride, width]; `Indexed` where an
            indexer chooses among them.
        tokens: pages of the newest tokens, whose index is pooled to entries,
            [pages, page tokens, pooled width].
    """

    entries: Paged
    tokens: Indexed

    def part(self, number: int) -> Part:
        return self.tokens if number else self.entries

    def with_part(self, number: int, part: Part) -> Self:
        if number:
            return dataclasses.replace(self, tokens=cast("Indexed", part))
        return dataclasses.replace(self, entries=cast("Paged", part))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recurrent(CacheLeaf):
    """States of all sequences: an array of each of `CacheSpec.states`, [slots + 1, 1 + k, ...], and
    snapshots that outlive their sequence, [snapshots, ...] each, a sink first.
    """

    states: tuple[jax.Array, ...]
    snapshots: tuple[jax.Array, ...]

    def part(self, number: int) -> Part:
        return self.snapshots

    def with_part(self, number: int, part: Part) -> Self:
        return dataclasses.replace(self, snapshots=cast("tuple[jax.Array, ...]", part))

    def start_states(
        self, slot_A: jax.Array, source_A: jax.Array, num_tokens_A: jax.Array, snapshot_A: jax.Array
    ) -> Self:
        at_A = self._index(num_tokens_A)

        def started(state: jax.Array, snapshots: jax.Array) -> jax.Array:
            fresh_A = jnp.where(_across(source_A >= 0, state), state[source_A], 0)
            state = state.at[slot_A].set(fresh_A)
            has_snapshot_A = _across(snapshot_A > 0, snapshots)
            state_A = jnp.where(has_snapshot_A, snapshots[snapshot_A], state[slot_A, at_A])
            return state.at[slot_A, at_A].set(state_A)

        return dataclasses.replace(self, states=tuple(map(started, self.states, self.snapshots)))

    def keep_states(
        self, slot_A: jax.Array, num_tokens_A: jax.Array, snapshot_A: jax.Array
    ) -> Self:
        at_A = self._index(num_tokens_A)
        pairs = zip(self.snapshots, self.states, strict=True)
        snapshots = tuple(old.at[snapshot_A].set(state[slot_A, at_A]) for old, state in pairs)
        return dataclasses.replace(self, snapshots=snapshots)

    def _index(self, num_tokens_A: jax.Array) -> jax.Array:
        """Where the state after so many tokens lies."""
        return (num_tokens_A - 1) % self.states[0].shape[1]


def with_states(leaf: Recurrent | None, *states: jax.Array | None) -> Recurrent | None:
    """The leaf with a mixer's states after the step; None where there is no cache."""
    if leaf is None:
        return None
    return dataclasses.replace(leaf, states=tuple(state for state in states if state is not None))


def _across(is_A: jax.Array, like: jax.Array) -> jax.Array:
    return is_A.reshape(-1, *[1] * (like.ndim - 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stateful(CacheLeaf):
    """Of a layer that attends and recurs side by side."""

    paged: Paged
    recurrent: Recurrent

    def part(self, number: int) -> Part:
        return self.recurrent.part(number) if number == SNAPSHOTS else self.paged

    def with_part(self, number: int, part: Part) -> Self:
        if number == SNAPSHOTS:
            return dataclasses.replace(self, recurrent=self.recurrent.with_part(number, part))
        return dataclasses.replace(self, paged=cast("Paged", part))

    def start_states(self, *rows_A: jax.Array) -> Self:
        return dataclasses.replace(self, recurrent=self.recurrent.start_states(*rows_A))

    def keep_states(self, *rows_A: jax.Array) -> Self:
        return dataclasses.replace(self, recurrent=self.recurrent.keep_states(*rows_A))


def keep_states(cache: Cache, *rows_A: jax.Array) -> Cache:
    """The cache with snapshots of states; arguments as `CacheLeaf.keep_states`."""
    return tuple(leaf.keep_states(*rows_A) for leaf in cache)


def start_states(cache: Cache, *rows_A: jax.Array) -> Cache:
    """The cache with states of sequences that start; arguments as `CacheLeaf.start_states`."""
    return tuple(leaf.start_states(*rows_A) for leaf in cache)


def copy_pages(cache: Cache, groups: tuple[PageGroup, ...], copies: Sequence[jax.Array]) -> Cache:
    """Copies whole pages before a step writes: i32[2, X] a page group, from and to; sink to sink:
    no-op.
    """
    leaves = list(cache)
    for group, (source_X, target_X) in zip(groups, copies, strict=True):
        for layer in group.layers:
            leaves[layer] = leaves[layer].copy_pages(group.part, source_X, target_X)
    return tuple(leaves)


Layout = Callable[[int, int, PageFormat], jax.ShapeDtypeStruct]
Arguments = tuple[ModelConfig, tuple[int, ...], int, int, int, Layout | None, int]


def abstract(
    config: ModelConfig,
    num_pages: tuple[int, ...],
    page_tokens: int,
    max_seqs: int,
    num_drafts: int,
    layout: Layout | None = None,
    num_snapshots: int = 1,
) -> Cache:
    """Shapes of the cache: `num_pages` counts each page group's pages, the sink included, as does
    `num_snapshots`; `layout` is that of the chosen attention, None for any that is token-major.
    """

    def paged(layer: int, spec: CacheSpec, group: int) -> Paged:
        size, dtype = (num_pages[group], page_tokens // spec.stride), config.cache_dtype
        is_attention = config.layers[layer].mixer.query_heads > 0
        of_format = layout if layout is not None and is_attention else token_major
        pages = cast("jax.Array", of_format(*size, spec.page_format(dtype)))
        index = _index(spec, *size, dtype)
        return Paged(pages) if index is None else Indexed(pages, cast("jax.Array", index))

    def leaf(layer: int) -> CacheLeaf:
        spec = config.cache_specs[layer]
        if not spec.elements_per_token:
            return recurrent(spec) if spec.states else Empty()
        parts = zip(spec.parts, config.groups_of_layer[layer], strict=True)
        first, *tokens = (paged(layer, part, group) for part, group in parts)
        if spec.states:
            return Stateful(first, recurrent(spec))
        return Pooled(first, *tokens) if tokens else first  # type: ignore[arg-type]

    def recurrent(spec: CacheSpec) -> Recurrent:
        def arrays(*rows: int) -> tuple[jax.Array, ...]:
            shapes = (jax.ShapeDtypeStruct((*rows, *x), jnp.float32) for x in spec.states)
            return cast("tuple[jax.Array, ...]", tuple(shapes))

        return Recurrent(arrays(max_seqs + 1, 1 + num_drafts), arrays(num_snapshots))

    return tuple(leaf(layer) for layer in range(config.num_layers))


def specs(model: ModelConfig, chip_model: ModelConfig) -> Cache:
    """Partition specs of a cache over a mesh (`sharding/mesh.py`), of the whole model and of a
    chip's. Pages, slots and snapshots are divided among groups of chips; tokens of a page along
    `context`, in the order of its chips; and along `model` the one other axis that is smaller on a
    chip, where it has its heads, keys before values. Chips have copies of a single head, and
    entries of their own that are copies or zeros where several heads are not divided evenly.
    """

    def shapes(model: ModelConfig) -> Cache:
        pages = (1,) * len(model.page_groups)
        return abstract(model, pages, model.stride, 0, 0)

    def spec(path: tuple[object, ...], whole: jax.Array, chip: jax.Array) -> PartitionSpec:
        sizes = zip(whole.shape, chip.shape, strict=True)
        axes: list[str | tuple[str, ...] | None] = [
            None if size == chip_size else "model" for size, chip_size in sizes
        ]
        axes[0] = GROUPS
        if path[-1] == jax.tree_util.GetAttrKey("pages"):
            axes[1] = "context"
        return PartitionSpec(*axes)

    of_leaves: Cache = jax.tree_util.tree_map_with_path(spec, shapes(model), shapes(chip_model))
    return of_leaves


def _index(
    spec: CacheSpec, num_pages: int, page_tokens: int, dtype: str
) -> jax.ShapeDtypeStruct | None:
    """What lies in pages of its own by those of keys and values; None: nothing does."""
    if spec.has_extremes:
        shape = num_pages, 2, spec.kv_heads * spec.key_width
        return jax.ShapeDtypeStruct(shape, stored_dtype(dtype))
    if spec.index_width:
        return token_major(num_pages, page_tokens, spec.index_format(dtype))
    if spec.pooled_width:
        return token_major(num_pages, page_tokens, spec.pooled_format(dtype))
    return None


def init(*args: Any) -> Cache:
    """An empty cache; arguments as `abstract`. With kernels of rows it takes memory as it fills."""
    rows = backends.current().rows
    zeros = rows.zeros if rows is not None else lambda leaf: jnp.zeros(leaf.shape, leaf.dtype)
    return jax.tree.map(zeros, abstract(*args))
