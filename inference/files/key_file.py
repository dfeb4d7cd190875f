"""Files of keys, one a line, which a server checks and its clients send."""

from pathlib import Path

from configs.errors import InputError, reason


def read(label: str, path: str) -> list[str]:
    """The keys of a file, of which there is one at least; lines that begin with # are none.

    Raises:
        InputError: the file cannot be read, or has no key.
    """
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{label}: {reason(error)}") from None
    found = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not found:
        raise InputError(f"{label} holds no key: write one a line")
    return found
