"""Whether two runs of the same greedy requests agree, where rounding differs: their tokens up to
the first near-tie, and the scores of these.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """One request's tokens.

    Attributes:
        token_ids: in order.
        logprobs: of each.
        tops: of each the likeliest tokens with theirs; none where tokens were given, not chosen.
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
    """How alike runs are.

    Attributes:
        equal: answers with the same tokens.
        worst: the least difference of scores (in nats) that explains all that differs; infinite
            where a token is not among the other run's likeliest.
    """

    equal: int
    worst: float


def compare(own: Sequence[Answer], others: Sequence[Answer]) -> Agreement:
    """Compares answers to the same requests, each up to its first different token: there each run
    prefers its own, so that the scores differ by half of what both prefer it by, or more.
    """
    worst, equal = 0.0, 0
    for one, other in zip(own, others, strict=True):
        common = zip(one.token_ids, other.token_ids, strict=True)
        first = next((i for i, (a, b) in enumerate(common) if a != b), len(one.token_ids))
        pairs = zip(one.logprobs[:first], other.logprobs[:first], strict=True)
        worst = max([worst, *(abs(a - b) for a, b in pairs)])
        if first == len(one.token_ids):
            equal += 1
            continue
        preferred = sum(
            each.logprobs[first] - each.tops[first].get(rival.token_ids[first], float("-inf"))
            for each, rival in ((one, other), (other, one))
        )
        worst = max(worst, preferred / 2)
    return Agreement(equal, worst)
