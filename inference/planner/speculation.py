"""What drafts are worth: tokens a step, speed, the best number of them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Chains of drafts (Leviathan et al. 2023, arXiv 2211.17192).

    Attributes:
        drafts: k, tokens proposed for each step.
        acceptance: a, chance that a draft is accepted, given that those before it were.
        cost: c, time of one draft step in steps of the target.
    """

    drafts: int
    acceptance: float
    cost: float

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of a step: the accepted drafts and the target's own."""
        return expected_tokens(self.acceptance, self.drafts)

    @property
    def speedup(self) -> float:
        """Over one token a step, where verifying k drafts takes a step's time."""
        return self.tokens_per_step / (1 + self.drafts * self.cost)


def expected_tokens(acceptance: float, drafts: int) -> float:
    """(1 - a^(k+1)) / (1 - a): 1 + a + a^2 + ... + a^k."""
    return sum(acceptance**n for n in range(drafts + 1))


def best_drafts(acceptance: float, cost: float, most: int = 32) -> int:
    """k of the highest speedup, 0 where drafts do not pay."""
    return max(range(most + 1), key=lambda k: Speculation(k, acceptance, cost).speedup)
