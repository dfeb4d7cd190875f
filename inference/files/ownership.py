"""Whether files of ours that run or are mapped are the user's own: who may write one decides what
this process does.
"""

import os
from pathlib import Path

from configs.errors import InputError

_OTHERS_WRITE = 0o022


def check(path: Path) -> None:
    """Raises InputError, with advice, if another user may write into a directory, or to a file or
    into its directory, and OSError if it is missing.
    """
    for place in (path,) if path.is_dir() else (path, path.parent):
        status = place.stat()
        if status.st_uid not in (os.getuid(), 0):
            raise InputError(
                f"{place} is another user's: chown it, or RIDGELINE_CACHE=DIR keeps such files "
                "elsewhere"
            )
        if status.st_mode & _OTHERS_WRITE:
            raise InputError(f"{place} can be written by other users: chmod go-w {place}")
