"""Single bits that are flipped in files that were written here: whoever reads them finds it."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.drills import app_forks
from tests.drills.harness import TINY, Drill, Outcome, Setting

_OPEN = "tests.drills.opened"


def flipped(path: Path, dice: random.Random) -> tuple[Path, int]:
    """Flips one bit of a file, or of the files of a directory; which, as file and number."""
    files = sorted(file for file in (path, *path.rglob("*")) if file.is_file())
    (file,) = dice.choices(files, [file.stat().st_size for file in files])
    data = bytearray(file.read_bytes())
    bit = dice.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    return file, bit


def bits(setting: Setting) -> Outcome:
    """A bit of each copy of an artifact: `verify` names one that a user keeps; one of a cache is no
    longer there once an app has read it.
    """
    folder, num = setting.folder, setting.size(100, 8)
    text = folder / "text.txt"
    text.write_text("A workload waits for memory, and then for arithmetic.\n" * 200)
    artifacts = {"native": folder / "native", ".gguf": folder / "m.gguf", "hf": folder / "hf"}
    kinds = {"native": "orbax", ".gguf": "gguf", "hf": "hf"}
    gguf = artifacts[".gguf"]
    commands: list[tuple[str, ...]] = [
        ("convert", f"--model={TINY}", f"--to={kinds[name]}", f"--output={path}")
        for name, path in artifacts.items()
    ]
    commands += [(_OPEN, f"--model={gguf}"), (_OPEN, f"--model={TINY}", f"--text={text}")]
    for command, (status, _, err) in zip(commands, app_forks.run(commands, folder), strict=True):
        if status:
            raise RuntimeError(f"{' '.join(command)}: {err}")
    counts = {
        name: _in_artifact(path, num, setting.dice, folder) for name, path in artifacts.items()
    }
    cache = folder / "cache"
    for name, pattern, command in (
        ("packed weights", "converted/*/*/packed-*", commands[3]),
        ("tokenizer cache", "converted/*/tokenizer-*", commands[3]),
        ("token cache", "tokens/*", commands[4]),
    ):
        counts[name] = _in_cache(cache, pattern, command, num, setting.dice, folder)
    return Outcome(
        all(count == num for count in counts.values()),
        f"of {num} bits each: {', '.join(f'{name} {count}' for name, count in counts.items())}",
        counts,
    )


def _in_artifact(path: Path, num: int, dice: random.Random, folder: Path) -> int:
    """How many of so many flips `verify` found, which accepts the artifact without one."""
    copies = []
    for index in range(num):
        copies.append(folder / f"flips-{path.name}" / str(index) / path.name)
        (shutil.copytree if path.is_dir() else _copy)(path, copies[-1])
        flipped(copies[-1], dice)
    commands = [("verify", str(copy)) for copy in (path, *copies)]
    (status, _, err), *results = app_forks.run(
        commands, folder, [folder / "scratch"] * len(commands)
    )
    if status != 0:
        raise RuntimeError(f"verify refuses {path.name} without a flip: {err[-300:]}")
    shutil.rmtree(folder / f"flips-{path.name}")
    return sum(status == 1 and "damaged: " in out for status, out, _ in results)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True)
    shutil.copy(source, target)


def _in_cache(
    cache: Path, pattern: str, command: Sequence[str], num: int, dice: random.Random, folder: Path
) -> int:
    """How many of so many flips were gone once an app had read a copy of the cache; it writes a
    copy without one only once.
    """
    caches, files = [], []
    for index in range(num + 1):
        caches.append(folder / "caches" / str(index))
        shutil.copytree(cache, caches[-1], ignore=shutil.ignore_patterns("compiled"))
        (path,) = caches[-1].glob(pattern)
        if index:
            flipped(path, dice)
        files.append((path, path.stat().st_ino, path.read_bytes()))
    results = app_forks.run([command] * len(caches), folder, caches)
    (status, _, err), *_ = results
    path, number, _ = files[0]
    if status != 0 or path.stat().st_ino != number:
        raise RuntimeError(f"{path.name} without a flip is not used: {err[-300:]}")
    num_mended = sum(
        status == 0 and path.read_bytes() != data
        for (status, _, _), (path, _, data) in zip(results[1:], files[1:], strict=True)
    )
    shutil.rmtree(folder / "caches")
    return num_mended


DRILLS = (
    Drill(
        "bits",
        "a bit in a native directory, .gguf, safetensors, packed weights, tokenizer and token "
        "cache: 100 of 100 found in each",
        bits, limit_s=145,
    ),
)  # fmt: skip
