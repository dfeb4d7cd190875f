"""Seconds of each operation of a step, by the planner."""

from collections.abc import Sequence

from configs.hardware.spec import HardwareSpec
from inference.planner import roofline
from inference.planner.cost import Operation, Precision


def operation_times(
    operations: Sequence[Operation], hardware: HardwareSpec, precision: Precision
) -> list[float]:
    """Returns seconds of each operation of a step on one chip; with the overhead their sum is
    `roofline.step_time`'s.
    """
    whole = roofline.step_time(operations, hardware, precision)
    shares = (1.0, hardware.gamma) if whole.memory_s > whole.compute_s else (hardware.gamma, 1.0)
    times = (roofline.operation_seconds(operation, hardware, precision) for operation in operations)
    return [shares[0] * memory + shares[1] * compute for memory, compute in times]
