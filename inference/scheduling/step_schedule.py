"""What one step does, decided before it runs: integers only."""

import dataclasses

from inference.kv_pages.prefix_cache import Transfer
from inference.request import Sequence
from inference.scheduling.step_shapes import StepShape


@dataclasses.dataclass(frozen=True)
class Row:
    """Consecutive tokens of one sequence in one row of a rectangle.

    `start` is the position of its first token, `offset` that position counted from the sequence's
    length on the device when the step begins; `emits` rows end with a sampled token.
    """

    sequence: Sequence
    slot: int
    start: int
    offset: int
    length: int
    emits: bool


@dataclasses.dataclass(frozen=True)
class Admission:
    """A sequence takes a slot; `source` is the slot it was forked from, with pages to copy as
    (group, from, to). From its own slot it goes on with another last token.
    """

    sequence: Sequence
    slot: int
    source: int | None = None
    page_copies: tuple[tuple[int, int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Plan:
    """One step: first pages travel, then slots are written, then the rows run."""

    shape: StepShape
    decode: tuple[Row, ...] = ()
    tiles: tuple[Row, ...] = ()
    admissions: tuple[Admission, ...] = ()
    transfers: tuple[Transfer, ...] = ()


@dataclasses.dataclass
class Counters:
    """What a scheduler has done so far."""

    num_steps: int = 0
    num_prompt_tokens: int = 0  # of admitted sequences, resumed ones again
    num_cached_tokens: int = 0  # of these, found in the prefix cache
    num_prefilled_tokens: int = 0  # that went through prefill tiles
    num_preemptions: int = 0
    num_spilled_pages: int = 0  # copied to the host
    num_restored_pages: int = 0  # copied back
    peak_running: int = 0
