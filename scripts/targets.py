"""Files that are to be written: checked before any work."""

import os
from pathlib import Path

from configs.errors import InputError


def check(label: str, name: str) -> Path:
    """The file of a name, links followed.

    Args:
        label: of the name in errors, such as "--output=x".
        name: as it was given.

    Raises:
        InputError: it cannot become a file: it is something else, or its folder is missing or
            cannot be written to.
    """
    try:
        path = Path(name).resolve()
        if not path.parent.is_dir() or (path.exists() and not path.is_file()):
            raise InputError(f"{label}: {path} is not a file in an existing folder")
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a NUL
        if isinstance(error, InputError):
            raise
        raise InputError(f"{label[:80]!r} is no path: {error}") from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"{label}: the folder {path.parent} cannot be written to")
    return path
