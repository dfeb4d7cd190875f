"""The random batches that kernels are tested with on a device."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from configs.cache import PageFormat
from tests.layers import paged_case
from tests.layers.paged_case import Sight

_SEQUENCES, _MOST_TOKENS = 6, 500


class Rows(NamedTuple):
    """What the batches of one case have in common."""

    heads: tuple[int, int]  # N, K
    head_width: int
    page_tokens: int
    queries: int
    dtype: str = "bfloat16"
    window: int | None | Sight = None
    cap: float | None = None
    has_sinks: bool = False
    masks: Mapping[str, Any] = {}
    latent_width: int | None = None  # of values that are what their keys begin with


DECODE = {
    "llama3-8b": Rows((32, 8), 128, 64, 1),
    "llama3-8b, large pages": Rows((32, 8), 128, 128, 1, window=200),
    "one KV head": Rows((16, 1), 64, 64, 1, "float16", has_sinks=True),
    "odd group, cap": Rows((9, 3), 64, 64, 1, window=90, cap=3.0),
    "drafts": Rows((8, 2), 128, 64, 5, window=70),
    "first tokens": Rows((8, 2), 64, 64, 1, window=Sight(40, first_tokens=70)),
}
OTHERS = {
    "a tree": Rows((4, 2), 64, 64, 8, has_sinks=True, masks={"trees": True}),
    "a tree, window": Rows((4, 4), 128, 64, 16, window=5, masks={"trees": True}),
    "a canvas": Rows((4, 2), 64, 64, 40, "float16", masks={"canvases": True}),
    "first tokens, drafts": Rows((32, 8), 128, 64, 5, window=Sight(100, first_tokens=4)),
    "first tokens, a prompt": Rows((8, 2), 128, 64, 40, window=Sight(24, first_tokens=140)),
    "chunks": Rows((8, 2), 128, 64, 5, window=Sight(70, chunked=True)),
    "a prompt": Rows((32, 8), 128, 64, 64),
    "wide heads": Rows((8, 4), 256, 64, 33, window=100, cap=50.0),
    "a prompt, wide heads": Rows((16, 8), 256, 64, 40, window=100, cap=50.0),
    "a prompt, odd group": Rows((24, 8), 64, 128, 40, window=90),
    "a prompt, many heads": Rows((64, 8), 64, 64, 70, "float16"),
    "a wide tree": Rows((64, 8), 128, 64, 16, window=5, masks={"trees": True}),
    "a wide canvas": Rows((32, 8), 64, 64, 40, masks={"canvases": True}),
}
LATENTS = {
    "deepseek-v2-lite": Rows((16, 1), 576, 64, 1, latent_width=512),
    "deepseek-v3": Rows((128, 1), 576, 64, 1, latent_width=512),
    "latents, drafts": Rows((16, 1), 576, 64, 4, latent_width=512),
    "latents, a tree": Rows((16, 1), 192, 64, 8, has_sinks=True, masks={"trees": True},
                            latent_width=128),
    "latents, a chunk": Rows((16, 1), 576, 64, 40, latent_width=512),
}  # fmt: skip
CASES = DECODE | OTHERS | LATENTS


def page_format(case: str) -> PageFormat:
    rows = CASES[case]
    num_kv_heads, H = rows.heads[1], rows.head_width
    is_latent = rows.latent_width is not None
    return PageFormat(num_kv_heads, H, rows.latent_width or H, is_latent, rows.dtype)


def lengths(case: str, seed: int) -> list[int]:
    """Of the sequences: one ends near the end of a page, of the others some are empty."""
    generator, page_tokens = np.random.default_rng(seed), CASES[case].page_tokens
    drawn = generator.integers(0, _MOST_TOKENS, _SEQUENCES)
    drawn[generator.random(_SEQUENCES) > 0.9] = 0
    drawn[0] = generator.choice([1, page_tokens - 1, page_tokens, page_tokens + 1])
    return drawn.tolist()


def draw(case: str, seed: int) -> tuple[paged_case.Case, np.ndarray | None, np.ndarray]:
    """The sequences, their sinks, and which queries are compared with float64: bool[Y, W], of each
    row the first, the last and one between.
    """
    rows, generator = CASES[case], np.random.default_rng(seed)
    drawn = paged_case.Case(
        lengths(case, seed), rows.heads, rows.page_tokens, rows.queries, rows.dtype, seed,
        rows.head_width, rows.head_width**-0.5, value_width=rows.latent_width,
        values_in_keys=rows.latent_width is not None, **rows.masks,
    )  # fmt: skip
    sinks_N = np.float32(generator.normal(size=rows.heads[0]) * 3) if rows.has_sinks else None
    asked_YW = np.zeros_like(drawn.valid_YW)
    for row, count in enumerate(drawn.valid_YW.sum(1)):
        if count:
            asked_YW[row, [0, generator.integers(count), count - 1]] = True
    return drawn, sinks_N, asked_YW
