"""What every implementation of attention over pages offers.

It decides the layout of its pages: axis 0 is pages, axis 1 their tokens, axis 2 has the KV heads of
a chip, so that those of several chips lie side by side, and more axes are up to it. Copies on write
and page swapping move whole pages and never look inside.
"""

from typing import NamedTuple, Protocol

import jax

from configs.cache import PageFormat
from layers.kernels.attention.mask import MaskBounds
from layers.kernels.device import Device
from layers.ragged import Ragged, Rectangle


class Demand(NamedTuple):
    """Requirements of layers with one `CacheSpec`, known before anything is allocated."""

    num_heads: int  # N
    page_format: PageFormat
    page_tokens: int
    deterministic: bool
    has_window: bool = False
    table_entries: int = 0  # of the largest rectangle: its rows times their page tables' columns
    has_trees: bool = False  # of drafts
    has_first_tokens: bool = False  # that stay visible beside a window
    has_choice: bool = False  # queries read what they choose (`layers/sparse/chosen.py`)
    has_observers: bool = False  # its pages' keys are read by `layers/sparse/snap.py`, too
    index_width: int = 0  # of the keys by which an indexer chooses
    stride: int = 1  # tokens of an entry (`CacheSpec`)
    query_dtype: str = "bfloat16"


FIRST_TOKENS = "knows no first tokens beside a window: 'reference' does"
CHOICE = "reads all that a query sees, not what it chooses"


def uneven_limit(page_format: PageFormat) -> str | None:
    """`limit` of an implementation that reads keys and values of one width, side by side."""
    if page_format.values_in_keys:
        return "reads values beside their keys, not in them"
    if page_format.key_width != page_format.value_width:
        return (
            f"has keys and values of one width, not {page_format.key_width} and "
            f"{page_format.value_width}"
        )
    return None


class Options(NamedTuple):
    """How a layer computes attention.

    Attributes:
        window: positions that a query sees, its own included.
        sinks_N: float32 [N], a logit of each query head that takes a share of the softmax and adds
            no value (gpt-oss, arXiv 2508.10925); neither scaled nor capped.
        deterministic: a token's bits do not depend on the shape of its rectangle.
        chunked, first_tokens: see `CacheSpec`.
        dtype: that the caller rounds the result to; an implementation may return float32 instead.
    """

    window: int | None = None
    score_cap: float | None = None
    sinks_N: jax.Array | None = None
    deterministic: bool = False
    chunked: bool = False
    first_tokens: int = 0
    dtype: str = "float32"


PLAIN = Options()


class Limit(Protocol):
    """Why an implementation cannot do this and what would work, a phrase after its name; None if it
    can.
    """

    def __call__(self, demand: Demand, device: Device) -> str | None: ...


class Layout(Protocol):
    """Shape and type of a layer's pages, [pages, page tokens, ...]; rows may be padded."""

    def __call__(
        self, num_pages: int, page_tokens: int, page_format: PageFormat
    ) -> jax.ShapeDtypeStruct: ...


class Write(Protocol):
    """Returns the pages with this step's keys and values, in place where `pages` is donated;
    padding goes to page 0. `row_TX` is a packed row a token, [T, 2 K, H] where keys and values are
    of one width, or uint8 [T, X] where it is quantized.
    """

    def __call__(
        self, pages: jax.Array, row_TX: jax.Array, ragged: Ragged, group: int
    ) -> jax.Array: ...


class AttendPages(Protocol):
    """Returns attention of a rectangle over its sequences' pages: [Y, W, N, value width] of float32
    or of `options.dtype`, arbitrary where a token is not valid.

    Args:
        q_YWNH: scaled queries, in the model's precision, which keys and values are brought to.
        pages: with this step's tokens.
        rectangle: positions, validity, bounds (`mask.mask_bounds`) and page tables, [Y, P]; P
            page tokens are a multiple of 128. Where queries choose pages, [Y, K, P]: a table of
            each KV head.
        group: index of the pages' table.
    """

    def __call__(
        self,
        q_YWNH: jax.Array,
        pages: jax.Array,
        rectangle: Rectangle,
        group: int,
        page_format: PageFormat,
        options: Options = PLAIN,
    ) -> jax.Array: ...


class PageBounds(Protocol):
    """Returns what the scores of a page's keys do not exceed, summed over the query heads of each
    KV head: float32 [Y, W, K, P], arbitrary from a row's page `count_Y` on; NaN where elements of
    the KV head's keys or of its queries are.

    Args:
        q_YWNH: scaled queries, in the model's precision.
        extremes: the smallest and the largest of each of the keys' elements, [pages, 2, K H]
            (`kv_cache.Indexed`).
        count_Y: pages of each row to look at, i32[Y].
    """

    def __call__(
        self,
        q_YWNH: jax.Array,
        extremes: jax.Array,
        table_YP: jax.Array,
        count_Y: jax.Array,
        page_format: PageFormat,
        options: Options = PLAIN,
    ) -> jax.Array: ...


