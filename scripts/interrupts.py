"""Ctrl-C and SIGTERM: one line and exit status 1 wherever they land, or a moment of the app's own
choosing.

Every app imports this first. In a process that runs an app, either then ends it at once, imports
included; while `caught`, it raises KeyboardInterrupt instead, so that what is under way is undone.
Inside JAX and imports that exception would be printed, turned into another one or lost, and in the
scheduler it would leave a sequence in no queue: there it waits until they return to their caller.
"""

import contextlib
import os
import signal
import sys
from types import FrameType  # and not `typing`, which takes as long to import as all of these

_UNSAFE = (
    "jax", "jaxlib", "importlib", "_frozen_importlib", "_frozen_importlib_external",
    "inference.scheduling", "inference.kv_pages",
)  # fmt: skip

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_is_caught = False
_is_waiting = False


class caught:  # noqa: N801
    """Context in which an interrupt is a KeyboardInterrupt, as long as the last one was raised."""

    def __enter__(self) -> None:
        global _is_caught
        _is_caught = True

    def __exit__(self, *exception: object) -> None:
        """From here on an interrupt ends the process at once."""
        global _is_caught
        _is_caught = False


class Deferred:
    """The first interrupt only sets `requested`, the second is as usual; ignored ones stay so."""

    def __enter__(self) -> "Deferred":
        self.requested = False
        self._before = {
            number: before
            for number in _SIGNALS
            if (before := signal.getsignal(number)) in (signal.default_int_handler, _on_signal)
        }
        for number in self._before:
            signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        before = self._before[signal.Signals(number)]
        if self.requested and callable(before):
            before(number, frame)
        self.requested = True


def end_at_sigterm() -> None:
    """From here on SIGTERM does not wait for a moment of the app's choosing, as Ctrl-C does."""
    if _runs_app:
        signal.signal(signal.SIGTERM, lambda *arguments: end())


def end() -> None:
    """Ends a process that runs an app: nothing that happens on the way out is seen."""
    if not _runs_app:
        return
    cursor = b"\033[?25h" if os.isatty(2) else b""  # which a progress bar may have hidden
    with contextlib.suppress(OSError):
        os.write(2, cursor + b"error: interrupted\n")
    os._exit(1)


def ignore() -> None:
    """The work is done: an interrupt on the way out changes nothing."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_IGN)


def leave(status: int) -> None:
    """Ends an app's process without taking anything down: no thread is waited for."""
    if not _runs_app:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # None, or closed
            stream.flush()
    os._exit(status)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _is_waiting
    if not _is_caught or _is_waiting:
        end()
    stack = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    caller = stack[-1]
    for inner in reversed(stack):
        name = f"{inner.f_globals.get('__name__')}."
        if any(name.startswith(f"{unsafe}.") for unsafe in _UNSAFE):
            break
        caller = inner
    else:
        raise KeyboardInterrupt
    _is_waiting = True
    caller.f_trace = _raise
    sys.settrace(lambda *event: None)  # without it no frame's own is called


def _raise(frame: FrameType, event: str, argument: object) -> object:
    global _is_waiting
    if event == "exception":  # of what was waited for; it may be caught
        return _raise
    sys.settrace(None)
    _is_waiting = False
    raise KeyboardInterrupt


_spec = getattr(sys.modules["__main__"], "__spec__", None)
_runs_app = _spec is not None and _spec.name.startswith("scripts.")  # and does not only import one
for _number in _SIGNALS if _runs_app else ():
    if signal.getsignal(_number) in (signal.default_int_handler, signal.SIG_DFL):
        signal.signal(_number, _on_signal)
