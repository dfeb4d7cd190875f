"""The device side of the cache: one leaf a layer, laid out by its `CacheSpec`.

Pages are token-major, [pages, page tokens, elements], unless the implementation of attention lays
its own out (`layers/kernels/attention/contract.py`). Page 0 and the last slot are sinks for
padding: nothing reads them. bfloat16 elements are kept as their bits in uint16: XLA's CPU backend
rewrites a whole bfloat16 array for every scatter and converts it to float32 for every gather,
integers stay in place.

Quantized rows are bytes, made of a token's own numbers and never revised: elements, then a scale in
bfloat16 of each of their groups. A kernel never sees what wrote them, and nothing that copies pages
knows of them.

Recurrent states are arrays float32 [slots + 1, 1 + k, ...] of the shapes that a spec names: the
state after position p lives at index p mod (1 + k), so that the committed length alone names the
one to read.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from configs.cache import SNAPSHOTS, CacheSpec, PageFormat, PageGroup
from configs.model import ModelConfig
from configs.precision import CACHE_FORMATS
from layers.kernels.cpu import rows
from layers.kernels.device import has_free_views
from layers.ragged import Ragged

CacheLeaf = Any  # an array, or a pytree of arrays: pages and what belongs to them
Cache = tuple[CacheLeaf, ...]  # a leaf a layer, None where it reads another's

# What the largest element of a group may become; the first is the largest of the format.
_LARGEST = {"int8": (127,), "fp8": (448, 416, 384, 352, 320, 288, 256), "int4": (7,)}
_FP8_MANTISSA = 3  # bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Indexed:
    """Pages, and by what queries choose what they read of them.

    Attributes:
        pages: of keys and values.
        index: an indexer's keys, [pages, page tokens, width]; or the smallest and the largest of
            each of the keys' elements, [pages, 2, K H], where nothing is told of a page that is not
            full (`layers/sparse/quest.py`).
    """

    pages: CacheLeaf
    index: CacheLeaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Compressed:
    """What a layer keeps in two page groups (`CacheSpec.beside`).

    Attributes:
        entries: of several tokens each, [pages, page tokens / stride, width]; `Indexed` where an
            indexer chooses among them.
        tokens: `Indexed` pages of the newest tokens, whose index is what entries are pooled from,
            [pages, page tokens, pooled width].
    """

    entries: CacheLeaf
    tokens: Indexed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Recurrent:
    """What a layer keeps that has states.

    Attributes:
        states: an array of each that `CacheSpec.states` names, [slots + 1, 1 + k, ...].
        snapshots: copies of states that outlive their sequence, [snapshots, ...] each; the first is
            a sink. A mixer gets the states alone.
    """

    states: tuple[CacheLeaf, ...]
    snapshots: tuple[CacheLeaf, ...]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stateful:
    """What a layer gets that attends and recurs side by side; with its snapshots, `Recurrent` is
    what stands for its states.

    Attributes:
        pages: of keys and values.
        states: a tuple of arrays, as `CacheSpec.states` names them.
    """

    pages: CacheLeaf
    states: CacheLeaf


def part(cache: Cache, layer: int, number: int) -> CacheLeaf:
    """Pages of one part of what a layer keeps, as `CacheSpec.parts` counts them; or snapshots
    (`cache.SNAPSHOTS`).
    """
    leaf = cache[layer]
    if number == SNAPSHOTS:
        return (leaf.states if isinstance(leaf, Stateful) else leaf).snapshots
    if isinstance(leaf, Stateful):
        return leaf.pages
    if not isinstance(leaf, Compressed):
        return leaf
    return leaf.tokens if number else leaf.entries


def with_part(cache: Cache, layer: int, number: int, pages: CacheLeaf) -> Cache:
    """The cache with other pages there."""
    leaf = cache[layer]
    if number == SNAPSHOTS:
        kept = with_states((leaf,), lambda own: dataclasses.replace(own, snapshots=pages))
        return (*cache[:layer], *kept, *cache[layer + 1 :])
    if isinstance(leaf, Stateful):
        pages = dataclasses.replace(leaf, pages=pages)
    if isinstance(leaf, Compressed):
        pages = dataclasses.replace(leaf, **{"tokens" if number else "entries": pages})
    return (*cache[:layer], pages, *cache[layer + 1 :])


def of_mixer(leaf: CacheLeaf) -> CacheLeaf:
    """What a mixer gets of its layer's leaf: all but snapshots."""
    if isinstance(leaf, Recurrent):
        return leaf.states
    if isinstance(leaf, Stateful):
        return dataclasses.replace(leaf, states=leaf.states.states)
    return leaf


