"""Text files that a user names, read whole."""

from configs.errors import InputError


def read_text(path: str, max_bytes: int) -> str:
    """A UTF-8 file, its line ends as they are; a byte order mark at its start is no text.

    Raises:
        InputError: it cannot be read, is larger (a device that never ends, say), or is not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"cannot read {path}: {reason}") from None
    if len(data) > max_bytes:
        raise InputError(f"{path}: at most {max_bytes >> 20} MiB are read; cut it into parts")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: byte {error.start}") from None
