"""What models are trained on: a text file, or the standard library of the running Python."""

import contextlib
import sysconfig
from pathlib import Path

from configs.errors import InputError
from inference.files import user_files

_MAX_BYTES = 1 << 30  # of a file

# Of the standard library: tables of characters are no text, and `scripts.evaluate` scores the help
# topics of `pydoc_data` by default, which no training has then seen.
_LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
}


def of_file(name: str) -> list[str]:
    """The text of a file, one document; raises InputError if it cannot be read, or there is no text
    in it.
    """
    text = user_files.read_text(name, _MAX_BYTES)
    if not text.strip():
        raise InputError(f"{name}: no text to train on")
    return [text]


def standard_library() -> list[str]:
    """The sources of the running Python's own modules, tests left out, in the order of their
    names.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = (path.relative_to(root) for path in root.rglob("*.py"))
    names = sorted(path.as_posix() for path in paths if not _LEFT_OUT & set(path.parts[:-1]))
    texts = []
    for name in names:
        with contextlib.suppress(OSError, UnicodeDecodeError):  # some are there to be unreadable
            texts.append((root / name).read_bytes().decode())
    return [text for text in texts if text.strip()]
