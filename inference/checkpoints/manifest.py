"""The SHA-256 of every file of a directory that we wrote, in the format of `sha256sum`.

No checkpoint format here notices a flipped bit by itself. The manifest is written last, so that a
directory of ours without one is an unfinished one.
"""

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from configs.errors import InputError
from inference.checkpoints import mapped
from inference.files import contents

NAME = "ridgeline.sha256"

_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)")
_MAX_FILES = 100_000
_WORKERS = 2


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The digests of a directory's files, by their path below it."""

    directory: Path
    digests: dict[str, str]

    def verify(self, names: Iterable[str]) -> None:
        """Raises an `InputError` if a file is missing, not listed or not as written; one that
        stands for an object in a store is read in parts, which have no digests here.
        """
        listed = [name for name in names if contents.stored_object(self.directory / name) is None]
        with ThreadPoolExecutor(_WORKERS) as pool:
            digests = pool.map(lambda name: _digest(self.directory / name), listed)
            for name, digest in zip(listed, digests, strict=True):
                self.compare(name, digest)

    def compare(self, name: str, digest: str) -> None:
        """Compares a digest with the one that is listed.

        Raises:
            InputError: they differ, or none is listed; or the file is a stand-in.
        """
        if self.digests.get(name) != digest:
            mapped.check_stand_in(self.directory / name)
            raise InputError(
                f"{self.directory / name}: not what was written (its SHA-256 is {digest[:16]}..., "
                f"{NAME} says {self.digests.get(name, 'nothing')[:16]}...): the file is damaged or "
                "was changed"
            )


def write(directory: Path) -> None:
    """Lists every file below a directory."""
    names = sorted(_files(directory))
    lines = [f"{_digest(directory / name)}  {name}\n" for name in names]
    (directory / NAME).write_text("".join(lines))


def of_contents(contents: Mapping[str, bytes]) -> bytes:
    """The manifest of files, given what they hold, by name."""
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests)).encode()


def read(directory: Path, suffixes: tuple[str, ...] = ("",)) -> Manifest:
    """The manifest of a directory, whose files are exactly those it lists.

    Args:
        suffixes: of the files that have to be listed; others may be added later.

    Raises:
        InputError: it is missing or malformed, or a file is missing or not listed.
    """
    path = directory / NAME
    if not path.exists():
        raise InputError(f"{directory}: {NAME} is missing: an unfinished or damaged conversion")
    text = mapped.read_text(path)
    lines = text.split("\n")
    if lines.pop() != "" or not 1 <= len(lines) <= _MAX_FILES:
        raise InputError(f"{path}: not a list of files: damaged")
    digests: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line)
        if match is None or match[2] in digests:
            raise InputError(f"{path}: line {number} is no digest and name of a file: damaged")
        digests[match[2]] = match[1]
    present = {name for name in _files(directory) if name in digests or name.endswith(suffixes)}
    differing = sorted(present ^ digests.keys())
    if differing:
        where = "missing" if differing[0] in digests else f"not in {NAME}"
        raise InputError(f"{directory}: file {differing[0][:80]!r} is {where}: damaged or changed")
    return Manifest(directory, digests)


def _files(directory: Path) -> set[str]:
    names: set[str] = set()
    folders = [""]
    while folders:
        prefix = folders.pop()
        with os.scandir(directory / prefix) as entries:
            for entry in entries:
                name = prefix + entry.name
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{name}/")
                else:
                    names.add(name)
    return names - {NAME}


def _digest(path: Path) -> str:
    try:
        with path.open("rb", buffering=0) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
