"""How often a smaller model's drafts are accepted: published rates, and a curve through them."""

import dataclasses
import functools
import math

from configs.model import ModelConfig
from inference.planner import weights
from inference.planner.deployment import Deployment
from inference.planner.speculation import Speculation


@dataclasses.dataclass(frozen=True)
class AcceptanceRate:
    """One acceptance that was measured.

    Attributes:
        target, draft: which models, and the task where there are two.
        size: parameters of the draft in the target's.
        greedy, sampled: acceptance at temperature 0 and 1.
    """

    target: str
    draft: str
    size: float
    greedy: float
    sampled: float


# Leviathan et al. 2023 (arXiv 2211.17192), table 3, without its n-grams; parameters as section 4
# names them: T5 77M, 250M, 800M of 11B; LaMDA 100M, 2B, 8B of 137B; a GPT-like 6M of 97M.
OBSERVED = (
    AcceptanceRate("T5-XXL, translation", "T5-small", 77e6 / 11e9, 0.75, 0.62),
    AcceptanceRate("T5-XXL, translation", "T5-base", 250e6 / 11e9, 0.80, 0.68),
    AcceptanceRate("T5-XXL, translation", "T5-large", 800e6 / 11e9, 0.82, 0.71),
    AcceptanceRate("T5-XXL, summaries", "T5-small", 77e6 / 11e9, 0.65, 0.53),
    AcceptanceRate("T5-XXL, summaries", "T5-base", 250e6 / 11e9, 0.73, 0.55),
    AcceptanceRate("T5-XXL, summaries", "T5-large", 800e6 / 11e9, 0.74, 0.56),
    AcceptanceRate("LaMDA", "LaMDA 100M", 100e6 / 137e9, 0.61, 0.57),
    AcceptanceRate("LaMDA", "LaMDA 2B", 2e9 / 137e9, 0.71, 0.71),
    AcceptanceRate("LaMDA", "LaMDA 8B", 8e9 / 137e9, 0.75, 0.74),
    AcceptanceRate("GPT-like 97M", "GPT-like 6M", 6e6 / 97e6, 0.88, 0.89),
)

# Sizes the curve is asked for: from the least observed to the most, a quarter of a decade apart.
_MIN_SIZE, _MAX_SIZE = (pick(o.size for o in OBSERVED) for pick in (min, max))
SIZES = (_MIN_SIZE, *(round(10 ** (exponent / 4), 6) for exponent in range(-12, -4)), _MAX_SIZE)
_MAX_DRAFTS = 16


@dataclasses.dataclass(frozen=True)
class Curve:
    """1 - a = miss x size^-slope: larger drafts are refused less often.

    Attributes:
        miss, slope: of the formula above.
        error: root mean square of the acceptances around it.
    """

    miss: float
    slope: float
    error: float

    def __call__(self, size: float) -> float:
        """Acceptance of a draft of that size, within the sizes observed."""
        return 1 - self.miss * min(max(size, _MIN_SIZE), _MAX_SIZE) ** -self.slope


@functools.cache
def fitted(greedy: bool = False) -> Curve:
    """Least squares through the logarithms of size and refusal, at temperature 0 or 1."""
    rates = [o.greedy if greedy else o.sampled for o in OBSERVED]
    x = [math.log(o.size) for o in OBSERVED]
    y = [math.log(1 - rate) for rate in rates]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    slope = covariance / sum((a - mean_x) ** 2 for a in x)
    bare = Curve(math.exp(mean_y - slope * mean_x), -slope, 0.0)
    squares = [(bare(o.size) - rate) ** 2 for o, rate in zip(OBSERVED, rates, strict=True)]
    return dataclasses.replace(bare, error=math.sqrt(sum(squares) / len(squares)))


def best(
    deployment: Deployment, batch: int, context: int, greedy: bool = False
) -> Speculation | None:
    """The draft size and number of drafts that give most tokens a second; None where plain decoding
    does, or where no draft model fits beside the rest.

    A draft of a given size reads and computes that share of what the target does, and pays the same
    overhead a step. On the same mesh it exchanges once a layer as well: models grow in layers about
    as much as in width, so its layers, and its exchange, are the third root of that share.

    Args:
        deployment: its own speculation is ignored.
        batch, context: requests of a replica, and tokens of each sequence.
        greedy: at temperature 0, where drafts are accepted more often.
    """
    plain = dataclasses.replace(deployment, speculation=None)
    curve, usual = fitted(greedy), plain.decode_time(batch, context)
    fastest_drafts, best_rate = None, batch / usual.total_s
    local_s = usual.total_s - usual.overhead_s - usual.collective_s
    sequences = -(-batch // plain.mesh.num_groups) * plain.samples  # as if no prompt were shared
    for drafts in range(1, _MAX_DRAFTS + 1):
        # What is verified does not depend on the draft's size.
        free = dataclasses.replace(plain, speculation=Speculation(drafts, 0.0, 0.0))
        verify_s = free.decode_time(batch, context).total_s
        for size in SIZES:
            draft_s = usual.overhead_s + size * local_s + size ** (1 / 3) * usual.collective_s
            tried = Speculation(drafts, curve(size), draft_s / usual.total_s, size)
            rate = batch * tried.tokens_per_step / (verify_s + drafts * draft_s)
            if rate > best_rate:
                beside = dataclasses.replace(plain, speculation=tried)
                if sequences * beside.chip_cache_bytes(context) <= beside.memory_room:
                    fastest_drafts, best_rate = tried, rate
    return fastest_drafts


@dataclasses.dataclass(frozen=True)
class Drafted:
    """A model with another one that drafts.

    Attributes:
        speculation: the number of drafts that gives most tokens a second.
        draft_s: predicted seconds of a step of the draft.
        tok_s: tokens a second of all sequences.
        speedup: that, as a multiple of tokens a second without drafts.
    """

    speculation: Speculation
    draft_s: float
    tok_s: float
    speedup: float


def of_model(
    deployment: Deployment, draft: ModelConfig, batch: int, context: int, greedy: bool = False
) -> Drafted | None:
    """Returns the speed with a draft model on the same chips, whose acceptance is that of the curve
    at its size; None: the chips have no room for it.

    Args:
        deployment, batch, context, greedy: as those of `best`.

    Raises:
        InputError: the mesh does not divide the draft.
    """
    plain = dataclasses.replace(deployment, speculation=None)
    usual_s = plain.decode_time(batch, context).total_s
    beside = dataclasses.replace(plain, config=draft)
    draft_s = beside.decode_time(batch, context).total_s
    size = weights.num_parameters(draft) / weights.num_parameters(plain.config)
    room = plain.memory_room - beside.chip_weight_bytes
    sequences = -(-batch // plain.mesh.num_groups) * plain.samples
    if sequences * (plain.chip_cache_bytes(context) + beside.chip_cache_bytes(context)) > room:
        return None
    results = []
    for drafts in range(1, _MAX_DRAFTS + 1):
        proposed = Speculation(drafts, fitted(greedy)(size), draft_s / usual_s, size)
        verifying = dataclasses.replace(plain, speculation=Speculation(drafts, 0.0, 0.0))
        step_s = verifying.decode_time(batch, context).total_s + drafts * draft_s
        tok_s = batch * proposed.tokens_per_step / step_s
        results.append(Drafted(proposed, draft_s, tok_s, tok_s * usual_s / batch))
    return max(results, key=lambda result: result.tok_s)
