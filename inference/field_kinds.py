"""Kinds of request fields: which values are valid, and how Python holds them."""

import dataclasses
import math
import numbers
import operator
from collections.abc import Mapping
from typing import Any

from configs.errors import InputError, shown


@dataclasses.dataclass(frozen=True)
class Number:
    """A number of `type` from `low` (`is_open`: above it) to `high`."""

    type: type[int] | type[float]
    low: float
    high: float = math.inf
    is_open: bool = False

    def read(self, name: str, value: Any) -> int | float:
        """Returns the value as Python's own number.

        Raises:
            InputError: it is not valid; names the field. The same holds for every kind.
        """
        value = _plain(value)
        abstract = numbers.Integral if self.type is int else numbers.Real
        is_number = isinstance(value, abstract) and not isinstance(value, bool)
        is_in_range = is_number and self.low <= value <= self.high  # NaN is in none
        if not is_in_range or (self.is_open and value == self.low):
            noun = "whole number" if self.type is int else "number"
            low, high = f"from {self.low}", f"to {self.high}"
            if self.is_open:
                low, high = f"above {self.low}", f"and at most {self.high}"
            high = "on" if self.high == math.inf else high
            raise InputError(f"{name} is a {noun} {low} {high}, not {shown(value)}")
        return self.type(value)


@dataclasses.dataclass(frozen=True)
class Switch:
    """True or false."""

    def read(self, name: str, value: Any) -> bool:
        value = _plain(value)
        if not isinstance(value, bool):
            raise InputError(f"{name} is true or false, not {shown(value)}")
        return value


@dataclasses.dataclass(frozen=True)
class Text:
    """A text of at least one character and at most `max_length`."""

    max_length: int | None = None

    def read(self, name: str, value: object) -> str:
        if not isinstance(value, str) or not value:
            raise InputError(f"{name} is a text of at least one character, not {shown(value)}")
        return value


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of some texts."""

    choices: tuple[str, ...]

    def read(self, name: str, value: object) -> str:
        if value not in self.choices:
            raise InputError(f"{name} is one of {', '.join(self.choices)}, not {shown(value)}")
        return str(value)


@dataclasses.dataclass(frozen=True)
class Texts:
    """A list of texts; an HTTP body limits how many they are and how long each is."""

    max_items: int | None = None
    max_length: int | None = None

    def read(self, name: str, value: object) -> tuple[str, ...]:
        try:
            texts = _items(value)
            if not all(isinstance(text, str) and text for text in texts):
                raise TypeError
        except TypeError:
            raise InputError(
                f"{name} is a list of strings, each of at least one character, not {shown(value)}"
            ) from None
        for text in texts:
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise InputError(f"{name} {shown(text)} can never match: it has no UTF-8 form")
        return texts


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """A list of token ids; an HTTP body limits how many they are."""

    min_items: int | None = None
    max_items: int | None = None

    def read(self, name: str, value: object) -> tuple[int, ...]:
        try:
            ids = _items(value)
            if any(isinstance(id, bool) for id in ids):
                raise TypeError
            return tuple(map(operator.index, ids))
        except TypeError:
            raise InputError(f"{name} is a list of token ids, not {shown(value)}") from None


@dataclasses.dataclass(frozen=True)
class Biases:
    """Token ids with a number of kind `bias` each: a mapping, or pairs."""

    bias: Number
    max_items: int | None = None

    def read(self, name: str, value: Any) -> tuple[tuple[int, float], ...]:
        try:
            pairs = [*(value.items() if hasattr(value, "items") else value)]
            pairs = [(id, bias) for id, bias in pairs]
        except (TypeError, ValueError):
            raise InputError(f"{name} maps token ids to numbers, not {shown(value)}") from None
        ids = TokenIds().read(name, [id for id, _ in pairs])
        return tuple(
            (id, self.bias.read(f"{name} of {shown(id)}", bias))
            for id, (_, bias) in zip(ids, pairs, strict=True)
        )


Kind = Number | Switch | Text | Choice | Texts | TokenIds | Biases


def _plain(value: object) -> object:
    """Arrays and their scalars, of any library, as Python's own lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value


def _items(value: Any) -> tuple[Any, ...]:
    """The items of a list, an array or another iterable; raises a `TypeError` for others."""
    value = _plain(value)
    if isinstance(value, str | bytes | Mapping):
        raise TypeError
    return tuple(value)
