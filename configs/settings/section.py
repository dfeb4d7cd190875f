"""Sections of settings: each field is declared once, with its default, meaning and range."""

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar, TypeVar

from configs.errors import InputError, shown

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Setting:
    """The meaning of a field and its valid values; a default of None is always valid.

    Attributes:
        doc: sentences for a reader who sees the field's name.
        lower, upper: bounds of a number, or of each number of a tuple, which then is not empty.
        one_of: valid names; (): no choice of names.
        host_only: no compiled program depends on the field.
    """

    doc: str
    lower: int | None = None
    upper: int | None = None
    one_of: tuple[str, ...] = ()
    host_only: bool = False

    def check(self, path: str, value: object) -> None:
        """Refuses a value that the declaration excludes.

        Raises:
            InputError: the message starts with `path`, as --set names the field.
        """
        if self.one_of and value not in self.one_of:
            raise InputError(f"{path}={_shown(value)}: must be one of {', '.join(self.one_of)}")
        numbers = value if isinstance(value, tuple) else (value,)
        if self.lower is not None and not (numbers and all(map(self._is_valid, numbers))):
            raise InputError(f"{path}={_shown(value)}: must be {self._range(value)}")

    def _is_valid(self, number: float) -> bool:
        assert self.lower is not None
        is_above = self.lower <= number < math.inf  # NaN is not
        return is_above and (self.upper is None or number <= self.upper)

    def _range(self, value: object) -> str:
        lower, upper = self.lower, self.upper
        bounds = f"at least {lower}" if upper is None else f"from {lower} to {upper}"
        if isinstance(value, tuple):
            return f"a list of sizes, each {bounds}"
        return f"{bounds} and finite" if isinstance(value, float) else bounds


def _shown(value: object) -> str:
    return shown(value).strip("'")  # names without quotes, as --set takes them


def setting(
    default: T,
    doc: str,
    lower: int | None = None,
    upper: int | None = None,
    one_of: tuple[str, ...] = (),
    host_only: bool = False,
) -> T:
    """Declares a field of a `Section`; the arguments are those of `Setting`."""
    declared = Setting(doc, lower, upper, one_of, host_only)
    return dataclasses.field(default=default, metadata={"setting": declared})


@dataclasses.dataclass(frozen=True)
class Section:
    """Settings that belong together, and sections of more. A section checks each field against its
    declaration.
    """

    path: ClassVar[str]  # as --set names the section

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata and not (value is None and field.default is None):
                field.metadata["setting"].check(f"{self.path}.{field.name}", value)

    @classmethod
    def check_name(cls, name: str) -> None:
        """Refuses the name of a setting that a section inside this one has.

        Raises:
            InputError: the message has its path.
        """
        path = paths(cls).get(name, "")
        if path.rpartition(".")[0] not in ("", cls.path):
            raise InputError(f"{cls.path}.{name}: is now {path}")


def _fields(section: type[Section]) -> Iterator[tuple[type[Section], dataclasses.Field[object]]]:
    for field in dataclasses.fields(section):
        if isinstance(field.default, Section):
            yield from _fields(type(field.default))
        else:
            yield section, field


def paths(section: type[Section]) -> dict[str, str]:
    """The paths of all settings of a section and of the sections in it, by their unique names."""
    return {field.name: f"{owner.path}.{field.name}" for owner, field in _fields(section)}


def declared(section: type[Section]) -> dict[str, Setting]:
    """The declarations of the same settings."""
    return {field.name: field.metadata["setting"] for _, field in _fields(section)}


def flag_help(section: type[Section], name: str) -> str:
    """The help of a flag that sets a setting of the section."""
    return f"{declared(section)[name].doc} Sets {paths(section)[name]}."


def values(section: Section) -> dict[str, object]:
    """The values of all settings of a section and of the sections in it, by their names."""
    by_name: dict[str, object] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        by_name |= values(value) if isinstance(value, Section) else {field.name: value}
    return by_name
