"""A small file system that can be full: a tmpfs where one can be mounted."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.drills.harness import Skipped


class Disk:
    """One that is mounted at `path`."""

    def __init__(self, path: Path):
        self.path = path

    def resize(self, num_bytes: int) -> None:
        """Changes its size; below what lies there it is full."""
        _run("mount", "-o", f"remount,size={num_bytes}", str(self.path))

    def fill(self, num_free: int) -> None:
        """Leaves so many bytes of it."""
        free = shutil.disk_usage(self.path).free
        (self.path / "ballast").write_bytes(bytes(max(0, free - num_free)))

    def empty(self) -> None:
        """Takes away what `fill` has written."""
        (self.path / "ballast").unlink()


@contextlib.contextmanager
def mounted(path: Path, num_bytes: int = 8 << 20) -> Iterator[Disk]:
    """A disk of so many bytes.

    Raises:
        Skipped: this process may not mount one.
    """
    if os.geteuid():
        raise Skipped("only root mounts a small disk")
    path.mkdir()
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(path))
    except (OSError, subprocess.CalledProcessError):
        raise Skipped("no tmpfs can be mounted here") from None
    try:
        yield Disk(path)
    finally:
        _run("umount", "--lazy", str(path))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
