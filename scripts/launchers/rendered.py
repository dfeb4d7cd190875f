"""What a launcher returns: a manifest or a script, and how it is used."""

import dataclasses
import shlex
from collections.abc import Sequence

import yaml

from scripts.launchers.launch import Resource

_WIDTH = 100


class Raw(str):
    """A word of a command that the shell expands."""


Words = Sequence[str]


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A manifest or a script.

    Attributes:
        first_lines: that stand before all comments.
        body: all other lines.
        steps: commands that use it, with FILE for its name.
    """

    body: str
    steps: tuple[str, ...]
    first_lines: str = ""

    def text(self, comments: Sequence[str]) -> str:
        """The file, its comments and steps before all that acts."""
        lines = [*comments, *self.steps]
        return self.first_lines + "".join(f"# {line}\n" for line in lines) + self.body


class _Plain(yaml.SafeDumper):
    """Writes equal parts out where they stand."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    """Text of several lines as it stands."""
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Plain.add_representer(str, _text)


def manifest(resources: Sequence[Resource], *steps: str) -> Rendered:
    """YAML documents."""
    body = yaml.dump_all(
        resources, Dumper=_Plain, sort_keys=False, width=_WIDTH, default_flow_style=False
    )
    return Rendered(body, steps)


def script(commands: Sequence[Words], *steps: str, options: Sequence[str] = ()) -> Rendered:
    """A Bash script that ends with the first command that fails.

    Args:
        options: of a scheduler, as comments that it reads.
    """
    first = "".join(f"{line}\n" for line in ("#!/usr/bin/env bash", *options))
    return Rendered(f"set -euo pipefail\n{lines(commands)}", steps, first)


def lines(commands: Sequence[Words]) -> str:
    """Commands, a line each; a long one is continued."""
    return "".join(f"{_line(words)}\n" for words in commands)


def _line(words: Words) -> str:
    done, line = "", ""
    for word in words:
        quoted = word if isinstance(word, Raw) else shlex.quote(word)
        if line and len(line) + len(quoted) > _WIDTH:
            done, line = f"{done}{line} \\\n", f"  {quoted}"
        else:
            line = f"{line} {quoted}" if line else quoted
    return done + line
