"""What every implementation of attention over pages offers.

It owns the layout of its pages: axis 0 counts pages and axis 1 their tokens, the rest is its own
affair. Copies on write and the host tier move whole pages, whatever is in them.
"""

from typing import NamedTuple, Protocol

import jax

from layers.kernels.device import Device
from layers.ragged import Ragged, Rectangle


class Demand(NamedTuple):
    """What is asked of an implementation, known before anything is allocated."""

    num_heads: int  # N
    num_kv_heads: int  # K
    head_width: int  # H
    page_tokens: int
    dtype: str  # of queries, keys and values
    deterministic: bool
    has_windows: bool = False  # in any layer
    table_entries: int = 0  # of the largest rectangle: its rows times their page tables' columns


class Options(NamedTuple):
    """How a layer attends.

    Attributes:
        window: positions that a query sees, its own included.
        score_cap: soft limit of the scores.
        sinks_N: float32 [N], a logit a query head that takes its share of the softmax and brings no
            value (gpt-oss, arXiv 2508.10925); not scaled, not capped.
        deterministic: same bits for a token whatever the rectangle.
    """

    window: int | None = None
    score_cap: float | None = None
    sinks_N: jax.Array | None = None
    deterministic: bool = False


PLAIN = Options()


class Limit(Protocol):
    """`limit` of an implementation."""

    def __call__(self, demand: Demand, device: Device) -> str | None:
        """What keeps it from this on that device and what would work, to be read after its name;
        None: nothing.
        """


class Layout(Protocol):
    """`layout` of an implementation."""

    def __call__(
        self, num_pages: int, page_tokens: int, num_kv_heads: int, head_width: int, dtype: str
    ) -> jax.ShapeDtypeStruct:
        """Shape and stored type of a layer's pages, [pages, page tokens, ...]."""


class Write(Protocol):
    """`write` of an implementation."""

    def __call__(
        self, pages: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, ragged: Ragged, group: int
    ) -> jax.Array:
        """The pages with this step's keys and values, in place where `pages` is donated; padding
        goes to page 0.
        """


class AttendPages(Protocol):
    """`attend_pages` of an implementation."""

    def __call__(
        self,
        q_CWNH: jax.Array,
        pages: jax.Array,
        rectangle: Rectangle,
        group: int,
        options: Options = PLAIN,
    ) -> jax.Array:
        """Attention of a rectangle over its sequences' pages: float32 [C, W, N, H], whatever where
        a token is not valid.

        Args:
            q_CWNH: scaled queries, in the cache's precision.
            pages: with this step's tokens.
            rectangle: where the queries stand, which are valid, what they see (`mask.sight_of`) and
                the page tables, [C, P]; P page tokens are a multiple of 128.
            group: index of the pages' table.
            options: of the layer.
        """


class AppendAndAttend(Protocol):
    """`append_and_attend` of an implementation: for a rectangle both of the above at once."""

    def __call__(
        self,
        q_CWNH: jax.Array,
        k_CWKH: jax.Array,
        v_CWKH: jax.Array,
        pages: jax.Array,
        rectangle: Rectangle,
        group: int,
        options: Options = PLAIN,
    ) -> tuple[jax.Array, jax.Array]:
        """The attention, and the pages with the valid tokens' keys and values; arguments as
        there.
        """


class Implementation(NamedTuple):
    """Attention over pages on some devices."""

    limit: Limit
    layout: Layout
    write: Write
    attend_pages: AttendPages
    append_and_attend: AppendAndAttend | None = None  # where one kernel does both