class IndexScores(Protocol):
    """Returns what an indexer's heads score the keys in pages of a table, the sum over heads of
    weight x relu(q.k): float32 [Y, W, S], S = P page tokens, arbitrary from a row's key `count_Y`
    on.

    Args:
        q_YWIX: queries, in the model's precision.
        weights_YWI: float32.
        pages: of keys, [pages, page tokens, stored width].
        count_Y: keys of each row to look at, i32[Y].
    """

    def __call__(
        self,
        q_YWIX: jax.Array,
        weights_YWI: jax.Array,
        pages: jax.Array,
        table_YP: jax.Array,
        count_Y: jax.Array,
        index_format: PageFormat,
        options: Options = PLAIN,
    ) -> jax.Array: ...


class Stretch(NamedTuple):
    """A part of the pages that queries read: a table i32[Y, P], or of each KV head [Y, K, P], whose
    P page tokens are a multiple of 128, and bounds by index in the stretch.
    """

    pages: jax.Array
    table_YP: jax.Array
    bounds: MaskBounds


class AttendStretches(Protocol):
    """Returns one softmax over two stretches of pages of a format, the newest tokens and entries of
    several tokens: [Y, W, N, value width] of float32, arbitrary where a token is not valid.

    Args:
        q_YWNH: as of `AttendPages`.
        stretches: with bounds by index in the stretch, ranges without trees; a page has any number
            of rows.
    """

    def __call__(
        self,
        q_YWNH: jax.Array,
        stretches: tuple[Stretch, ...],
        valid_YW: jax.Array,
        page_format: PageFormat,
        options: Options = PLAIN,
    ) -> jax.Array: ...


class AttendPart(Protocol):
    """Returns one softmax over a part of the tokens that queries see, which others complete
    (`mixers/attention.py`): [Y, W, N, value width], and the log-sum-exp of each head's scores,
    [Y, W, N], float32 both, arbitrary where a token is not valid. Where a query sees nothing of the
    part, that is -1e30 or less, and the result is finite. Options have no sinks.

    Args:
        q_YWNH, valid_YW: as of `AttendPages`.
        stretch: the part, whose bounds of consecutive queries are not consecutive, and may leave no
            key; without trees. `options.first_tokens` is the most of `bounds.head_YW`.
    """

    def __call__(
        self,
        q_YWNH: jax.Array,
        stretch: Stretch,
        valid_YW: jax.Array,
        page_format: PageFormat,
        options: Options = PLAIN,
    ) -> tuple[jax.Array, jax.Array]: ...


class AppendAndAttendPart(Protocol):
    """`Write` and `AttendPart` in one kernel: what the latter returns, and the pages with the rows
    of those valid tokens that the chip holds.

    Args:
        row_YWX, kv_position_YW: of all tokens.
        share: which chip this is, and how many divide the tokens (`mask.on_chip`).
    """

    def __call__(
        self,
        q_YWNH: jax.Array,
        row_YWX: jax.Array,
        kv_position_YW: jax.Array,
        share: tuple[jax.Array | int, int],
        stretch: Stretch,
        valid_YW: jax.Array,
        page_format: PageFormat,
        options: Options = PLAIN,
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...


class AppendAndAttend(Protocol):
    """`Write` and `AttendPages` of a rectangle in one kernel: the attention, and the pages with the
    valid tokens' rows.
    """

    def __call__(
        self,
        q_YWNH: jax.Array,
        row_YWX: jax.Array,
        pages: jax.Array,
        rectangle: Rectangle,
        group: int,
        page_format: PageFormat,
        options: Options = PLAIN,
    ) -> tuple[jax.Array, jax.Array]: ...


class Implementation(NamedTuple):
    """Attention over pages on some devices.

    Attributes:
        pads_bytes: its layout pads quantized rows to multiples of `LANES` bytes.
    """

    limit: Limit
    layout: Layout
    write: Write
    attend_pages: AttendPages
    append_and_attend: AppendAndAttend | None = None  # where one kernel does both
    page_bounds: PageBounds | None = None  # None: XLA's products (`layers/sparse/quest.py`)
    index_scores: IndexScores | None = None  # None: XLA's products (`layers/mixers/indexer.py`)
    attend_stretches: AttendStretches | None = None  # None: the reference's
    attend_part: AttendPart | None = None  # None: no chips divide the tokens of a sequence
    append_and_attend_part: AppendAndAttendPart | None = None  # where one kernel does both
    pads_bytes: bool = False
