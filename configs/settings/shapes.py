"""Step shapes: the sizes of the rectangles that steps are compiled for."""

import dataclasses
from typing import ClassVar

from configs.settings.section import Section, setting

MOST_ROWS = 4096  # of a rectangle; more rows make no machine faster

# Below, XLA's CPU backend sums a product's rows in another order.
MIN_DETERMINISTIC_ROWS = 8


@dataclasses.dataclass(frozen=True)
class ShapeConfig(Section):
    """Sizes of the decode and prefill rectangles; a step runs the cheapest shape that fits."""

    path: ClassVar[str] = "engine.shapes"

    decode_rows: tuple[int, ...] = setting(
        (2, 8, 16, 32), "Rows of the compiled decode rectangles.", lower=1, upper=MOST_ROWS,
        host_only=True,
    )  # fmt: skip
    chunk_tokens: int = setting(
        64, "Prompt tokens of a prefill chunk, a row of the prefill rectangle.", lower=1,
        upper=MOST_ROWS,
    )  # fmt: skip
    prefill_chunks: tuple[int, ...] = setting(
        (1, 2, 4, 8), "Chunks of the compiled prefill rectangles.", lower=1, upper=MOST_ROWS,
        host_only=True,
    )  # fmt: skip
    greedy_steps: bool | None = setting(
        None,
        "Steps in which every request is greedy have executables of their own. None: where the "
        "step has no branches, on accelerators (`Config.for_platform`).",
        host_only=True,
    )
    free_padding: bool | None = setting(
        None,
        "Rows of padding cost a step next to nothing, so that fewer shapes serve all steps. None: "
        "where products and attention leave padding out, as a CPU's library does in most models.",
        host_only=True,
    )
