"""JSON while a benchmark runs, so that what it has found survives an early end."""

from collections.abc import Mapping

from absl import flags

from scripts import common

JSON_LINES = flags.DEFINE_bool(
    "json_lines", False, "As --json, after each row again: the last line is the whole."
)


def is_json() -> bool:
    """Whether anything but JSON is out of place on stdout."""
    return common.JSON.value or JSON_LINES.value


def print_line(result: Mapping[str, object]) -> None:
    """Prints what was found by now, where --json_lines asks for it."""
    if JSON_LINES.value:
        common.print_plain(result)
