"""Fields of `SamplingParams` as a line of JSON gives them."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from configs.errors import InputError, shown
from inference.request import FIELDS, SamplingParams

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")
NAMES = tuple(name for name in FIELDS if name != "pooling")  # a pooled answer is no text


def override(params: SamplingParams, values: Mapping[str, object]) -> SamplingParams:
    """Replaces fields in `NAMES` by JSON values; raises InputError for an invalid one."""
    params = dataclasses.replace(params, **{name: _read(name, values[name]) for name in values})
    if params.max_new_tokens < 1:
        raise InputError(f"max_new_tokens is at least 1, not {params.max_new_tokens}")
    return params


def _read(name: str, value: object) -> Any:
    if name == "logit_bias":
        if not isinstance(value, dict) or not all(map(_TOKEN_ID.fullmatch, value)):
            raise InputError(f'{name} is {{"token id": number, ...}}, not {shown(value)}')
        return {int(token): bias for token, bias in value.items()}
    if name == "stop" and isinstance(value, str):
        return [value]
    return [_whole(item) for item in value] if isinstance(value, list) else _whole(value)


def _whole(value: object) -> object:
    """JSON knows one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
