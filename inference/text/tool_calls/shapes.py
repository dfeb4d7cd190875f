"""What a call looks like between the marks around it: data that the readers and grammars share.

Texts are as templates write them, with line ends; a reader takes any blanks in place of those.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Objects:
    """JSON objects with a name and arguments.

    Attributes:
        key: of the arguments, as the grammar of such calls has it; both keys are understood.
        name_key: of the name, likewise.
        is_list: the grammar writes a list, even of one call; lists are always understood.
    """

    key: str = "arguments"
    name_key: str = "name"
    is_list: bool = False


@dataclasses.dataclass(frozen=True)
class NameThenJson:
    """A name, and the arguments as a JSON object.

    Attributes:
        head: before the name.
        prefix: of the name, which a model may leave out.
        id_mark: between the name and an id, which a model may leave out.
        id_pattern: of the id that the grammar writes; "": it writes none.
        name_end: between name and arguments.
        tail: behind the arguments.
    """

    name_end: str
    head: str = ""
    prefix: str = ""
    id_mark: str = ""
    id_pattern: str = ""
    tail: str = ""


@dataclasses.dataclass(frozen=True)
class Tagged:
    """A name and parameters between tags. A parameter's value is text if its schema says so, else
    JSON; where `value_end` begins with a line end, a value is within lines of its own.

    Attributes:
        head, name_end: around the name.
        key_begin, key_end: around a parameter's name.
        value_begin, value_end: around its value.
        text_begin: before a value that is text, where that differs from `value_begin`.
        tail: behind the parameters.
    """

    key_begin: str
    key_end: str
    value_end: str
    name_end: str
    head: str = ""
    value_begin: str = ""
    text_begin: str = ""
    tail: str = ""

    @property
    def pad(self) -> str:
        """A line end that stands before and behind a value and does not belong to it, or ""."""
        return "\n" if self.value_end.startswith("\n") else ""


@dataclasses.dataclass(frozen=True)
class Literals:
    """Calls in Python, with literals as arguments: `[f(a=1, b="x"), g()]`.

    Attributes:
        is_list: they are a list; otherwise each has a line of its own.
    """

    is_list: bool = True


@dataclasses.dataclass(frozen=True)
class Bare:
    """A name and an object whose keys are bare, and whose texts are between marks, without escapes:
    `call:f{a:<|"|>x<|"|>,b:[1,true]}`. A reader takes JSON's own texts in their place.

    Attributes:
        quote: before and behind a text.
        head: before the name.
    """

    quote: str
    head: str = "call:"


Shape = Objects | NameThenJson | Tagged | Literals | Bare
