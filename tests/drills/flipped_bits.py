"""Single bits that are flipped in files that were written here: whoever reads them finds it."""

import importlib.util
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
    """A bit of each copy of an artifact: of one that a user keeps, an app says so; one of a cache
    is no longer there once an app has read it.
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
    """How many of so many flips an app found that opens the artifact."""
    copies = []
    for index in range(num):
        copies.append(folder / f"flips-{path.name}" / str(index) / path.name)
        (shutil.copytree if path.is_dir() else _copy)(path, copies[-1])
        flipped(copies[-1], dice)
    has_verify = importlib.util.find_spec("scripts.verify") is not None
    commands = [_check(copy, has_verify) for copy in copies]
    results = app_forks.run(commands, folder, [folder / "scratch"] * num)
    shutil.rmtree(folder / f"flips-{path.name}")
    return sum(bool(status) for status, _, _ in results)


def _check(path: Path, has_verify: bool) -> tuple[str, ...]:
    return ("verify", str(path)) if has_verify else (_OPEN, f"--model={path}")


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True)
    shutil.copy(source, target)


def _in_cache(
    cache: Path, pattern: str, command: Sequence[str], num: int, dice: random.Random, folder: Path
) -> int:
    """How many of so many flips were gone once an app had read a copy of the cache."""
    caches, flips = [], []
    for index in range(num):
        caches.append(folder / "caches" / str(index))
        shutil.copytree(cache, caches[-1], ignore=shutil.ignore_patterns("compiled"))
        (path,) = caches[-1].glob(pattern)
        flipped(path, dice)
        flips.append((path, path.read_bytes()))
    statuses = [status for status, _, _ in app_forks.run([command] * num, folder, caches)]
    num_found = sum(
        bool(status) or not path.exists() or path.read_bytes() != data
        for status, (path, data) in zip(statuses, flips, strict=True)
    )
    shutil.rmtree(folder / "caches")
    return num_found


DRILLS = (
    Drill(
        "bits",
        "a bit in a native directory, .gguf, safetensors, packed weights, tokenizer and token "
        "cache: 100 of 100 found in each",
        bits,
    ),
)  # fmt: skip
