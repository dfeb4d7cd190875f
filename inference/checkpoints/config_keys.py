"""A JSON object of a checkpoint's configuration, read by type: a wrong value is named."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from configs.errors import InputError

_MAX_WIDTH = 1 << 24


@dataclasses.dataclass(frozen=True)
class Keys:
    """The object, and where it stands ('rope_scaling: ') for messages.

    A key that is absent and one that is null are the same, unless a method says otherwise.
    """

    raw: dict[str, Any]
    label: str = ""

    def require_neutral(
        self, neutral: dict[str, tuple[Any, ...]], except_for: Iterable[str] = ()
    ) -> None:
        """Raises InputError for the first key with a value that would change the model."""
        for key, values in neutral.items():
            if key not in except_for and self.raw.get(key) not in values:
                raise InputError(f"{self.label}{key}={str(self.raw[key])[:80]} is not supported")

    def integer(self, key: str, default: int | None = None, limit: int = _MAX_WIDTH) -> int:
        """An integer from 1 to `limit`."""
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise InputError(
                f"{self.label}{key} must be an integer from 1 to {limit}, not {value!r}"
            )
        return value

    def whole(self, key: str, default: int, limit: int = _MAX_WIDTH) -> int:
        """An integer from 0 to `limit`."""
        return 0 if self.raw.get(key) == 0 else self.integer(key, default, limit)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{self.label}{key} must be a number, not {value!r}")
        if not (math.isfinite(value) and value > 0):
            raise InputError(f"{self.label}{key} must be positive and finite, not {value}")
        return float(value)

    def optional_number(self, key: str, absent: float | None = None) -> float | None:
        """As `number`; `absent` where there is no such key, None where it is null."""
        return None if self.raw.get(key, absent) is None else self.number(key, absent)

    def optional_integer(self, key: str, absent: int | None = None) -> int | None:
        """As `integer`; `absent` where there is no such key, None where it is null."""
        return None if self.raw.get(key, absent) is None else self.integer(key, absent)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise InputError(f"{self.label}{key} must be true or false, not {value!r}")
        return value

    def choice(self, key: str, valid: dict[str, str], default: str) -> str:
        """What `valid` makes of one of its keys."""
        value = self.raw.get(key) or default
        if not isinstance(value, str) or value not in valid:
            raise InputError(
                f"{self.label}{key}={value!r} is not supported; valid: {', '.join(valid)}"
            )
        return valid[value]

    def listed(self, key: str, length: int) -> list[Any] | None:
        """A list with one entry for each of `length` layers."""
        value = self.raw.get(key)
        if value is not None and (not isinstance(value, list) or len(value) != length):
            raise InputError(f"{self.label}{key} must list one kind for each of {length} layers")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers above 0."""
        value = self.raw.get(key)
        if not isinstance(value, list):
            raise InputError(f"{self.label}{key} must be a list of numbers, not {value!r:.80}")
        return tuple(Keys({key: item}, self.label).number(key) for item in value)

    def nested(self, key: str) -> "Keys | None":
        """The object at a key."""
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise InputError(f"{self.label}{key} must be an object, not {value!r}")
        return Keys(value, f"{self.label}{key}: ")
