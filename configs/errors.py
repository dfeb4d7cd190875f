"""The one exception for what a user can put right, and the words of others."""

import math

_SHOWN_CHARS = 80


class InputError(ValueError):
    """One line that names the cause and what would be valid; scripts print it and exit 1."""


def check_positive(owner: object, prefix: str, *names: str) -> None:
    """Refuses fields that are no finite numbers above 0; None is valid.

    Raises:
        InputError: the message starts with `prefix` and the field.
    """
    for name in names:
        value = getattr(owner, name)
        if value is not None and not 0 < value < math.inf:  # NaN is not either
            raise InputError(f"{prefix}{name} is a finite number above 0, not {value}")


def reason(error: BaseException) -> str:
    """What an exception says, in one line, without its class and number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    message = " ".join(str(error).split())
    return message or ("out of memory" if isinstance(error, MemoryError) else "it gives no reason")


def is_panic(kind: type[BaseException] | None) -> bool:
    """Whether exceptions of a class are panics of Rust code, which are no `Exception`s."""
    return kind is not None and kind.__name__ == "PanicException"


def is_fault(error: BaseException) -> bool:
    """Whether code failed, rather than that somebody ends or interrupts it."""
    return isinstance(error, Exception) or is_panic(type(error))


def shown(value: object) -> str:
    """A value in a message: of one line, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 256:  # its digits may be refused, or slow
        return f"a number of {value.bit_length()} bits"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a list of such numbers, or somebody's own class
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
