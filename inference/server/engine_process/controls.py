"""Carries out what concerns the engine as a whole: pause, sleep and other weights."""

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

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
        self._due: deque[tuple[Control, Future[Any] | None]] = deque()
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
        reading: Future[Any] | None = None
        if source is not None:
            reading = self._thread.submit(self._engine.read_weights, source.path)
        elif isinstance(message, LoadAdapter) and message.path is not None:
            reading = self._thread.submit(self._engine.read_adapter, message.path)
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
            except Exception as failure:  # of memory, which leaves all as it was
                if not isinstance(message, Sleep | Wake):
                    raise
                _log.exception("the engine could not sleep, or wake")
                error = f"the engine could not do that: {reason(failure)}"
            self.is_busy = False
            self._send(Controlled(message.id, self._engine.weight_version, error))

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _do(self, message: Control, new: Any) -> None:
        """`new`: the weights or the adapter that were read for the message."""
        if isinstance(message, Pause | Resume):
            self._is_paused = isinstance(message, Pause)
        elif isinstance(message, Sleep):
            self._engine.sleep(message.keeps_weights)
            self.is_awake = False
        elif isinstance(message, Wake):
            self._engine.wake(new, None if message.source is None else message.source.version)
            self.is_awake = True
        elif isinstance(message, LoadAdapter):
            if message.path is None:
                self._engine.unload_adapter(message.name)
            else:
                self._engine.add_adapter(message.name, new)
        else:
            assert new is not None
            self._engine.update_weights(new, message.source.version, message.keeps_pages)


def _read(reading: Future[Any]) -> Any:
    """Returns weights or an adapter that were read; raises InputError for whatever came between."""
    try:
        return reading.result()
    except InputError:
        raise
    except Exception as error:  # of the device's memory, the disk, or a file's library
        _log.exception("weights could not be read")
        raise InputError(f"the weights could not be read: {reason(error)}") from None
