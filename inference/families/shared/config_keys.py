"""A JSON object of a checkpoint's configuration, read by type; errors name the key."""

import dataclasses
import sys
from collections.abc import Iterable, Mapping

from configs.errors import InputError, shown
from configs.kinds.kind import MOST_WIDTH


@dataclasses.dataclass(frozen=True)
class Keys:
    """The object, and where it stands ('rope_scaling: ') for messages.

    A key that is absent and one that is null are the same, unless a method says otherwise.
    """

    raw: dict[str, object]
    label: str = ""

    def updated(self, values: Mapping[str, object]) -> "Keys":
        return Keys(self.raw | dict(values), self.label)

    def with_defaults(self, defaults: Mapping[str, object]) -> "Keys":
        """Returns the object with values for absent keys; a key that is null stays so."""
        return Keys(dict(defaults) | self.raw, self.label)

    def require_neutral(
        self, except_for: Iterable[str] = (), /, **neutral: tuple[object, ...]
    ) -> None:
        """Raises InputError for the first key whose value is not one that changes nothing."""
        for key, values in neutral.items():
            if key not in except_for and self.raw.get(key) not in values:
                valid = ", ".join(repr(value) for value in values if value is not None)
                raise InputError(
                    f"{self.label}{key}={shown(self.raw.get(key))} is not supported; "
                    + (f"valid: {valid}" if valid else "leave it out")
                )

    def integer(self, key: str, default: int | None = None, limit: int = MOST_WIDTH) -> int:
        """Returns an integer from 1 to `limit`."""
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise InputError(
                f"{self.label}{key} must be an integer from 1 to {limit}, not {shown(value)}"
            )
        return value

    def whole(self, key: str, default: int, limit: int = MOST_WIDTH) -> int:
        """Returns an integer from 0 to `limit`."""
        value = self.raw.get(key)
        value = default if value is None else value
        return 0 if type(value) is int and value == 0 else self.integer(key, default, limit)

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a finite number above 0."""
        value = self.raw.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(f"{self.label}{key} must be a number, not {shown(value)}")
        if not 0 < value <= sys.float_info.max:
            raise InputError(f"{self.label}{key} must be positive and finite, not {shown(value)}")
        return float(value)

    def optional_number(self, key: str, absent: float | None = None) -> float | None:
        """Returns a `number`: `absent` where there is no such key, None where it is null."""
        return None if self.raw.get(key, absent) is None else self.number(key, absent)

    def optional_integer(self, key: str, absent: int | None = None) -> int | None:
        """Returns an `integer`: `absent` where there is no such key, None where it is null."""
        return None if self.raw.get(key, absent) is None else self.integer(key, absent)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise InputError(f"{self.label}{key} must be true or false, not {shown(value)}")
        return value

    def choice(self, key: str, valid: dict[str, str], default: str) -> str:
        """Returns the entry of `valid` that the file names."""
        value = self.raw.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in valid:
            raise InputError(
                f"{self.label}{key}={shown(value)} is not supported; valid: {', '.join(valid)}"
            )
        return valid[value]

    def listed(self, key: str, length: int) -> list[object] | None:
        """Returns a list with an entry for each of `length` layers, or None."""
        value = self.raw.get(key)
        if value is not None and (not isinstance(value, list) or len(value) != length):
            raise InputError(f"{self.label}{key} must list one kind for each of {length} layers")
        return value

    def numbers(self, key: str, limit: int) -> tuple[float, ...]:
        """Returns at most `limit` finite numbers above 0."""
        value = self.raw.get(key)
        if not isinstance(value, list) or len(value) > limit:
            raise InputError(
                f"{self.label}{key} must be a list of at most {limit} numbers, not {shown(value)}"
            )
        return tuple(Keys({key: item}, self.label).number(key) for item in value)

    def nested(self, key: str) -> "Keys | None":
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise InputError(f"{self.label}{key} must be an object, not {shown(value)}")
        return Keys(value, f"{self.label}{key}: ")
