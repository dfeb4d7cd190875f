"""Chains of drafts by hand: acceptance, the token after a rejection, the best number of drafts
(Leviathan et al. 2023, arXiv 2211.17192).
"""

import math
from collections.abc import Sequence

from inference.planner.speculation import Speculation


def best_drafts(acceptance: float, cost: float, max_drafts: int = 32) -> int:
    """Returns the k of the highest speedup, 0 where drafts do not pay."""
    return max(range(max_drafts + 1), key=lambda k: Speculation(k, acceptance, cost).speedup)


def acceptance_of(target: Sequence[float], draft: Sequence[float]) -> float:
    """Returns the chance that a token drawn from `draft` is accepted: the sum of min(p, q) over the
    vocabulary (theorem 3.5).
    """
    return math.fsum(map(min, target, draft))


def residual(target: Sequence[float], draft: Sequence[float]) -> list[float]:
    """Returns the distribution of the token that replaces a rejected draft: max(0, target - draft),
    normalized. Equal distributions reject nothing: then it is the target's.
    """
    missing = [max(0.0, q - p) for q, p in zip(target, draft, strict=True)]
    total = math.fsum(missing)
    return [share / total for share in missing] if total > 0 else list(target)


def output_distribution(target: Sequence[float], draft: Sequence[float]) -> list[float]:
    """Returns the distribution of a token after draft, test and replacement: always the target's.

    Each token is drawn with p and accepted with min(1, q / p); the residual replaces the others.
    """
    rejected = 1 - acceptance_of(target, draft)
    replaced = residual(target, draft)
    return [min(q, p) + rejected * r for q, p, r in zip(target, draft, replaced, strict=True)]
