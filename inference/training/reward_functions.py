"""Rewards by name: functions of a line and an answer, as users write them."""

import re
from collections.abc import Mapping
from typing import Any

from configs.errors import InputError, shown
from inference.text import json_answers

FIELDS = {"exact": "answer", "regex": "regex", "json_schema": "schema"}  # that each one reads


def exact(line: Mapping[str, Any], answer: str) -> bool:
    """Whether the answer is line["answer"], white space around both aside."""
    return bool(answer.strip() == line["answer"].strip())


def regex(line: Mapping[str, Any], answer: str) -> bool:
    """Whether line["regex"] matches somewhere in the answer, as `re.search` has it; anchors and
    flags, such as (?s), are the pattern's own.
    """
    return re.search(line["regex"], answer) is not None


def json_schema(line: Mapping[str, Any], answer: str) -> bool:
    """Whether the answer, with nothing around it but white space, is JSON of line["schema"]."""
    return json_answers.is_valid(line["schema"], answer)


def check_line(name: str, line: Mapping[str, object]) -> None:
    """Raises InputError if a line lacks what the reward of a name reads."""
    field = FIELDS[name]
    value = line.get(field)
    if field == "schema":
        if not isinstance(value, dict):
            raise InputError(f"'schema' is a JSON schema, an object, not {shown(value)}")
        json_answers.check_schema(value)
    elif not isinstance(value, str):
        raise InputError(f"{field!r} is a text, not {shown(value)}")
    elif field == "regex":
        try:
            re.compile(value)
        except (re.error, RecursionError, OverflowError) as error:
            raise InputError(f"'regex' is no regular expression: {error}") from None
