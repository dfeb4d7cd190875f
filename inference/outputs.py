"""What an engine returns of its requests."""

import dataclasses
from collections.abc import Sequence

Alternatives = tuple[Sequence[int], Sequence[float]]  # ids and their log-probabilities


@dataclasses.dataclass(frozen=True)
class Completion:
    """A request that has ended.

    Attributes:
        score: of a beam search's hypothesis: log-probability / tokens**length_penalty.
        others: its further results, best first where they are ranked.
        params_versions: of the weights that its tokens came from, in order, and of older ones
            whose pages were kept and may have been read; 0 are the engine's first
            (`Engine.update_params`).
        version_starts: (index of a token, version) where the weights of its tokens change.
        kept_prompt_tokens: tokens of the prompt that stayed cached (`prompt_budget`).
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
    params_versions: tuple[int, ...] = ()
    version_starts: tuple[tuple[int, int], ...] = ()
    kept_prompt_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Score:
    """Log-probabilities of a text's tokens after the first, each given all before it, and the
    versions of the weights that gave them.
    """

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    params_versions: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """What is new of one request after a step; `text` is what can be shown already,
    `params_versions` and `version_starts` are those of all its tokens so far (`Completion`).

    Of several sequences each has outputs of its own, with its `index`: those of `n` as they come,
    those of `best_of` and of a beam search once, whole and best first, when the request ends.

    Attributes:
        logprobs, top_logprobs: of each of `token_ids`; where a prompt is scored, of each of its
            tokens after the first. The latter are empty in an engine without `top_logprobs`.
        stopped_by: the request's stop string, or its stop token, that ended it.
        num_cached_tokens: of the prompt, whose pages were there when it began.
        queued_s: seconds that its sequence waited for a slot.
        embedding: of the prompt, where it is asked for: D float32 numbers, little-endian.
        num_preemptions: times its sequence gave up slot and pages.
        failure: why constraints of its own left it no token, in words, where `finish_reason` is
            'error' for that; else empty.
    """

    id: int
    token_ids: list[int]
    text: str
    finish_reason: str | None
    index: int = 0
    params_versions: tuple[int, ...] = ()
    logprobs: Sequence[float] = ()
    top_logprobs: Sequence[Alternatives] = ()
    stopped_by: str | int | None = None
    num_cached_tokens: int = 0
    queued_s: float = 0.0
    embedding: bytes = b""
    num_preemptions: int = 0
    failure: str = ""
    version_starts: tuple[tuple[int, int], ...] = ()


def version_ranges(
    starts: Sequence[tuple[int, int]], begin: int, end: int
) -> list[tuple[int, int, int]]:
    """(first token, token behind the last, version) of an answer's tokens from `begin` to `end`;
    `starts` as in `Completion.version_starts`.
    """
    stops = [*(start for start, _ in starts[1:]), end]
    ranges = [
        (max(begin, start), min(end, stop), version)
        for (start, version), stop in zip(starts, stops, strict=False)
    ]
    return [(first, last, version) for first, last, version in ranges if first < last]


def alternatives(tops: list[Alternatives]) -> list[dict[int, float]]:
    """(ids, log-probabilities) of each token as a mapping."""
    return [dict(zip(ids, values, strict=True)) for ids, values in tops]
