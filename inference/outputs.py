"""What an engine tells of its requests and steps."""

import dataclasses
from typing import Any

from inference.request import Sequence
from inference.scheduling.step_shapes import StepShape


@dataclasses.dataclass(frozen=True)
class Completion:
    """What became of a request.

    Attributes:
        id: the request's.
        score: of a beam search's hypothesis: log-probability / tokens**length_penalty.
        others: its further answers, best first where they are ranked.
    """

    id: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    score: float | None = None
    others: tuple["Completion", ...] = ()


@dataclasses.dataclass(frozen=True)
class Score:
    """Log-probabilities of a text's tokens after the first, each given all before it."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]


@dataclasses.dataclass(frozen=True)
class Update:
    """News of one request after a step; `text` is what can be shown already.

    Of several answers each has its own, with its `index`: those of `n` as they come, those of
    `best_of` and of a beam search once, whole and best first, when the request ends.
    """

    id: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    index: int = 0


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step as it ran: its shape, (query tokens, context tokens) of each row, wall time since
    the step before it was done or this one was begun, and the host's work for it.
    """

    shape: StepShape
    rows: tuple[tuple[int, int], ...]
    seconds: float
    host_s: float


def completion(sequence: Sequence, text: str) -> Completion:
    """A finished sequence with the text of its tokens."""
    assert sequence.finish_reason is not None
    return Completion(
        sequence.id, sequence.tokens[: sequence.num_prompt_tokens], sequence.output_tokens, text,
        sequence.finish_reason.value, sequence.logprobs, alternatives(sequence.top_logprobs),
    )  # fmt: skip


def alternatives(tops: list[tuple[Any, Any]]) -> list[dict[int, float]]:
    """(ids, log-probabilities) of each token as a mapping."""
    return [dict(zip(ids, values, strict=True)) for ids, values in tops]
