"""Calls into Rust (`tokenizers`, `llguidance`), which may panic: one clear line and no trace."""

import contextlib
import os
import re
import tempfile
import threading
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, TypeVar

from configs.errors import InputError, is_fault, is_panic

if TYPE_CHECKING:
    import tokenizers

_T = TypeVar("_T")

# Of the parts that read a text, those that were seen to panic: a table of characters that points
# outside itself, and a pattern that backtracks without end, which takes a repeated group.
_RISK = re.compile(rb'"Precompiled"|\)[*+{]')


class _HeldStderr:
    """Keeps back what is written to stderr meanwhile: a Rust panic leaves a trace there before it
    is an exception. Several threads may hold it; the last one lets go.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._own: int | None = None  # stderr itself; None: there is none, or it is not held
        self._held: IO[bytes] | None = None
        self._panicked = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                with contextlib.suppress(OSError):
                    os.fstat(2)  # there may be none, whose place a new file would take
                    self._held = self._held or tempfile.TemporaryFile(buffering=0)
                    self._own = os.dup(2)
                    os.dup2(self._held.fileno(), 2)
            self._depth += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            self._panicked = self._panicked or is_panic(kind)
            if self._depth or self._own is None:
                return
            os.dup2(self._own, 2)
            os.close(self._own)
            self._own = None
            self._pass_on()

    def _pass_on(self) -> None:
        assert self._held is not None
        if self._held.tell():
            self._held.seek(0)
            text = self._held.read()
            self._held.seek(0)
            self._held.truncate()
            if not self._panicked:  # what others wrote
                with contextlib.suppress(OSError):  # nobody reads it any more
                    os.write(2, text)
        self._panicked = False


_STDERR = _HeldStderr()


def may_panic(backend: "tokenizers.Tokenizer") -> bool:
    """Whether a tokenizer that has encoded one text may panic at another. No published vocabulary
    of the families served here does.
    """
    parts = filter(None, (backend.normalizer, backend.pre_tokenizer))
    return any(_RISK.search(part.__getstate__()) for part in parts)


def guard(call: Callable[[], _T], message: str, holds_stderr: bool = True) -> _T:
    """Runs a call into Rust, whose panics are no `Exception`s.

    Args:
        call: what to run.
        message: begins the line of a failure.
        holds_stderr: keep the trace of a panic from stderr, which is the whole process's: for files
            that are being loaded, and tokenizers that may panic.

    Raises:
        InputError: the call failed or panicked.
    """
    try:
        with _STDERR if holds_stderr else contextlib.nullcontext():
            return call()
    except BaseException as error:
        if not is_fault(error):
            raise
        raise InputError(f"{message}: {' '.join(str(error).split())[:300]}") from None
