"""A calibration within seconds, by steps of an engine that is there.

The steps of one model cannot tell all constants apart (an overhead from bytes, say), so what is
found holds for this model in these formats.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

from configs.hardware.spec import HardwareSpec
from inference.planner.calibration import calibrate
from inference.planner.calibration.calibrate import Sample
from inference.planner.calibration.verify import Point

SECONDS = 2.1  # of timing steps, once it is known what they take
_MAX_POINTS = 8  # more are not fitted in a second
_LEAST_ROUNDS, _MAX_ROUNDS = 3, 8


def calibrated(
    hardware: HardwareSpec,
    chosen: Sequence[Point],
    run: Callable[[Point], float],
    probe: Callable[[], float],
    clock: Callable[[], float] = time.perf_counter,
) -> HardwareSpec | None:
    """The hardware with the constants that its steps show; None where there is no time for three
    steps of the first point.

    Every round times each point once and reads the bandwidth. Neighbours only slow a machine down,
    and seldom for all rounds: a point's time is its least, the bandwidth the highest.

    Args:
        hardware: with its rates and the bandwidth that it reads now; constants are found here.
        chosen: of one model, the most telling first; as many as there is time for.
        run: seconds of a point's step, compiled before.
        probe: bytes a second that the machine reads now.
    """
    points = _affordable(hardware, chosen, run, clock)
    if not points:
        return None
    bandwidth, start = hardware.read_bandwidth, clock()
    least = dict.fromkeys(points, float("inf"))
    for done in range(_MAX_ROUNDS):
        if done >= _LEAST_ROUNDS and (clock() - start) * (done + 1) / done > SECONDS:
            break
        for point in points:
            least[point] = min(least[point], run(point))
        bandwidth = max(bandwidth, probe())
    return calibrate.fit(
        dataclasses.replace(hardware, read_bandwidth=bandwidth),
        [Sample(*point.sample, seconds) for point, seconds in least.items()],
    )


def _affordable(
    hardware: HardwareSpec,
    chosen: Sequence[Point],
    run: Callable[[Point], float],
    clock: Callable[[], float],
) -> list[Point]:
    """The first points that together can be timed so often, each run once to know; without those
    that would take too long for that, if they miss the plain roofline like the point before them.
    """
    affordable: list[Point] = []
    start, slower, budget_s = clock(), 1.0, SECONDS / _LEAST_ROUNDS
    for point in chosen:
        expected = calibrate.predict(Sample(*point.sample, 1.0), hardware)
        if clock() - start + slower * expected > budget_s and affordable:
            continue
        slower = run(point) / expected
        if clock() - start > budget_s:
            break
        affordable.append(point)
        if len(affordable) == _MAX_POINTS:
            break
    return affordable
