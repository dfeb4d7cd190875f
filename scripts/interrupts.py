"""Ctrl-C at a moment of one's own choosing: between two steps and never within one."""

import signal
from types import FrameType
from typing import Any


class Deferred:
    """Context in which the first interrupt only sets `asked`, and the second is the usual one.
    Where interrupts are ignored, as by a job in the background, they stay so.
    """

    def __enter__(self) -> "Deferred":
        """Starts to listen."""
        self.asked = False
        self._before: Any = signal.getsignal(signal.SIGINT)
        if self._before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exception: Any) -> None:
        """Leaves interrupts as they were."""
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
