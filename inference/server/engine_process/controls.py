"""Carries out what concerns the engine as a whole: pause, sleep and other weights."""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from configs.errors import InputError, reason
from inference.server.engine_process.served import Served
from inference.server.frames import (
    Control,
    Controlled,
    LoadAdapter,
    Pause,
    Resume,
    Sleep,
    UpdateWeights,
    Wake,
)

if TYPE_CHECKING:  # a process that speaks HTTP loads no engine
    from inference.new_weights import NewWeights

_log = logging.getLogger(__name__)


class Controls:
    """Takes `Control` messages, and carries them out between two steps, in their order. Weights are
    read in a second thread, beside steps.

    Attributes:
        is_awake: requests can be added.
        is_busy: the loop waits for one of them.
    """

    def __init__(self, engine: Served, send: Callable[[Controlled], None]):
        """`send`: takes the answer to each message."""
        self.is_awake = True
        self.is_busy = False
        self._engine = engine
        self._send = send
        self._is_paused = False
        self._due: deque[tuple[Control, Future[NewWeights] | None]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")

    @property
    def may_step(self) -> bool:
        return self.is_awake and not self._is_paused

    @property
    def has_due(self) -> bool:
        """Whether a message is not carried out yet."""
        return bool(self._due)

    def take(self, message: Control) -> None:
        source = message.source if isinstance(message, Wake | UpdateWeights) else None
        reading = None
        if source is not None:
            reading = self._thread.submit(self._engine.read_weights, source.path)
        self._due.append((message, reading))

    def carry_out(self) -> None:
        """Carries out the messages whose weights are read."""
        while self._due and ((reading := self._due[0][1]) is None or reading.done()):
            message, reading = self._due.popleft()
            self.is_busy, error = True, ""
            try:
                self._do(message, None if reading is None else _read(reading))
            except InputError as refusal:
                error = str(refusal)
            self.is_busy = False
            self._send(Controlled(message.id, self._engine.weight_version, error))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _do(self, message: Control, new: "NewWeights | None") -> None:
        if isinstance(message, Pause | Resume):
            self._is_paused = isinstance(message, Pause)
        elif isinstance(message, Sleep):
            self._engine.sleep(message.keeps_weights)
            self.is_awake = False
        elif isinstance(message, Wake):
            self._engine.wake(new, None if message.source is None else message.source.version)
            self.is_awake = True
        elif isinstance(message, LoadAdapter):
            self._engine.load_adapter(message.name, message.path)
        else:
            assert new is not None
            self._engine.update_weights(new, message.source.version, message.keeps_pages)


def _read(reading: "Future[NewWeights]") -> "NewWeights":
    """Returns weights that were read; raises InputError for whatever came between."""
    try:
        return reading.result()
    except InputError:
        raise
    except Exception as error:  # of the device's memory, the disk, or a file's library
        _log.exception("weights could not be read")
        raise InputError(f"the weights could not be read: {reason(error)}") from None
