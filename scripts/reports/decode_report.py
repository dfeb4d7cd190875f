"""Decoding steps that ran, beside what they had to read and were predicted to take."""

import dataclasses
import statistics
from collections.abc import Iterable

from configs.engine import Config
from configs.hardware.spec import HardwareSpec
from inference.planner import cost, report, roofline, speculation
from inference.planner.cost import Operation, Precision
from inference.scheduling.step_schedule import StepRecord


@dataclasses.dataclass(frozen=True)
class DecodeReport:
    """Medians over the steps that only decode; None where there was none.

    `predicted_step_s` is the time on a machine as it was calibrated (`predicted_by` 'calibrated'),
    or else the roofline: the bytes at the measured bandwidth ('roofline'); `bandwidth_share` is how
    much of that bandwidth the measured steps reached.
    """

    step_bytes: int | None
    predicted_step_s: float | None
    measured_step_s: float | None
    read_bandwidth: float
    bandwidth_share: float | None
    predicted_by: str = "roofline"


def decode_steps(
    config: Config, records: Iterable[StepRecord], hardware: HardwareSpec
) -> DecodeReport:
    """Compares an engine's decode steps with what they had to read."""
    steps = [record for record in records if not record.shape.prefill[0]]
    bandwidth, by = hardware.read_bandwidth, report.predicted_by(hardware)
    if not steps:
        return DecodeReport(None, None, None, bandwidth, None, by)
    needed = [report.operations(config, record) for record in steps]
    drafting = [speculation.drafting_operations(config, record) for record in steps]
    both = list(zip(needed, drafting, strict=True))
    num_bytes = int(statistics.median(cost.total((*target, *more)).bytes for target, more in both))
    predicted = statistics.median(
        report.seconds(config.model, target, hardware) + drafting_seconds(config, more, hardware)
        for target, more in both
    )
    measured = statistics.median(record.seconds for record in steps)
    share = num_bytes / measured / bandwidth
    return DecodeReport(num_bytes, predicted, measured, bandwidth, share, by)


def drafting_seconds(config: Config, step: Iterable[Operation], hardware: HardwareSpec) -> float:
    """Predicted time of what drafts in a step, whose start is the target's."""
    if config.draft is None:
        return 0.0
    alone = dataclasses.replace(hardware, overhead_s=0.0)
    return roofline.step_time(step, alone, Precision.of(config.draft)).total_s
