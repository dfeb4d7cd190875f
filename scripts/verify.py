"""Checks files against their digests: python -m scripts.verify DIR|FILE ...

A directory of scripts.convert or scripts.quantize, a .gguf file of ours, checkpoints of a training,
finished parts of a run, executables, or (by default) all of the cache. Each damaged file is a line,
and the status is 1; what carries no digest is a line, too.
"""

from scripts import interrupts  # noqa: F401

# isort: split
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from configs.errors import InputError, reason, shown
from inference.files import cache_directory
from scripts import common

Check = Callable[[], None]  # raises InputError where a file is damaged


def main(argv: Sequence[str]) -> None:
    places = [Path(name) for name in argv[1:]] or [cache_directory.path()]
    for place in places:
        if not place.exists():
            raise InputError(f"{shown(str(place))}: there is no such file or directory")
    checked, damaged, without = 0, 0, 0
    for path, check in itertools.chain.from_iterable(map(_files, places)):
        if check is None:
            without += 1
            print(f"{path}: carries no digest")
            continue
        checked += 1
        try:
            check()
        except (InputError, OSError) as error:
            damaged += 1
            print(f"damaged: {reason(error)}", flush=True)
    counts = f"{checked} checked, {damaged} damaged, {without} without a digest"
    if damaged:
        common.fail(counts)
    common.say(counts)


def _files(place: Path) -> Iterator[tuple[Path, Check | None]]:
    """What is below a path, each with its check; None: there is nothing to compare it with."""
    from inference.checkpoints import manifest
    from inference.training import step_folder

    if not place.is_dir():
        try:
            check = _check(place)
        except (InputError, OSError) as error:
            check = functools.partial(_refuse, error)
        yield place, check
    elif (place / manifest.NAME).exists():
        yield from _listed(place)
    elif step_folder.has_digests(place):
        yield place, lambda: step_folder.check(place)
    else:
        for path in sorted(place.iterdir()):
            if not path.is_symlink():
                yield from _files(path)


def _listed(directory: Path) -> Iterator[tuple[Path, Check]]:
    from inference.checkpoints import manifest

    try:
        listed = manifest.read(directory, (".json", ".jinja", ".safetensors"))
    except InputError as error:
        yield directory, functools.partial(_refuse, error)
        return
    for name in listed.digests:
        yield directory / name, lambda name=name: listed.verify([name])  # type: ignore[misc]


def _refuse(cause: InputError | OSError) -> None:
    raise cause


def _check(path: Path) -> Check | None:
    """How a file is compared, by name and content; raises InputError or OSError if unreadable."""
    from inference.checkpoints import mapped
    from inference.checkpoints.gguf import gguf_digests, gguf_file
    from inference.files import digests, resumable_results
    from inference.runtime import compilation_cache
    from inference.runtime.serialization import files as executables
    from layers.kernels.cpu import build

    if not path.is_file():
        return None
    if path.suffix == executables.SUFFIX:
        return lambda: executables.check(path)
    if path.suffix == resumable_results.SUFFIX:
        return lambda: resumable_results.check(path)
    if path.match(compilation_cache.ENTRIES):
        return lambda: _expect(path, compilation_cache.is_whole(path))
    if path.suffix == ".so":
        return lambda: _expect(path, build.is_whole(path))
    with path.open("rb") as file:
        start = file.read(digests.SEARCHED)
    if path.suffix == ".gguf" and gguf_digests.DATA.encode() in start:
        return lambda: gguf_digests.check_data(gguf_file.open_gguf(path))
    rooms = (cache_directory.path() / name for name in ("converted", "tokens", "hardware"))
    is_cached = any(path.is_relative_to(room) for room in rooms)
    if digests.FIELD.encode() in start or (is_cached and digests.is_sealed(start)):
        return lambda: mapped.check_digest(path)
    return None


def _expect(path: Path, is_whole: bool) -> None:
    if not is_whole:
        raise InputError(f"{path}: not what was written: the file is damaged or was changed")


if __name__ == "__main__":
    common.run(main, takes_names=True)
