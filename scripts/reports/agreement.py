"""Whether two greedy runs of the same requests agree up to rounding: the same tokens up to the
first near-tie, with the same log-probabilities.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """The tokens of one request.

    Attributes:
        token_ids: in order.
        logprobs: of each.
        tops: of each, the likeliest tokens with theirs; none where tokens were given, not chosen.
    """

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    tops: Sequence[Mapping[int, float]]

    @classmethod
    def of_json(cls, result: Mapping[str, Any]) -> "Answer":
        """From a result of `scripts.generate --logprobs`."""
        tops = [{int(id): value for id, value in top.items()} for top in result["top_logprobs"]]
        return cls(result["token_ids"], result["logprobs"], tops)


class Agreement(NamedTuple):
    """How far two runs agree.

    Attributes:
        equal: answers with the same tokens.
        worst: the least difference of log-probabilities (in nats) that explains every difference;
            infinite where a token is not among the other run's likeliest.
    """

    equal: int
    worst: float


def compare(answers: Sequence[Answer], other_answers: Sequence[Answer]) -> Agreement:
    """Compares answers to the same requests, each up to its first different token. There each run
    prefers its own, so the log-probabilities differ by at least half the sum of both preferences.
    """
    worst, equal = 0.0, 0
    for first_answer, other in zip(answers, other_answers, strict=True):
        common = zip(first_answer.token_ids, other.token_ids, strict=True)
        first = next((i for i, (a, b) in enumerate(common) if a != b), len(first_answer.token_ids))
        pairs = zip(first_answer.logprobs[:first], other.logprobs[:first], strict=True)
        worst = max([worst, *(abs(a - b) for a, b in pairs)])
        if first == len(first_answer.token_ids):
            equal += 1
            continue
        preferred = sum(
            answer.logprobs[first] - answer.tops[first].get(rival.token_ids[first], float("-inf"))
            for answer, rival in ((first_answer, other), (other, first_answer))
        )
        worst = max(worst, preferred / 2)
    return Agreement(equal, worst)
