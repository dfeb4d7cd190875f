"""What an app says of the error that ends it: one line, with what to do where the machine's limits
are the cause.
"""

import errno
import importlib.util
import resource
import traceback

from configs.errors import InputError, reason

_MAX_CHARS = 400  # of what others say: XLA's run to pages
_LEAST_ADDRESSES = 1800 << 20
_ELSEWHERE = "free some there, or write elsewhere (--output, RIDGELINE_CACHE)"
_MORE_MEMORY = (
    "raise the limit of this process (ulimit -v, or its container's), or take a smaller model, "
    "fewer bits (--weights) or a smaller cache (--set=engine.cache.cache_bytes)"
)
_ADVICE = {
    errno.ENOSPC: _ELSEWHERE,
    errno.EDQUOT: _ELSEWHERE,
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "write elsewhere (--output, RIDGELINE_CACHE)",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "end what holds so many files open on this machine",
    errno.ENOMEM: _MORE_MEMORY,
    errno.EAGAIN: "raise the limit on threads and processes (ulimit -u)",
}
_OF_LIBRARIES = {  # which raise errors of their own, or lose the number
    "No space left on device": errno.ENOSPC, "requested and": errno.ENOSPC,
    "Too many open files": errno.EMFILE,
    "Read-only file system": errno.EROFS, "File too large": errno.EFBIG,
    "Cannot allocate memory": errno.ENOMEM, "RESOURCE_EXHAUSTED": errno.ENOMEM,
    "bad_alloc": errno.ENOMEM, "can't start new thread": errno.EAGAIN,
}  # fmt: skip


def check_limits() -> None:
    """Raises InputError if JAX's code and threads lack room, which would end the process."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < _LEAST_ADDRESSES:
        raise InputError(
            f"this process may have {limit >> 20} MiB of addresses (ulimit -v), and JAX alone "
            f"takes {_LEAST_ADDRESSES >> 20} MiB: raise the limit"
        )


def check_packages(reader: str, extras: str, *names: str) -> None:
    """Raises InputError if one of the packages that some extras install is missing."""
    if any(importlib.util.find_spec(name) is None for name in names):
        raise InputError(f"{reader} needs more packages: pip install '.[{extras}]'")


def line(error: Exception) -> str:
    if not isinstance(error, InputError | OSError | MemoryError | RuntimeError):
        *_, last = traceback.extract_tb(error.__traceback__)
        return (
            f"a fault of this program, {type(error).__name__}: {reason(error)[:_MAX_CHARS]} "
            f"({last.filename}:{last.lineno}); --verbosity=1 shows the trace"
        )
    message = str(error) if isinstance(error, InputError) else reason(error)[:_MAX_CHARS]
    advice = _advice(error)
    return f"{message}; {advice}" if advice and advice not in message else message


def _advice(error: BaseException | None) -> str | None:
    messages = ""
    while error is not None:
        if isinstance(error, MemoryError):
            return _MORE_MEMORY
        if isinstance(error, OSError) and error.errno in _ADVICE:
            return _ADVICE[error.errno]
        messages += f"{error}\n"  # whole: messages of apps cut those of libraries
        error = error.__cause__ or error.__context__
    return next(
        (_ADVICE[number] for text, number in _OF_LIBRARIES.items() if text in messages), None
    )
