"""Files that a user names: read whole, checked before any work, written whole or not at all."""

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from configs.errors import InputError, reason
from inference.files import atomic, object_store, staging


def open_file(path: str) -> BinaryIO:
    """Opens a file, a pipe or a terminal to read, or an object in a store; does not wait for a
    writer. Raises InputError if it cannot, or it is a directory, or a device, which may never end.
    """
    if object_store.is_url(path):
        return staging.opened(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a FIFO's other end may be missing
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or os.isatty(descriptor):
            os.set_blocking(descriptor, True)
            return os.fdopen(descriptor, "rb")
        os.close(descriptor)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot read {path}: {why}") from None
    kind = "a directory" if stat.S_ISDIR(mode) else "a device or a socket"
    raise InputError(f"cannot read {path}: it is {kind}, and a file is needed")


def read(path: str, max_bytes: int) -> bytes:
    """Reads a file, or a pipe; raises InputError if it cannot be read, or is larger."""
    with open_file(path) as file:
        try:
            data = file.read(max_bytes + 1)
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > max_bytes:
        limit = f"{max_bytes >> 20} MiB" if max_bytes >> 20 else f"{max_bytes} bytes"
        raise InputError(f"{path}: at most {limit} are read; cut it into parts")
    return data


def read_text(path: str, max_bytes: int) -> str:
    """Reads UTF-8 without a byte order mark; raises InputError as `read`, or for other bytes."""
    try:
        return read(path, max_bytes).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: byte {error.start}") from None


def check_target(label: str, name: str, ending: str = "") -> Path:
    """Returns the file of a name, links followed. `label` is its name in errors, such as
    "--output=x".

    Raises:
        InputError: it cannot become a file: it is something else or has another `ending`, or its
            folder is missing or cannot be written to.
    """
    try:
        path = Path(name).resolve()
        is_free = path.is_file() or not path.exists()
        if not (path.parent.is_dir() and is_free and ending in ("", Path(name).suffix)):
            kind = f"{ending} file" if ending else "file"
            raise InputError(f"{label}: {path} is not a {kind} in an existing folder")
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a NUL
        if isinstance(error, InputError):
            raise
        raise InputError(f"{label[:80]!r} is no path: {reason(error)[:200]}") from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"{label}: the folder {path.parent} cannot be written to")
    return path


def write(contents: Mapping[Path, bytes]) -> None:
    """Writes files, none of which replaces anything before all are complete; a store gets those
    for it (`staging`) afterwards. Raises InputError, naming the first, if one cannot be written.
    """
    try:
        with contextlib.ExitStack() as stack:
            for path, content in contents.items():
                stack.enter_context(atomic.open_file(path)).write(content)
    except OSError as error:
        raise InputError(f"cannot write {next(iter(contents))}: {error.strerror}") from None
    for path, content in contents.items():
        staging.publish(path, content)
