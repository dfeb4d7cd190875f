"""Predicted beside measured: what the steps that ran had to cost."""

import dataclasses
import statistics
from collections.abc import Iterable
from typing import Protocol

from configs.engine import Config
from configs.model import ModelConfig
from inference.planner.cost import Machine, step_cost
from inference.shapes import StepShape


class StepRecord(Protocol):
    """One step as it ran."""

    @property
    def shape(self) -> StepShape:
        """Which executable."""

    @property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """(query tokens, context tokens) of each row."""

    @property
    def seconds(self) -> float:
        """Wall time, the host's part included."""


@dataclasses.dataclass(frozen=True)
class DecodeReport:
    """Medians over the steps that only decode; None where there was none.

    `predicted_step_s` is the roofline: the bytes at the measured bandwidth; `bandwidth_share` is
    how much of that the measured steps reached.
    """

    step_bytes: int | None
    predicted_step_s: float | None
    measured_step_s: float | None
    read_bandwidth: float
    bandwidth_share: float | None


def decode_steps(config: Config, records: Iterable[StepRecord], machine: Machine) -> DecodeReport:
    """Compares an engine's decode steps with what they had to read."""
    steps = [record for record in records if not record.shape.prefill[0]]
    if not steps:
        return DecodeReport(None, None, None, machine.read_bandwidth, None)
    costs = [step_cost(config.model, r.shape.num_tokens, r.rows, r.shape.num_logits) for r in steps]
    num_bytes = int(statistics.median(cost.bytes for cost in costs))
    predicted = statistics.median(machine.seconds(cost) for cost in costs)
    measured = statistics.median(record.seconds for record in steps)
    share = num_bytes / measured / machine.read_bandwidth
    return DecodeReport(num_bytes, predicted, measured, machine.read_bandwidth, share)


def naive_seconds(
    config: ModelConfig, machine: Machine, num_prompt: int, num_new: int, block: int
) -> float:
    """Predicted time without a cache: each token runs all before it, padded to blocks."""
    lengths = (-(-(num_prompt + n) // block) * block for n in range(num_new))
    return sum(
        machine.seconds(step_cost(config, length, [(length, length)], 1)) for length in lengths
    )


def cached_seconds(
    config: ModelConfig, machine: Machine, num_prompt: int, num_new: int, tile: int
) -> float:
    """Predicted time of the same with a cache: the prompt once, then one row a token."""
    padded = -(-num_prompt // tile) * tile
    prefill = step_cost(config, padded, [(num_prompt, num_prompt)], 1)
    decode = (step_cost(config, 2, [(1, num_prompt + n)], 2) for n in range(1, num_new))
    return machine.seconds(prefill) + sum(machine.seconds(cost) for cost in decode)
