"""Calls into Rust (`tokenizers`, `llguidance`), which may panic: one clear line and no trace."""

import contextlib
import json
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
_TABLE = b'"Precompiled"'
_PATTERN = re.compile(rb'"Regex":("(?:\\.|[^"\\])*")')
_REPEATED, _CLASS = re.compile(r"\)[*+{]"), re.compile(r"\[(?:\\.|[^\]\\])*\]")

_LOCK = threading.RLock()  # stderr is the whole process's: one thread at a time holds it


class _CapturedStderr:
    """Keeps back what is written to stderr within it: a Rust panic leaves a trace there before it
    is an exception. What others write is passed on behind it. One may be held within another.
    """

    def __init__(self) -> None:
        self._stderr: IO[bytes] | None = (
            None  # stderr itself; None: there is none, or it is not held
        )
        self._captured: IO[bytes] | None = None
        self._failure: BaseException | None = None
        self._panicked = False

    def __enter__(self) -> None:
        with contextlib.suppress(OSError):
            os.fstat(2)  # there may be none, whose place a new file would take
            self._stderr = os.fdopen(os.dup(2), "wb", 0)
            self._captured = tempfile.TemporaryFile(buffering=0)
            os.dup2(self._captured.fileno(), 2)

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: object
    ) -> bool:
        self._failure, self._panicked = failure, is_panic(kind)
        self.close()
        return True

    def close(self) -> None:
        """Lets go; where an interrupt came between, the rest of it."""
        if self._stderr is None or self._stderr.closed:
            return
        os.dup2(self._stderr.fileno(), 2)
        if self._captured is not None and not self._captured.closed:
            self._captured.seek(0)
            if (text := self._captured.read()) and not self._panicked:
                with contextlib.suppress(OSError):  # nobody reads it any more
                    os.write(2, text)
            self._captured.close()
        self._stderr.close()

    def take_failure(self) -> BaseException:
        """What was raised within it, which is to be raised once stderr is free."""
        failure, self._failure = self._failure, None
        assert failure is not None
        return failure


def may_panic(backend: "tokenizers.Tokenizer") -> bool:
    """Whether a tokenizer that encoded one text may panic at another: no served family's does."""
    parts = filter(None, (backend.normalizer, backend.pre_tokenizer))
    states = [part.__getstate__() for part in parts]
    patterns = (json.loads(p) for state in states for p in _PATTERN.findall(state))
    repeats = any(_REPEATED.search(_CLASS.sub("", pattern)) for pattern in patterns)
    return repeats or any(_TABLE in state for state in states)


def guard(call: Callable[[], _T], message: str, holds_stderr: bool = True) -> _T:
    """Runs a call into Rust, whose panics are no `Exception`s.

    Args:
        message: begins the line of a failure.
        holds_stderr: keep the trace of a panic from stderr, which is the whole process's: for files
            that are being loaded, and tokenizers that may panic.

    Raises:
        InputError: the call failed or panicked.
    """
    try:
        if not holds_stderr:
            return call()
        stderr = _CapturedStderr()
        # Closed again behind it: an interrupt may come at any point of its own exit, or before it.
        with _LOCK, contextlib.closing(stderr), stderr:
            return call()
        raise stderr.take_failure()
    except BaseException as error:
        if not is_fault(error):
            raise
        raise InputError(f"{message}: {' '.join(str(error).split())[:300]}") from None
