"""What a checkpoint asks of generation: end tokens always apply, sampling when asked for."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from configs.errors import InputError
from inference.checkpoints import mapped


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Generation defaults of a checkpoint; None where it names none.

    `eos_ids` end a sequence. The sampling values are its authors' recommendation.
    """

    eos_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


def read_defaults(directory: Path, vocab_size: int) -> Defaults:
    """Defaults of a directory: `generation_config.json`, or the end ids of `config.json`.

    Raises:
        InputError: a file is unsound, or a value is out of range.
    """
    path = directory / "generation_config.json"
    raw = mapped.read_json(path) if path.exists() else {}
    end = raw.get("eos_token_id")
    if end is None:
        end = mapped.read_json(directory / "config.json").get("eos_token_id")
    return Defaults(
        check_ids(end, vocab_size, str(path)),
        _number(raw, "temperature", 0.0, math.inf, path),
        _number(raw, "top_p", 0.0, 1.0, path),
        _top_k(raw, path),
    )


def check_ids(value: Any, vocab_size: int, label: str) -> tuple[int, ...]:
    """End-token ids: none, one, or a list.

    Raises:
        InputError: an id is no integer inside the vocabulary.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InputError(
                f"{label}: eos_token_id {token!r} is not an id from 0 to {vocab_size - 1}"
            )
    return tuple(ids)


def _number(raw: dict[str, Any], key: str, low: float, high: float, path: Path) -> float | None:
    value = raw.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InputError(f"{path}: {key} must be a number from {low} to {high}, not {value!r}")
    return float(value)


def _top_k(raw: dict[str, Any], path: Path) -> int | None:
    value = raw.get("top_k")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise InputError(f"{path}: top_k must be an integer of at least 0, not {value!r}")
    return value
