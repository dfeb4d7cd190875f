"""A GGUF file cut into parts (`NAME-00001-of-00003.gguf`), read as one."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from configs.errors import InputError
from inference.checkpoints.gguf.gguf_scan import Header

_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_PARTS = 1024


def join(first: Header, scan: Callable[[Path], Header]) -> Header:
    """The whole of a file, given its first part; a file of one part is returned as it is.

    Args:
        first: the part that holds the metadata.

    Raises:
        InputError: a part is missing, belongs to another file, or does not fit the others.
    """
    count = _integer(first, "split.count", 1)
    if count == 1:
        return first
    match = _NAME.fullmatch(first.path.name)
    if not 1 <= count <= _MAX_PARTS:
        raise InputError(f"{first.path}: split.count={count}; valid: 1 to {_MAX_PARTS}")
    if match is None or int(match[3]) != count:
        raise InputError(
            f"{first.path}: one part of {count} of a split GGUF, whose names end in "
            f"-00001-of-{count:05}.gguf"
        )
    if int(match[2]) != 1:
        name = f"{match[1]}-00001-of-{match[3]}.gguf"
        raise InputError(f"{first.path}: part {int(match[2])} of {count}; open the first, {name}")
    _check_number(first, 0, count)
    tensors = dict(first.tensors)
    fingerprints = first.fingerprints
    for number in range(1, count):
        path = first.path.with_name(f"{match[1]}-{number + 1:05}-of-{count:05}.gguf")
        if not path.exists():
            raise InputError(f"{path}: part {number + 1} of {count} is missing")
        part = scan(path)
        _check_number(part, number, count)
        foreign = [key for key in part.metadata if not key.startswith(("split.", "general."))]
        if foreign:
            raise InputError(f"{path}: metadata {foreign[0][:80]!r} belongs in the first part")
        repeated = sorted(tensors.keys() & part.tensors.keys())
        if repeated:
            raise InputError(f"{path}: tensor {repeated[0][:80]!r} is in an earlier part too")
        tensors |= part.tensors
        fingerprints += part.fingerprints
    expected = _integer(first, "split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise InputError(
            f"{first.path}: its parts hold {len(tensors)} tensors; split.tensors.count={expected}"
        )
    return dataclasses.replace(first, tensors=tensors, fingerprints=fingerprints)


def _check_number(part: Header, number: int, count: int) -> None:
    stated = _integer(part, "split.no", None), _integer(part, "split.count", None)
    if stated != (number, count):
        raise InputError(
            f"{part.path}: says it is part {stated[0]} (from 0) of {stated[1]}; "
            f"expected {number} of {count}"
        )


def _integer(part: Header, key: str, default: int | None) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int:
        shown = "missing" if value is None else "not a number"
        raise InputError(f"{part.path}: metadata {key!r} is {shown}")
    return value
