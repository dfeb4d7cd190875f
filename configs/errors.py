"""The one exception for what a user can put right."""

from typing import Any

_SHOWN_CHARS = 80


class InputError(ValueError):
    """One line that names the cause and what would be valid; scripts print it and exit 1."""


def shown(value: Any) -> str:
    """A value from a file in a message: of one line, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 256:  # its digits may be refused, or slow
        return f"a number of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
