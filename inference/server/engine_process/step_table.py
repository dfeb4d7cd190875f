"""What steps that only decode move and take, for many of them at once: a table instead of every
operation of every step.

In a step of a given shape, what one more sequence brings depends on its own tokens alone
(`cost.Work`): bytes and FLOPs are sums over the sequences. So the cost model is asked once for each
shape, and for one sequence at few contexts, between which all its quantities are straight lines.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from configs.engine import Config
from configs.hardware.spec import HardwareSpec
from configs.model import ModelConfig
from inference.planner import cost, report, roofline, speculation
from inference.planner.cost import Precision
from inference.scheduling.step_schedule import StepRecord
from inference.scheduling.step_shapes import StepShape

# Of a step: seconds of memory and of arithmetic, the same of what drafts, and bytes.
_COLUMNS = 5


@dataclasses.dataclass(frozen=True)
class Needs:
    """What steps had to move, and the seconds that this takes on a machine."""

    bytes: float
    seconds: float


class StepTable:
    """Sums of `report.decode_steps`, to the rounding of a float."""

    def __init__(self, config: Config, hardware: HardwareSpec):
        """`config`: of an engine on one chip."""
        self._config = config
        self._hardware = hardware
        self._rows: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._steps: dict[StepShape, np.ndarray] = {}

    def prepare(self, shapes: Sequence[StepShape]) -> None:
        """Asks the cost model for what steps of these shapes need that feed every sequence a token,
        or all that there is room for.
        """
        for shape in shapes:
            if shape.decode[0] and not shape.prefill[0]:
                self._step(shape)
                for queries in {1, shape.decode[1]}:
                    self._row(shape, queries)

    def needs(self, records: Sequence[StepRecord]) -> Needs:
        """Those of all these steps together, which only decode."""
        found = np.zeros((len(records), _COLUMNS))
        rows: dict[tuple[int, int], tuple[StepShape, list[int], list[int]]] = {}
        for at, record in enumerate(records):
            found[at] = self._step(record.shape)
            width = record.shape.decode[1]
            for queries, context in record.rows:
                own = rows.get((width, queries))
                if own is None:
                    rows[width, queries] = own = record.shape, [], []
                own[1].append(at)
                own[2].append(context)
        for (_, queries), (shape, steps, contexts) in rows.items():
            knots, values = self._row(shape, queries)
            each = _between(knots, values, np.array(contexts, float))
            for column in range(_COLUMNS):
                found[:, column] += np.bincount(steps, each[:, column], len(records))
        gamma = self._hardware.gamma
        seconds = np.full(len(records), self._hardware.overhead_s)
        for memory, compute in (found[:, :2].T, found[:, 2:4].T):
            seconds += np.maximum(memory, compute) + gamma * np.minimum(memory, compute)
        return Needs(float(found[:, 4].sum()), float(seconds.sum()))

    def _step(self, shape: StepShape) -> np.ndarray:
        """Of a step of this shape without any sequence."""
        if shape not in self._steps:
            one, two = self._parts(shape, 1, 1, 1), self._parts(shape, 1, 1, 2)
            self._steps[shape] = 2 * one - two
        return self._steps[shape]

    def _row(self, shape: StepShape, queries: int) -> tuple[np.ndarray, np.ndarray]:
        """Contexts, and what a sequence adds to a step at each, where it feeds so many tokens."""
        key = shape.decode[1], queries
        if key not in self._rows:
            knots = _knots(self._config, shape, queries)
            values = [
                self._parts(shape, queries, context, 2) - self._parts(shape, queries, context, 1)
                for context in knots
            ]
            self._rows[key] = np.array(knots, float), np.array(values)
        return self._rows[key]

    def _parts(self, shape: StepShape, queries: int, context: int, count: int) -> np.ndarray:
        """Of a step with so many sequences that are alike."""
        config, hardware = self._config, self._hardware
        record = StepRecord(shape, ((queries, context),) * count, 0.0, 0.0)
        own = report.operations(config, record)
        drafting = speculation.drafting_operations(config, record)
        found = []
        for model, operations in ((config.model, own), (config.draft, drafting)):
            if model is None:
                found += [0.0, 0.0]
                continue
            time = roofline.step_time(operations, hardware, Precision.of(model))
            found += [time.memory_s, time.compute_s]
        return np.array([*found, cost.total((*own, *drafting)).bytes])


def _between(knots: np.ndarray, values: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    """Values at contexts, on the straight lines between those at knots."""
    right = np.clip(np.searchsorted(knots, contexts), 1, len(knots) - 1)
    start, stop = knots[right - 1], knots[right]
    share = ((contexts - start) / (stop - start))[:, None]
    found: np.ndarray = (1 - share) * values[right - 1] + share * values[right]
    return found


def _knots(config: Config, shape: StepShape, queries: int) -> list[int]:
    """Contexts where the quantities of a sequence bend, and the first and the last of all."""
    last = config.max_context + shape.decode[1] + 1
    near = range(1)  # of several tokens, and of drafts, each has a context of its own
    if queries > 1 or config.draft is not None:
        near = range(-shape.decode[1], shape.decode[1] + 1)
    found = {queries, last}
    for model in filter(None, (config.model, config.draft)):
        for name, *sizes in _quantities(model):
            for size in filter(None, sizes):
                ends = [size, size * queries]
                if name.startswith("chunk"):  # which begin again
                    ends += [more for end in range(size, last, size) for more in (end, end + 1)]
                found |= {end + more for end in ends for more in near}
    return sorted(context for context in found if queries <= context <= last)


def _quantities(model: ModelConfig) -> Iterator[tuple]:
    """Those of sequences that a model's operations are made of."""
    for declared in model.operations:
        amounts = [declared.flops, declared.rows, *(move.amount for move in declared.moves)]
        for amount in amounts:
            for _, quantity in amount:
                if quantity and quantity[0] in ("pairs", "read", "chunk_pairs", "chunk_read"):
                    yield quantity
