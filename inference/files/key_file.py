"""Files of keys, one a line, which a server checks and its clients send."""

import os

from configs.errors import InputError
from inference.files import user_files

_MAX_BYTES = 1 << 20


def read(label: str, path: str) -> list[str]:
    """Reads keys, at least one; lines that begin with # are none. Raises InputError if the file is
    unreadable, or has no key.
    """
    try:
        lines = user_files.read_text(os.path.expanduser(path), _MAX_BYTES).splitlines()
    except InputError as error:
        raise InputError(f"{label}: {error}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise InputError(f"{label} holds no key: write one a line")
    return keys