def from_mixer(leaf: CacheLeaf, returned: CacheLeaf) -> CacheLeaf:
    """A layer's leaf with what its mixer returned."""
    if isinstance(leaf, Recurrent):
        return dataclasses.replace(leaf, states=returned)
    if isinstance(leaf, Stateful):
        states = dataclasses.replace(leaf.states, states=returned.states)
        return dataclasses.replace(returned, states=states)
    return returned


def with_states(cache: Cache, change: Callable[[Recurrent], Recurrent]) -> Cache:
    """The cache with the states and snapshots of each layer changed."""

    def changed(leaf: CacheLeaf) -> CacheLeaf:
        if isinstance(leaf, Stateful):
            return dataclasses.replace(leaf, states=change(leaf.states))
        return change(leaf) if isinstance(leaf, Recurrent) else leaf

    return tuple(map(changed, cache))


def keep_states(
    cache: Cache, slot_A: jax.Array, num_tokens_A: jax.Array, snapshot_A: jax.Array
) -> Cache:
    """Makes snapshots, i32[A] by number, of these slots' states after so many tokens."""

    def keep(leaf: Recurrent) -> Recurrent:
        at_A = (num_tokens_A - 1) % leaf.states[0].shape[1]
        kept = zip(leaf.snapshots, leaf.states, strict=True)
        made = tuple(own.at[snapshot_A].set(state[slot_A, at_A]) for own, state in kept)
        return dataclasses.replace(leaf, snapshots=made)

    return with_states(cache, keep)


def start_states(
    cache: Cache,
    slot_A: jax.Array,
    source_A: jax.Array,
    num_tokens_A: jax.Array,
    snapshot_A: jax.Array,
) -> Cache:
    """Writes the states of slots that sequences start in: those of the slot that one was forked
    from (-1: of none), or those after so many tokens that a snapshot holds (0: none does), or
    zeros.
    """

    def start(leaf: Recurrent) -> Recurrent:
        at_A = (num_tokens_A - 1) % leaf.states[0].shape[1]

        def started(state: jax.Array, kept: jax.Array) -> jax.Array:
            fresh_A = jnp.where(_across(source_A >= 0, state), state[source_A], 0)
            state = state.at[slot_A].set(fresh_A)
            own_A = jnp.where(_across(snapshot_A > 0, kept), kept[snapshot_A], state[slot_A, at_A])
            return state.at[slot_A, at_A].set(own_A)

        pairs = zip(leaf.states, leaf.snapshots, strict=True)
        return dataclasses.replace(leaf, states=tuple(started(*pair) for pair in pairs))

    return with_states(cache, start)


def _across(is_A: jax.Array, like: jax.Array) -> jax.Array:
    return is_A.reshape(-1, *[1] * (like.ndim - 1))


