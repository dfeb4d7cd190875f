"""A directory that is complete under its name, or not there at all. Imports no jax."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from configs.errors import InputError, reason
from inference.checkpoints import manifest
from inference.files import object_store, staging

UNFINISHED = ".incomplete"  # how the name of a directory ends while it is written

# In place of the manifest, from the first moment on: what is in this directory may be cleared away.
_MARK = "what an interrupted conversion left\n"


def target(name: str) -> Path:
    """The new directory or file that --output names, checked; for a URL the one that a store gets
    by `published`. Raises InputError as `check`, and if the store has it already or cannot be used.
    """
    output = staging.new(name) if object_store.is_url(name) else Path(name)
    check(output)
    return output


def published(output: Path) -> str:
    """Gives a store what is complete, if it is for one; the name that it has then. Raises
    InputError if that fails.
    """
    return staging.published(output, manifest.NAME)


def check(output: Path) -> None:
    """Refuses what cannot become a new directory.

    Raises:
        InputError: it exists and is not an empty directory, cannot be the name of one, its parent
            cannot be written to, or something else is where it would be written.
    """
    label = f"--output={str(output)[:80]}"
    try:
        if output.name in ("", ".."):
            raise InputError(f"{label}: the name of a new directory is needed")
        if output.name.endswith(UNFINISHED):
            raise InputError(f"{label}: {UNFINISHED} ends the names of unfinished directories only")
        if _exists(output) and not _is_empty(output):
            raise InputError(f"{label}: exists already")
        if not output.parent.is_dir() or not os.access(output.parent, os.W_OK | os.X_OK):
            raise InputError(f"{label}: {output.parent} is no folder to write to")
        _check_unfinished(_unfinished(output))
    except (OSError, ValueError) as error:  # too long, or holds a NUL
        if isinstance(error, InputError):
            raise
        raise InputError(f"{label} is no path: {reason(error)[:200]}") from None


@contextlib.contextmanager
def create(output: Path) -> Iterator[Path]:
    """A directory that takes the output's name at the end; a process that is killed leaves it under
    a name that no script loads.

    Raises:
        InputError: something else is there already, another conversion is writing it, or it cannot
            be written.
    """
    try:
        with _locked(_unfinished(output)) as folder:
            yield folder
            folder.rename(output)
    except OSError as error:
        raise InputError(f"cannot write {output}: {reason(error)}") from None


@contextlib.contextmanager
def create_file(output: Path) -> Iterator[Path]:
    """Like `create`, for a single file, which is written inside such a directory."""
    try:
        with _locked(_unfinished(output)) as folder:
            yield folder / output.name
            (folder / output.name).rename(output)
            shutil.rmtree(folder)
    except OSError as error:
        raise InputError(f"cannot write {output}: {reason(error)}") from None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """The unfinished directory, empty but for its mark; gone if what is done in it fails."""
    folder.mkdir(exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with its process
        except BlockingIOError:
            raise InputError(f"{folder}: another conversion is writing it") from None
        _check_unfinished(folder)
        (folder / manifest.NAME).write_text(_MARK)
        _clear(folder)
        try:
            yield folder
        except BaseException:
            _remove(folder)
            raise
    finally:
        os.close(descriptor)


def _unfinished(output: Path) -> Path:
    return output.with_name(output.name + UNFINISHED)


def _exists(path: Path) -> bool:
    """Whether anything has the name, a link that leads nowhere too."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not any(path.iterdir())


def _check_unfinished(folder: Path) -> None:
    if not _exists(folder) or _is_empty(folder):
        return
    mark = folder / manifest.NAME
    if folder.is_symlink() or mark.is_symlink() or not mark.is_file():
        raise InputError(f"{folder}: in the way, and not what a conversion left: move it elsewhere")


def _remove(folder: Path) -> None:
    """Removes the directory as far as it can be. Its mark goes last, and comes back where another
    thread still writes: what is left is cleared away by the next conversion.
    """
    mark = folder / manifest.NAME
    with contextlib.suppress(OSError):
        _clear(folder)
        mark.unlink()
        try:
            folder.rmdir()
        except OSError:
            mark.write_text(_MARK)


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != manifest.NAME:
            path.unlink()
