"""What drafts are worth: tokens a step and speed; and what drafting costs a step."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from configs.engine import Config
from configs.errors import InputError
from configs.heads import DFlash, Eagle, Medusa
from inference.planner import cost
from inference.planner.cost import Operation, Rows, Work
from inference.scheduling import step_shapes
from inference.scheduling.step_schedule import StepRecord

_MAX_DRAFTS = 1024
# What heads make of the target's states, beside what they cache.
_OBSERVED: dict[type, tuple[str, ...]] = {
    Eagle: ("eagle.input", "eagle.fuse", "embed"),
    DFlash: ("dflash.fuse",),
}


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


def drafting_operations(config: Config, record: StepRecord) -> tuple[Operation, ...]:
    """What the proposer did in a step that only decodes, beside the target's own work."""
    draft = config.draft
    if draft is None:
        return ()
    runs = _drafting_work(config, record)
    operations = [operation for work in runs for operation in cost.step_operations(draft, work)]
    observed = next((names for kind, names in _OBSERVED.items() if isinstance(draft, kind)), None)
    if observed is None:
        return tuple(operations)
    drafting = [o for o in operations if o.name not in ("eagle.fuse", "dflash.fuse")]
    work = dataclasses.replace(Work.of_step(config, draft, record), num_logits=0)
    fed = cost.step_operations(draft, work)
    return (*drafting, *_observing(fed, observed))


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
    elif isinstance(config.draft, DFlash):
        rows = tuple(Rows(1, width, start + width - 1) for start in starts)
        yield Work(num_rows * width, rows, num_rows * (width - 1))
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


def _observing(fed: Sequence[Operation], names: tuple[str, ...]) -> Iterator[Operation]:
    """What it does with the target's states: of its last layer only what is cached is needed."""
    for operation in fed:
        if operation.name in names:
            yield operation
        elif operation.copied:
            yield dataclasses.replace(
                operation,
                flops=operation.flops * operation.copied,
                weight_bytes=operation.weight_bytes * operation.copied,
                activation_bytes=operation.activation_bytes * operation.copied,
            )