def abstract(
    config: ModelConfig,
    num_pages: tuple[int, ...],
    page_tokens: int,
    max_seqs: int,
    num_drafts: int,
    layout: Callable[[int, int, PageFormat], CacheLeaf] | None = None,
    num_snapshots: int = 1,
) -> Cache:
    """Shapes of the cache: `num_pages` counts each page group's pages, the sink included, as does
    `num_snapshots`; `layout` is that of the chosen attention, None for any that is token-major.
    """

    def paged(layer: int, spec: CacheSpec, group: int) -> CacheLeaf:
        pages, dtype = (num_pages[group], page_tokens // spec.stride), config.cache_dtype
        is_attention = config.layers[layer].mixer.query_heads > 0
        of_format = layout if layout is not None and is_attention else token_major
        leaf = of_format(*pages, spec.page_format(dtype))
        if spec.has_extremes:
            return Indexed(leaf, _extremes(pages[0], spec, dtype))
        if spec.index_width:
            return Indexed(leaf, token_major(*pages, spec.index_format(dtype)))
        if spec.pooled_width:
            return Indexed(leaf, token_major(*pages, spec.pooled_format(dtype)))
        return leaf

    def leaf(layer: int) -> CacheLeaf:
        spec = config.cache_specs[layer]
        if spec.elements_per_token:
            groups = config.groups_of_layer[layer]
            found = [paged(layer, *own) for own in zip(spec.parts, groups, strict=True)]
            if spec.states:
                return Stateful(found[0], states(spec))
            return found[0] if spec.beside is None else Compressed(*found)
        return states(spec) if spec.states else None

    def states(spec: CacheSpec) -> Recurrent:
        def arrays(*rows: int) -> tuple[jax.ShapeDtypeStruct, ...]:
            return tuple(
                jax.ShapeDtypeStruct((*rows, *shape), jnp.float32) for shape in spec.states
            )

        return Recurrent(arrays(max_seqs + 1, 1 + num_drafts), arrays(num_snapshots))

    return tuple(leaf(layer) for layer in range(config.num_layers))


def init(*args: Any) -> Cache:
    """An empty cache; same arguments as `abstract`. By the native library (`rows.native`) it takes
    memory as it fills.
    """
    return jax.tree.map(_zeros, abstract(*args))


def _zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    return rows.zeros(leaf) if rows.is_native() else jnp.zeros(leaf.shape, leaf.dtype)


def token_major(num_pages: int, page_tokens: int, page_format: PageFormat) -> jax.ShapeDtypeStruct:
    """Pages of one packed row a token."""
    shape = num_pages, page_tokens, page_format.stored_width
    dtype = "uint8" if page_format.is_quantized else page_format.dtype
    return jax.ShapeDtypeStruct(shape, stored_dtype(dtype))


def _extremes(num_pages: int, spec: CacheSpec, dtype: str) -> jax.ShapeDtypeStruct:
    shape = num_pages, 2, spec.kv_heads * spec.key_width
    return jax.ShapeDtypeStruct(shape, stored_dtype(dtype))


def stored_dtype(dtype: str) -> Any:
    """Type that holds elements of a dtype in pages."""
    return jnp.uint16 if dtype == "bfloat16" else jnp.dtype(dtype)


def encode(x: jax.Array, pages: jax.Array) -> jax.Array:
    """Elements as `pages` stores them."""
    if pages.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    return x.astype(pages.dtype)


def decode(stored: jax.Array) -> jax.Array:
    """Stored elements as numbers."""
    return (
        jax.lax.bitcast_convert_type(stored, jnp.bfloat16) if stored.dtype == jnp.uint16 else stored
    )


def quantize(row_TX: jax.Array, page_format: PageFormat) -> jax.Array:
    """Packed rows, [T, ...] of any shape, as a quantized format stores them: uint8
    [T, stored width]. Elements are multiples of their group's scale, the largest of them the most
    that the format has. Of fp8, whose steps grow with the number, one of the larger of its numbers
    instead: that which leaves the least squared error. A group that holds what is not finite has a
    scale of NaN.
    """
    row_TX = row_TX.reshape(row_TX.shape[0], -1).astype(jnp.float32)
    elements, scales, start = [], [], 0
    for count, size in page_format.groups:
        stop = start + count * size
        x_TGE = row_TX[:, start:stop].reshape(-1, count, size)
        start = stop
        scale_TG1 = _scale(x_TGE, page_format.dtype)
        is_finite_TG1 = jnp.isfinite(x_TGE).all(-1, keepdims=True)
        is_zero_TG1 = scale_TG1 < jnp.finfo(jnp.bfloat16).tiny
        scale_TG1 = jnp.where(is_finite_TG1, jnp.where(is_zero_TG1, 0, scale_TG1), jnp.nan)
        inverse_TG1 = 1 / scale_TG1.astype(jnp.float32)
        x_TGE = jnp.where(is_finite_TG1 & ~is_zero_TG1, x_TGE * inverse_TG1, 0)
        elements.append(_as_bytes(x_TGE, page_format.dtype).reshape(len(x_TGE), -1))
        scale_TG = scale_TG1[..., 0].astype(jnp.bfloat16)
        scales.append(jax.lax.bitcast_convert_type(scale_TG, jnp.uint8).reshape(len(x_TGE), -1))
    return jnp.concatenate([*elements, *scales], axis=1)


def _scale(x_TGE: jax.Array, format: str) -> jax.Array:
    """A scale of each group, bfloat16 [T, G, 1], rounded before elements become multiples of it.

    Nothing is divided by an array but 1, as XLA's CPU backend rounds other quotients as the shape
    has it. Errors are compared as sums of integers, which have no order; products of few bits are
    exact, fused with a sum or not.
    """
    largest_TG1 = jnp.abs(x_TGE).max(-1, keepdims=True)
    candidates = [(largest_TG1 * (1 / most)).astype(jnp.bfloat16) for most in _LARGEST[format]]
    best_TG1, *others = candidates
    if not others:
        return best_TG1

    def error(scale_TG1: jax.Array) -> jax.Array:
        scale_TG1 = scale_TG1.astype(jnp.float32)
        rounded_TGE = jax.lax.reduce_precision(x_TGE * (1 / scale_TG1), 8, _FP8_MANTISSA)
        share_TGE = (rounded_TGE * scale_TG1 - x_TGE) * (1 / largest_TG1)
        return (jnp.round(share_TGE * 2.0**14).astype(jnp.int32) ** 2).sum(-1, keepdims=True)

    least_TG1 = error(best_TG1)
    for scale_TG1 in others:
        own_TG1 = error(scale_TG1)
        best_TG1 = jnp.where(own_TG1 < least_TG1, scale_TG1, best_TG1)
        least_TG1 = jnp.minimum(own_TG1, least_TG1)
    return best_TG1


def numbers(stored_TX: jax.Array, page_format: PageFormat, dtype: Any) -> jax.Array:
    """Rows of any format as numbers; quantized ones of a type."""
    if page_format.is_quantized:
        return dequantize(stored_TX, page_format, dtype)
    return decode(stored_TX)


def as_stored(row_TX: jax.Array, page_format: PageFormat) -> jax.Array:
    """Rows [T, ...] as `write` takes them for pages of a format."""
    return quantize(row_TX, page_format) if page_format.is_quantized else row_TX


def dequantize(stored_TX: jax.Array, page_format: PageFormat, dtype: Any) -> jax.Array:
    """Rows of a quantized format, uint8 [..., stored width], as numbers of a type: [..., row
    width].
    """
    bits = CACHE_FORMATS[page_format.dtype].bits
    start, scales_at, rows = 0, page_format.element_bytes, []
    for count, size in page_format.groups:
        stop, scales_stop = start + count * size * bits // 8, scales_at + 2 * count
        bytes_TGX = stored_TX[..., start:stop].reshape(*stored_TX.shape[:-1], count, -1)
        pairs_TG2 = stored_TX[..., scales_at:scales_stop].reshape(*bytes_TGX.shape[:-1], 2)
        scale_TG = jax.lax.bitcast_convert_type(pairs_TG2, jnp.bfloat16).astype(jnp.float32)
        x_TGE = _as_numbers(bytes_TGX, page_format.dtype) * scale_TG[..., None]
        # Rounded here, whatever XLA would like to compute with instead.
        kept = jnp.finfo(dtype)
        x_TGE = jax.lax.reduce_precision(x_TGE, kept.nexp, kept.nmant)
        rows.append(x_TGE.astype(dtype).reshape(*stored_TX.shape[:-1], count * size))
        start, scales_at = stop, scales_stop
    return jnp.concatenate(rows, axis=-1)


def _as_bytes(x_TGE: jax.Array, format: str) -> jax.Array:
    """Multiples of a scale, rounded to even, as bytes; of four bits the first half of a group lies
    in the low ones.
    """
    most = _LARGEST[format][0]
    x_TGE = jnp.clip(x_TGE, -most, most)
    if format == "fp8":
        return jax.lax.bitcast_convert_type(x_TGE.astype(jnp.float8_e4m3fn), jnp.uint8)
    rounded_TGE = jnp.round(x_TGE).astype(jnp.int8)
    if format == "int8":
        return jax.lax.bitcast_convert_type(rounded_TGE, jnp.uint8)
    low, high = jnp.split((rounded_TGE + 8).astype(jnp.uint8), 2, axis=-1)
    return low | high << 4


def _as_numbers(bytes_TGX: jax.Array, format: str) -> jax.Array:
    """Inverse of `_as_bytes`, in float32."""
    if format == "int4":
        halves = jnp.concatenate([bytes_TGX & 15, bytes_TGX >> 4], axis=-1)
        return halves.astype(jnp.float32) - 8
    dtype = jnp.float8_e4m3fn if format == "fp8" else jnp.int8
    return jax.lax.bitcast_convert_type(bytes_TGX, dtype).astype(jnp.float32)


def write(pages: jax.Array, row_TX: jax.Array, ragged: Ragged, group: int) -> jax.Array:
    """Stores a row of elements of each packed token, in place where `pages` is donated.

    `row_TX` is [T, ...] of any shape, such as [T, 2 K, H]: pages are viewed in it, since XLA's CPU
    backend computes a reshape of the elements one by one, unless that would be a copy of the pages.
    """
    page_T, offset_T = ragged.page_T(group, pages.shape[1])
    if not has_free_views():
        row_TX = row_TX.reshape(-1, *pages.shape[2:])
    view = pages.reshape(*pages.shape[:2], *row_TX.shape[1:])
    view = view.at[page_T, offset_T].set(encode(row_TX, pages), mode="promise_in_bounds")
    return view.reshape(pages.shape)


def copy_pages(cache: Cache, groups: tuple[PageGroup, ...], copies: Sequence[jax.Array]) -> Cache:
    """Copy-on-write: whole pages, before anything of the step is written.

    Args:
        cache: all leaves.
        groups: the page groups.
        copies: i32[2, X] of each, from and to; sink to sink is a no-op.
    """
    for group, (source_X, target_X) in zip(groups, copies, strict=True):
        for layer in group.layers:
            leaf = part(cache, layer, group.part)
            cache = with_part(cache, layer, group.part, _copied(leaf, source_X, target_X))
    return cache


def _copied(leaf: CacheLeaf, source_X: jax.Array, target_X: jax.Array) -> CacheLeaf:
    return jax.tree.map(
        lambda pages: pages.at[target_X].set(pages[source_X], mode="promise_in_bounds"), leaf
    )


def move(
    leaf: CacheLeaf,
    source: tuple[jax.Array, jax.Array],
    target: tuple[jax.Array, jax.Array],
) -> CacheLeaf:
    """Copies tokens' entries, all read before any is written; each is (pages, offsets) as
    `Ragged.page_T` gives them.
    """

    def moved(pages: jax.Array) -> jax.Array:
        row_TX = pages.at[source].get(mode="promise_in_bounds")
        # Fused with what it reads from, the write would need a copy of all pages.
        row_TX = jax.lax.optimization_barrier(row_TX)
        return pages.at[target].set(row_TX, mode="promise_in_bounds")

    return jax.tree.map(moved, leaf)
