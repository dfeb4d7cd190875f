"""Files that flags name: checked before any work, written whole."""

from pathlib import Path

from absl import flags

from configs.errors import InputError
from scripts import common

PLOT = flags.DEFINE_string("plot", None, "PNG file: a picture of the result.")


def check(name: str, text: str, ending: str) -> None:
    """Whether a file could get this name.

    Raises:
        InputError: it has another ending, or its folder does not exist.
    """
    try:
        path = Path(text)
        if path.suffix != ending or path.is_dir() or not path.resolve().parent.is_dir():
            raise InputError(f"--{name} is a {ending} file in an existing folder, not {text!r}")
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a NUL
        if isinstance(error, InputError):
            raise
        raise InputError(f"--{name}={text[:80]!r} is no path: {error}") from None


def write(name: str, content: bytes) -> None:
    """The file, whole; says so on stderr.

    Raises:
        InputError: it cannot be written.
    """
    from inference import files

    try:
        with files.atomic_file(Path(name)) as file:
            file.write(content)
    except OSError as error:
        raise InputError(f"cannot write {name}: {error.strerror}") from None
    common.say(f"wrote {name}")
