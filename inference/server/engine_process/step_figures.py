"""Figures of steps for heartbeats: their number, time and predicted time."""

import bisect
import itertools
from collections.abc import Sequence

from configs.engine import Config
from configs.hardware.spec import HardwareSpec
from inference.scheduling.step_schedule import StepRecord
from inference.scheduling.step_shapes import StepShape
from inference.server.engine_process.step_table import StepTable
from inference.server.frames import ITERATION_TOKENS

_UNKNOWN = HardwareSpec("unknown", 0, read_bandwidth=1.0, rates={})


class StepFigures:
    """Reads an engine's records, each once.

    Attributes:
        counters: sums over all steps so far, as `Heartbeat` has them.
        iteration_tokens: steps by their tokens, as `Heartbeat` has them.
        read_bandwidth: bytes a second that the machine reads; None: unknown.
    """

    def __init__(self, config: Config, hardware: HardwareSpec | None):
        """`hardware`: of this machine, if known; predictions need a calibrated one."""
        self.counters: dict[str, float] = {}
        self.iteration_tokens = [0] * (len(ITERATION_TOKENS) + 1)
        is_one = config.mesh.num_chips == 1  # the table is for steps of a single chip
        self.read_bandwidth = hardware.read_bandwidth if hardware is not None and is_one else None
        self._predicts = hardware is not None and hardware.is_calibrated
        self._table = StepTable(config, hardware or _UNKNOWN) if is_one else None
        self._last: StepRecord | None = None

    def prepare(self, shapes: Sequence[StepShape]) -> None:
        if self._table is not None:
            self._table.prepare(shapes)

    def read(self, records: Sequence[StepRecord]) -> None:
        """Counts records that are new since the last call; `records`: oldest first."""
        last = self._last
        new = list(itertools.takewhile(lambda record: record is not last, reversed(records)))
        if not new:
            return
        self._last = new[0]
        decoding = []
        for record in new:
            num_tokens = sum(queries for queries, _ in record.rows)
            self.iteration_tokens[bisect.bisect_left(ITERATION_TOKENS, num_tokens)] += 1
            kind = "prefill" if record.shape.prefill[0] else "decode"
            self._add("step_tokens", num_tokens)
            self._add("host_seconds", record.host_s)
            self._add(f"{kind}_steps", 1)
            self._add(f"{kind}_step_seconds", record.seconds)
            if kind == "decode":
                decoding.append(record)
        if self._table is not None:
            needs = self._table.needs(decoding)
            self._add("decode_step_bytes", needs.bytes)
            if self._predicts:
                self._add("predicted_decode_step_seconds", needs.seconds)

    def _add(self, name: str, value: float) -> None:
        self.counters[name] = self.counters.get(name, 0.0) + value
