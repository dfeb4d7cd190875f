"""Predicts bytes and seconds of many decoding steps at once, from a table.

In a step of a given shape, the cost of one more sequence depends on that sequence's tokens alone
(`cost.Work`): bytes and FLOPs are sums over the sequences. So the cost model runs once for each
shape, and for one sequence at a few contexts, between which all quantities are linear.
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


@dataclasses.dataclass(frozen=True)
class Needs:
    """Bytes that steps had to move, and their predicted seconds."""

    bytes: float
    seconds: float


class StepTable:
    """Sums over steps that equal those of `decode_report.decode_steps`, except for rounding."""

    def __init__(self, config: Config, hardware: HardwareSpec):
        """`config`: of an engine on one chip."""
        self._config = config
        self._hardware = hardware
        self._rows: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._steps: dict[StepShape, np.ndarray] = {}

    def prepare(self, shapes: Sequence[StepShape]) -> None:
        """Fills the table for steps of these shapes that feed each sequence one token, or as many
        as fit.
        """
        for shape in shapes:
            if shape.decode[0] and not shape.prefill[0]:
                self._step(shape)
                for queries in {1, shape.decode[1]}:
                    self._row(shape, queries)

    def needs(self, records: Sequence[StepRecord]) -> Needs:
        by_width: dict[int, list[StepRecord]] = {}  # steps of a width have the same operations
        for record in records:
            by_width.setdefault(record.shape.decode[1], []).append(record)
        parts = [self._needs(of_width) for of_width in by_width.values()]
        return Needs(sum(part.bytes for part in parts), sum(part.seconds for part in parts))

    def _needs(self, records: Sequence[StepRecord]) -> Needs:
        step_costs = np.array([self._step(record.shape) for record in records])
        rows: dict[tuple[int, int], tuple[StepShape, list[int], list[int]]] = {}
        for at, record in enumerate(records):
            width = record.shape.decode[1]
            for queries, context in record.rows:
                row = rows.get((width, queries))
                if row is None:
                    rows[width, queries] = row = record.shape, [], []
                row[1].append(at)
                row[2].append(context)
        for (_, queries), (shape, steps, contexts) in rows.items():
            knots, values = self._row(shape, queries)
            row_costs = _between(knots, values, np.array(contexts, float))
            for column in range(step_costs.shape[1]):
                step_costs[:, column] += np.bincount(steps, row_costs[:, column], len(records))
        memory, compute = step_costs[:, 1::2], step_costs[:, 2::2]
        busy = np.maximum(memory, compute) + self._hardware.gamma * np.minimum(memory, compute)
        overhead_s = len(records) * self._hardware.overhead_s
        return Needs(float(step_costs[:, 0].sum()), overhead_s + float(busy.sum()))

    def _step(self, shape: StepShape) -> np.ndarray:
        """Columns of a step of this shape without sequences."""
        if shape not in self._steps:
            one_sequence, two_sequences = self._parts(shape, 1, 1, 1), self._parts(shape, 1, 1, 2)
            self._steps[shape] = 2 * one_sequence - two_sequences
        return self._steps[shape]

    def _row(self, shape: StepShape, queries: int) -> tuple[np.ndarray, np.ndarray]:
        """Contexts, and the columns that a sequence of each adds if it feeds `queries` tokens."""
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
        """Columns of a step with `count` equal sequences: bytes, and each operation's seconds of
        memory and of arithmetic.
        """
        config, hardware = self._config, self._hardware
        record = StepRecord(shape, ((queries, context),) * count, 0.0, 0.0)
        target_operations = report.operations(config, record)
        draft_operations = speculation.drafting_operations(config, record)
        precisions = [Precision.of(config.model)] * len(target_operations)
        if config.draft is not None:
            precisions += [Precision.of(config.draft)] * len(draft_operations)
        operations = (*target_operations, *draft_operations)
        columns = [cost.total(operations).bytes]
        for operation, precision in zip(operations, precisions, strict=True):
            columns += roofline.operation_seconds(operation, hardware, precision)
        return np.array(columns)


def _between(knots: np.ndarray, values: np.ndarray, contexts: np.ndarray) -> np.ndarray:
    right = np.clip(np.searchsorted(knots, contexts), 1, len(knots) - 1)
    start, stop = knots[right - 1], knots[right]
    share = ((contexts - start) / (stop - start))[:, None]
    interpolated: np.ndarray = (1 - share) * values[right - 1] + share * values[right]
    return interpolated


def _knots(config: Config, shape: StepShape, queries: int) -> list[int]:
    """Contexts where the slope of a sequence's quantities changes, with the first and the last."""
    last = config.max_context + shape.decode[1] + 1
    near = range(1)  # of several tokens, and of drafts, each has a context of its own
    if queries > 1 or config.draft is not None:
        near = range(-shape.decode[1], shape.decode[1] + 1)
    contexts = {queries, last}
    for model in filter(None, (config.model, config.draft)):
        for name, *sizes in _quantities(model):
            for size in filter(None, sizes):
                ends = [size, size * queries]
                if name.startswith("chunk"):  # which begin again
                    ends += [more for end in range(size, last, size) for more in (end, end + 1)]
                contexts |= {end + more for end in ends for more in near}
    return sorted(context for context in contexts if queries <= context <= last)


def _quantities(model: ModelConfig) -> Iterator[tuple]:
    """The quantities of a sequence that a model's operations depend on."""
    for declared in model.operations:
        amounts = [declared.flops, declared.rows, *(move.amount for move in declared.moves)]
        for amount in amounts:
            for _, quantity in amount:
                if quantity and quantity[0] in ("pairs", "read", "chunk_pairs", "chunk_read"):
                    yield quantity
