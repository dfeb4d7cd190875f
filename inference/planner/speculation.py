"""What drafts are worth: the law of acceptance, tokens a step, speed, the best number of them; and
what drafting costs in a step of the engine.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from configs.engine import Config
from configs.errors import InputError
from configs.heads import Eagle, Medusa
from inference.planner import cost
from inference.planner.cost import Operation, Rows, Work
from inference.scheduling import step_shapes
from inference.scheduling.step_schedule import StepRecord

_MAX_DRAFTS = 1024


@dataclasses.dataclass(frozen=True)
class Speculation:
    """Chains of drafts (Leviathan et al. 2023, arXiv 2211.17192).

    Attributes:
        drafts: k, tokens proposed for each step.
        acceptance: a, chance that a draft is accepted, given that those before it were.
        cost: c, time of one draft step in plain decode steps of the target.
        size: of the draft model in the target's: its weights and cache are that share of the
            target's. 0: what proposes needs no memory worth counting.
    """

    drafts: int
    acceptance: float
    cost: float
    size: float = 0.0

    def __post_init__(self) -> None:
        if self.drafts < 0:
            raise InputError(f"the number of drafts is at least 0, not {self.drafts}")
        if self.drafts > _MAX_DRAFTS:
            raise InputError(f"the number of drafts is at most {_MAX_DRAFTS}, not {self.drafts}")
        if not 0 <= self.acceptance <= 1:
            raise InputError(f"an acceptance is a number from 0 to 1, not {self.acceptance}")
        for name in ("cost", "size"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"a draft's {name} is at least 0, not {getattr(self, name)}")

    @property
    def tokens_per_step(self) -> float:
        """Expected tokens of a step: the accepted drafts and the target's own."""
        return expected_tokens(self.acceptance, self.drafts)

    @property
    def speedup(self) -> float:
        """Over one token a step, where verifying k drafts takes a plain step's time."""
        return self.tokens_per_step / (1 + self.drafts * self.cost)


def expected_tokens(acceptance: float, drafts: int) -> float:
    """(1 - a^(k+1)) / (1 - a): 1 + a + a^2 + ... + a^k."""
    return sum(acceptance**n for n in range(drafts + 1))


def best_drafts(acceptance: float, cost: float, max_drafts: int = 32) -> int:
    """k of the highest speedup, 0 where drafts do not pay."""
    return max(range(max_drafts + 1), key=lambda k: Speculation(k, acceptance, cost).speedup)


def acceptance_of(target: Sequence[float], draft: Sequence[float]) -> float:
    """Chance that a token drawn from `draft` is accepted: the sum of min(p, q) over the vocabulary
    (Leviathan et al. 2023, theorem 3.5).

    Raises:
        InputError: these are no two laws of one vocabulary.
    """
    _check_laws(target, draft)
    return math.fsum(map(min, target, draft))


def residual(target: Sequence[float], draft: Sequence[float]) -> list[float]:
    """Law of the token that replaces a rejected draft: max(0, target - draft), normalized. Equal
    laws reject nothing: then it is the target's.

    Raises:
        InputError: these are no two laws of one vocabulary.
    """
    _check_laws(target, draft)
    missing = [max(0.0, q - p) for q, p in zip(target, draft, strict=True)]
    total = math.fsum(missing)
    return [share / total for share in missing] if total > 0 else list(target)


def output_law(target: Sequence[float], draft: Sequence[float]) -> list[float]:
    """Law of a token after draft, test and replacement; it is the target's, whatever the draft's.

    Each token is drawn with p and kept with min(1, q / p); what was rejected falls on the residual.
    """
    rejected = 1 - acceptance_of(target, draft)
    replaced = residual(target, draft)
    return [min(q, p) + rejected * r for q, p, r in zip(target, draft, replaced, strict=True)]


def drafting_operations(config: Config, record: StepRecord) -> tuple[Operation, ...]:
    """What the proposer did in a step that only decodes, beside the target's own work."""
    draft = config.draft
    if draft is None:
        return ()
    runs = _drafting_work(config, record)
    operations = [operation for work in runs for operation in cost.step_operations(draft, work)]
    if not isinstance(draft, Eagle):
        return tuple(operations)
    drafting = [operation for operation in operations if operation.name != "eagle.fuse"]
    work = dataclasses.replace(Work.of_step(config, draft, record), num_logits=0)
    fed = cost.step_operations(draft, work)
    return (*drafting, *_observing(draft, fed))


def _drafting_work(config: Config, record: StepRecord) -> Iterator[Work]:
    """Each run of what drafts, up to the last draft; a draft model is fed with that, too."""
    assert config.draft is not None
    drafts, (num_rows, width) = config.engine.drafts, record.shape.decode
    if width == 1:
        return
    if step_shapes.leaves_padding_out(config, config.draft):
        num_rows = len(record.rows)
    starts = [context - queries + 1 for queries, context in record.rows]  # with the newest token
    if isinstance(config.draft, Medusa):
        yield from [Work(num_rows, (), num_rows)] * min(drafts.levels, width - 1)
    elif not drafts.has_tree:
        for n in range(width - isinstance(config.draft, Eagle)):
            yield Work(num_rows, tuple(Rows(1, 1, start + n) for start in starts), num_rows)
    else:
        first = 0  # of a level, among the nodes
        for last in drafts.level_sizes:
            nodes = first + last
            rows = tuple(Rows(1, nodes, start + nodes - 1) for start in starts)
            yield Work(num_rows * nodes, rows, num_rows * last)
            first = nodes


def _observing(draft: Eagle, fed: Sequence[Operation]) -> Iterator[Operation]:
    """What it does with the target's states: of its last layer only what is cached is needed."""
    for operation in fed:
        if operation.name in ("eagle.input", "eagle.fuse", "embed"):
            yield operation
        elif operation.copied:
            yield dataclasses.replace(
                operation,
                flops=operation.flops * operation.copied,
                weight_bytes=operation.weight_bytes * operation.copied,
                activation_bytes=operation.activation_bytes * operation.copied,
            )


def _check_laws(*laws: Sequence[float]) -> None:
    for law in laws:
        if len(law) != len(laws[0]) or min(law, default=-1) < 0:
            raise InputError("two laws give each token of one vocabulary a chance of at least 0")
        if not math.isclose(math.fsum(law), 1, abs_tol=1e-6):
            raise InputError(f"the chances of a law sum to 1, not {math.fsum(law)}")
