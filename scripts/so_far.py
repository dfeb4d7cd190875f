"""What a benchmark knows while it runs: whoever ends it early keeps that."""

import json
from collections.abc import Mapping
from typing import Any

from absl import flags

from scripts import common

JSON_LINES = flags.DEFINE_bool(
    "json_lines", False, "As --json, after each row again: the last line is the whole."
)


def is_json() -> bool:
    """Whether anything but JSON is out of place on stdout."""
    return common.JSON.value or JSON_LINES.value


def tell(found: Mapping[str, Any]) -> None:
    """One line of what is known by now, where that is asked for."""
    if JSON_LINES.value:
        print(json.dumps(found, ensure_ascii=False), flush=True)
