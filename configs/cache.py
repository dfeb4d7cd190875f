"""The cache algebra: what a layer keeps of the past, declared once.

Allocator, step and planner read the same `CacheSpec`, so a predicted byte is an allocated byte.
Layers whose specs are equal form a page group; a sequence holds one list of pages per group.

A spec says nothing of arrays or devices: `layers/kv_cache.py` turns it into leaves.
"""

import dataclasses
import math
from collections.abc import Sequence

from configs.errors import InputError
from configs.precision import CACHE_FORMATS

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Keys that attention folds in at a time: page tables and padded texts are whole blocks, so that a
# block never ends in the middle of a page.
BLOCK_TOKENS = 128

# Elements of eight bits with one scale: of 256, the largest would decide about too many others.
_SCALED_TOGETHER = 64


@dataclasses.dataclass(frozen=True)
class PageFormat:
    """How a token lies in a page: all that a kernel or a layout of pages is told of it.

    One packed row a token: the keys of all KV heads, then their values. A quantized row is bytes:
    its elements in this order, then the scales of their `groups` in bfloat16.

    Attributes:
        kv_heads: K.
        key_width, value_width: elements of one head's key and of its value.
        values_in_keys: a value is the first `value_width` elements of its key, stored once.
        dtype: of the elements, a key of `DTYPE_BYTES` or of `precision.CACHE_FORMATS`.
    """

    kv_heads: int
    key_width: int
    value_width: int
    values_in_keys: bool
    dtype: str

    @property
    def keys(self) -> slice:
        """Elements of the packed row that are keys."""
        return slice(0, self.kv_heads * self.key_width)

    @property
    def values(self) -> slice:
        """Elements of the packed row that are values."""
        start = 0 if self.values_in_keys else self.keys.stop
        return slice(start, start + self.kv_heads * self.value_width)

    @property
    def row_width(self) -> int:
        """Elements of the packed row."""
        return max(self.keys.stop, self.values.stop)

    @property
    def is_quantized(self) -> bool:
        """Whether elements are numbers of few bits that share scales."""
        return self.dtype not in DTYPE_BYTES

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """(how many, elements of each) of what differs in range, in the row's order: keys and
        values, or the latent and the rotary part of the one key.
        """
        if self.values_in_keys:
            parts = (1, self.value_width), (1, self.key_width - self.value_width)
        else:
            parts = (self.kv_heads, self.key_width), (self.kv_heads, self.value_width)
        return tuple((count, width) for count, width in parts if width)

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """(how many, elements of each) of what shares a scale, in the row's order: of four bits 32
        elements of a part; of eight 64, or the part where its width is no multiple.
        """
        groups = []
        for count, width in self.parts:
            default = width if width % _SCALED_TOGETHER else _SCALED_TOGETHER
            size = CACHE_FORMATS[self.dtype].group or default
            groups.append((count * width // size, size))
        return tuple(groups)

    @property
    def element_bytes(self) -> int:
        """Bytes of a quantized row's elements, which its scales follow."""
        return self.row_width * CACHE_FORMATS[self.dtype].bits // 8

    @property
    def stored_width(self) -> int:
        """Elements of the packed row as they are stored; of a quantized one bytes."""
        if not self.is_quantized:
            return self.row_width
        return self.element_bytes + 2 * sum(count for count, _ in self.groups)

    def padded_width(self, multiple: int) -> int:
        """`stored_width` where memory has whole parts of so many."""
        return -(-self.stored_width // multiple) * multiple

    @property
    def stored_bytes(self) -> int:
        """Bytes of each of `stored_width`."""
        return 1 if self.is_quantized else DTYPE_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the packed row, its scales included."""
        return self.stored_width * self.stored_bytes

    def check(self) -> None:
        """Refuses parts that are no whole groups.

        Raises:
            InputError: naming a width.
        """
        size = CACHE_FORMATS[self.dtype].group
        for _, width in self.parts:
            if size and width % size:
                raise InputError(
                    f"{self.dtype} shares a scale among {size} elements, so keys and values have a "
                    f"multiple of {size}, not {width}; int8 and fp8 have any width"
                )


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """What one layer caches. A spec with neither tokens nor state of its own reads its `owner`'s.

    Attributes:
        kv_heads, key_width, value_width, values_in_keys: of each live token, as `PageFormat`'s.
        index_width: elements of a token's key for the indexer of sparse attention, in pages of
            their own.
        pooled_width: elements of what entries of several tokens are made of, alike.
        has_extremes: a page also has the smallest and the largest of each of its keys' elements, by
            which queries choose pages (Quest, Tang et al. 2024, arXiv 2406.10774).
        states: shapes of recurrent states, float32; kept 1 + k times, so that a rejected draft is
            undone by choosing the state after the last accepted token.
        window: tokens that stay visible, the newest included; None keeps all of them.
        chunked: the sequence is divided into parts of `window` tokens, and a token sees its own
            part as far as itself (Llama 4, Meta 2025), in place of a window that slides.
        first_tokens: of the sequence, which stay visible beside a window that slides (attention
            sinks as tokens; StreamingLLM, Xiao et al. 2023, arXiv 2309.17453).
        stride: tokens that have one entry together, which tells of whole groups of them alone
            (compressed attention; DeepSeek-AI 2026, DeepSeek-V4).
        beside: what else the layer keeps, in pages of a group of its own: the newest tokens one by
            one, and what their entry will be made of.
        owner: index of the earlier layer whose cache this layer reads (cross-layer attention).
    """

    kv_heads: int = 0
    key_width: int = 0
    value_width: int = 0
    values_in_keys: bool = False
    index_width: int = 0
    states: tuple[tuple[int, ...], ...] = ()
    window: int | None = None
    owner: int | None = None
    chunked: bool = False
    first_tokens: int = 0
    has_extremes: bool = False
    pooled_width: int = 0
    stride: int = 1
    beside: "CacheSpec | None" = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise InputError(f"a cache window is at least 1 token, not {self.window}")
        if self.window is None and self.chunked:
            raise InputError("a cache in chunks has a window, which is their length")
        if self.first_tokens < 0:
            raise InputError(f"first_tokens of a cache is at least 0, not {self.first_tokens}")
        if self.first_tokens and (self.window is None or self.chunked):
            raise InputError("first_tokens stay visible beside a window that slides: name one")
        if self.stride < 1 or BLOCK_TOKENS % self.stride:
            raise InputError(
                f"a cache stride is at least 1 token and divides {BLOCK_TOKENS}, {self.stride} "
                f"{'is less' if self.stride < 1 else 'does not'}"
            )
        if self.stride > 1 and (self.window is not None or self.has_extremes):
            raise InputError("a cache with a stride keeps all entries: a window lies beside it")
        if self.beside is not None and (self.beside.stride > 1 or self.beside.beside is not None):
            raise InputError("what a cache has beside its entries is tokens, one by one")
        if self.owner is not None and (self.elements_per_token or self.elements_per_sequence):
            raise InputError("a cache shared with an earlier layer stores nothing of its own")
        if self.states and (self.beside is not None or self.index_width or self.has_extremes):
            raise InputError("states lie beside plain pages, without an index or entries")
        if self.values_in_keys and (self.kv_heads != 1 or self.value_width > self.key_width):
            raise InputError("values lie in keys where there is one KV head and keys are as wide")

    @property
    def parts(self) -> tuple["CacheSpec", ...]:
        """Itself without what lies beside it, and that."""
        if self.beside is None:
            return (self,)
        return dataclasses.replace(self, beside=None), self.beside

    @property
    def elements_per_entry(self) -> int:
        """Elements stored for each live token, or for `stride` of them; of this part alone."""
        values = 0 if self.values_in_keys else self.value_width
        kv_elements = self.kv_heads * (self.key_width + values)
        return kv_elements + self.index_width + self.pooled_width

    @property
    def elements_per_sequence(self) -> int:
        """Elements of the states."""
        return sum(map(math.prod, self.states))

    @property
    def is_state(self) -> bool:
        """Whether states are all that it keeps."""
        return bool(self.states) and not self.elements_per_token

    @property
    def is_pooled(self) -> bool:
        """Whether it is entries of several tokens, or what these are pooled from: no kernel lays
        them out yet.
        """
        return self.stride > 1 or self.pooled_width > 0

    @property
    def elements_per_token(self) -> float:
        """Elements stored for each live token, on average; of this part alone."""
        if self.stride == 1:
            return self.elements_per_entry
        return self.elements_per_entry / self.stride

    @property
    def sight(self) -> str:
        """What a token sees of the past, in a word for plans."""
        if self.stride > 1:
            return f"stride{self.stride}"
        if self.window is None:
            return "all"
        if self.chunked:
            return f"chunk{self.window}"
        return f"window{f'{self.first_tokens}+' if self.first_tokens else ''}{self.window}"

    @property
    def scaled_elements(self) -> float:
        """Elements of a token, on average, that share a scale in eight bits."""
        formats = self._formats("int8")
        scales = sum(count for page_format in formats for count, _ in page_format.groups)
        return self.elements_per_entry / scales if scales else 1

    def page_format(self, dtype: str) -> PageFormat:
        """Format of the pages of keys and values."""
        return PageFormat(
            self.kv_heads, self.key_width, self.value_width, self.values_in_keys, dtype
        )

    def index_format(self, dtype: str) -> PageFormat:
        """Format of the pages of the indexer's keys, which have no values."""
        return PageFormat(1, self.index_width, 0, False, dtype)

    def pooled_format(self, dtype: str) -> PageFormat:
        """Format of the pages of what entries are made of."""
        return PageFormat(1, self.pooled_width, 0, False, dtype)

    def check(self, dtype: str) -> None:
        """Refuses widths that a quantized format cannot have, of this part alone.

        Raises:
            InputError: naming a width.
        """
        for page_format in self._formats(dtype):
            page_format.check()

    def _formats(self, dtype: str) -> tuple[PageFormat, ...]:
        return self.page_format(dtype), self.index_format(dtype), self.pooled_format(dtype)

    @property
    def can_tree(self) -> bool:
        """Whether drafts may branch: pages hold every branch; a recurrent state, an entry of
        several tokens, and what a page's keys have in common, are of one path.
        """
        return self.elements_per_sequence == 0 and not self.has_extremes and self.stride == 1

    def bytes_per_entry(self, dtype: str) -> int:
        """Bytes that each live token, or `stride` of them, add to this part of a layer."""
        return sum(page_format.bytes_per_token for page_format in self._formats(dtype))

    def padding_bytes(self, dtype: str, lanes: int, chips: int = 1) -> int:
        """Bytes that a row takes beyond its own on one of the chips that divide its heads: a latent
        that no entry is pooled from is a multiple of `lanes` elements, a quantized row of as many
        bytes.
        """
        row = dataclasses.replace(self.page_format(dtype), kv_heads=self.kv_heads // chips)
        if self.is_pooled or not (row.values_in_keys or row.is_quantized):
            return 0
        return (row.padded_width(lanes) - row.stored_width) * row.stored_bytes

    @property
    def elements_per_page(self) -> int:
        """Elements that a page of at most `BLOCK_TOKENS` has besides those of its tokens."""
        return 2 * self.kv_heads * self.key_width if self.has_extremes else 0

    def bytes_per_sequence(self, num_drafts: int = 0) -> int:
        """Bytes a sequence holds whatever its length; states are float32, one per verified
        token.
        """
        return self.elements_per_sequence * 4 * (1 + num_drafts)

    def live_from(self, length: int) -> int:
        """First position that the next token (at position `length`) can still see, the first tokens
        aside, which every token can.
        """
        if self.window is None:
            return 0
        if self.chunked:
            return length // self.window * self.window
        return max(0, length + 1 - self.window)

    def sliding(self, page_tokens: int = 1) -> int | None:
        """Tokens of a plain sliding window that never keeps fewer pages than this one, and no more
        but for a chunk that is not full; None: all tokens stay.
        """
        if self.window is None:
            return None
        return self.window + -(-self.first_tokens // page_tokens) * page_tokens

    def dead_pages(self, length: int, page_tokens: int) -> range:
        """Page indices (of the sequence) that no token from position `length` on can see: those
        between the first tokens and the window.
        """
        if self.is_state:  # the newest snapshot tells all
            return range(max(0, length // page_tokens - 1))
        start = -(-self.first_tokens // page_tokens)
        return range(start, max(start, self.live_from(length) // page_tokens))

    def resume_at(self, boundary: int, page_tokens: int) -> Sequence[int]:
        """Page indices a sequence needs to continue at `boundary`, in their order; of a state, the
        page that its snapshot was made at the end of.
        """
        if self.is_state:
            return range(max(0, boundary // page_tokens - 1), boundary // page_tokens)
        dead, stop = self.dead_pages(boundary, page_tokens), -(-boundary // page_tokens)
        live = range(dead.stop, stop)
        return (*range(min(dead.start, stop)), *live) if self.first_tokens else live


def keys_values(
    num_kv_heads: int,
    head_width: int,
    window: int | None = None,
    chunked: bool = False,
    first_tokens: int = 0,
) -> CacheSpec:
    """Paged keys and values: MHA, GQA and MQA differ only in K; a window forgets."""
    widths = num_kv_heads, head_width, head_width
    return CacheSpec(*widths, window=window, chunked=chunked, first_tokens=first_tokens)


def latent(rank: int, rope_width: int) -> CacheSpec:
    """Multi-head latent attention: one vector for all heads and one rotary key a token; the vector
    is the value too.
    """
    return CacheSpec(1, rank + rope_width, rank, values_in_keys=True)


def recurrent(*states: tuple[int, ...]) -> CacheSpec:
    """States of fixed size, by their shapes: SSM, linear attention, the tail of a convolution."""
    return CacheSpec(states=states)


# How the prefix cache sees states: a copy of those of all layers, made at the end of a page, after
# which nothing before it is needed.
SNAPSHOT = CacheSpec(states=((1,),), window=1)
SNAPSHOTS = -1  # which part of a layer's cache these copies are


def shared(owner: int) -> CacheSpec:
    """Cross-layer attention (Brandon et al. 2024, arXiv 2405.12981): reads an earlier layer's
    cache.
    """
    return CacheSpec(owner=owner)


def compressed(
    width: int, stride: int, window: int, index_width: int = 0, pooled_width: int = 0
) -> CacheSpec:
    """One vector for `stride` tokens, key and value of all heads, and the indexer's key of them;
    beside these the newest tokens' own vectors, and what the next entries are pooled from.
    """
    entry = CacheSpec(1, width, width, True, index_width, stride=stride)
    token = CacheSpec(1, width, width, True, pooled_width=pooled_width, window=window)
    return dataclasses.replace(entry, beside=token)


@dataclasses.dataclass(frozen=True)
class PageGroup:
    """Layers with one spec: a sequence's pages in this group hold the same token range in each of
    them.

    Attributes:
        spec: of the part of a layer's cache that these pages hold.
        layers: which have it.
        part: its index in `CacheSpec.parts`.
    """

    spec: CacheSpec
    layers: tuple[int, ...]
    part: int = 0

    def bytes_per_page(self, dtype: str, page_tokens: int, row_multiple: int = 1) -> int:
        """Bytes of one page across the group's layers, with rows as `CacheSpec.padding_bytes` pads
        them.
        """
        entry_bytes = self.spec.bytes_per_entry(dtype)
        entry_bytes += self.spec.padding_bytes(dtype, row_multiple)
        pages = -(-page_tokens // BLOCK_TOKENS)  # on the device
        page_elements = pages * self.spec.elements_per_page  # never quantized
        page_bytes = page_elements * DTYPE_BYTES[dtype] if page_elements else 0
        entries = page_tokens // self.spec.stride
        return (entry_bytes * entries + page_bytes) * len(self.layers)

    def peak_pages(self, num_tokens: int, step_tokens: int, page_tokens: int) -> int:
        """Most pages that one sequence has at once until it has `num_tokens`, of which a step adds
        so many.
        """
        window = self.spec.sliding(page_tokens)
        if window is not None:
            num_tokens = min(num_tokens, window + step_tokens + 2 * page_tokens)
        return -(-num_tokens // page_tokens)


def share_out(
    num_bytes: int,
    page_bytes: Sequence[int],
    expected: Sequence[int],
    longest: Sequence[int],
    max_seqs: int,
) -> tuple[int, ...]:
    """Pages of each group in `num_bytes`: what as many sequences of the expected length need as can
    run at once. Each group has at least what one sequence at its longest needs, and at most what
    `max_seqs` of these do; where not even one of these fits, its needs are the proportions.

    Args:
        page_bytes: of a page of each group.
        expected, longest: `peak_pages` of a sequence of either length.
    """
    groups = range(len(page_bytes))
    sequence_bytes = sum(map(math.prod, zip(longest, page_bytes, strict=True)))
    if sequence_bytes > num_bytes:
        return tuple(max(1, int(num_bytes / sequence_bytes * n)) for n in longest)

    def needed_pages(group: int, sequences: float) -> float:
        return min(max(sequences * expected[group], longest[group]), max_seqs * longest[group])

    def needed_bytes(sequences: float) -> float:
        return sum(needed_pages(group, sequences) * page_bytes[group] for group in groups)

    # Between two marks the needs of some groups grow with the sequences, others are at a bound.
    marks = {
        times * longest[group] / expected[group] for group in groups for times in (1, max_seqs)
    }
    mark = max((mark for mark in marks if needed_bytes(mark) <= num_bytes), default=0.0)
    growing = [
        group
        for group in groups
        if longest[group] <= mark * expected[group] < max_seqs * longest[group]
    ]
    bounded = [group for group in groups if group not in growing]
    left_bytes = num_bytes - sum(needed_pages(group, mark) * page_bytes[group] for group in bounded)
    if growing:
        mark = left_bytes / sum(expected[group] * page_bytes[group] for group in growing)
    return tuple(int(needed_pages(group, mark)) for group in groups)


def page_groups(specs: tuple[CacheSpec, ...]) -> tuple[PageGroup, ...]:
    """Groups the parts of layers that store tokens by equal spec, in order of first appearance."""
    members: dict[tuple[CacheSpec, int], list[int]] = {}
    for layer, spec in enumerate(specs):
        for number, part in enumerate(spec.parts):
            if part.elements_per_token:
                members.setdefault((part, number), []).append(layer)
    return tuple(PageGroup(part, tuple(layers), n) for (part, n), layers in members.items())
