"""Files of requests: a JSON object a line."""

import collections
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from configs.errors import InputError
from inference.files import user_files

_MAX_BYTES = 64 << 20


def read(
    name: str,
    one_of: Collection[str],
    optional: Collection[str] | None,
    description: str,
    former: Mapping[str, str] | None = None,
    *,
    max_bytes: int = _MAX_BYTES,
    max_line_chars: int = _MAX_BYTES,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the number and the object of each line, blank lines aside.

    Args:
        one_of: keys of which an object has exactly one.
        optional: keys that it may have beside that one; None: any.
        description: what a line is, for errors.
        former: names that keys had in earlier versions, with those that they have now.
        max_bytes, max_line_chars: of the file, and of a line.

    Raises:
        InputError: the file or a line is too long, the file cannot be read or has no object, or a
            line is not one; names the line.
    """
    valid, is_empty = [*one_of, *(optional or ())], True
    lines = user_files.read_text(name, max_bytes).split("\n")  # not at U+2028, as splitlines
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name} line {number}"
        if len(line) > max_line_chars:
            raise InputError(f"{where} has more than {max_line_chars} characters")
        try:
            fields = json.loads(line, object_pairs_hook=unique_keys)
        except json.JSONDecodeError as error:
            raise InputError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:  # a number of 5,000 digits; deep nesting
            raise InputError(f"{where} is not JSON: {error}") from None
        if not isinstance(fields, dict) or len(set(one_of) & set(fields)) != 1:
            raise InputError(f"{where} is not {description}")
        unknown = [key for key in fields if key not in valid and optional is not None]
        if unknown and former and unknown[0] in former:
            raise InputError(f"{where}: {unknown[0]!r} is called {former[unknown[0]]!r} now")
        if unknown:
            raise InputError(f"{where}: {unknown[0]!r:.60} is not one of {', '.join(valid)}")
        is_empty = False
        yield number, fields
    if is_empty:
        raise InputError(f"{name}: no line holds a request; each is {description}")


def unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """For `json.loads(object_pairs_hook=...)`; raises ValueError if a key appears twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"duplicate key {twice[:80]!r}")
    return values
