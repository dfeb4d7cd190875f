"""Where an app's results go: checked before any work, written whole or not at all."""

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from configs.engine import Config
from configs.errors import InputError
from inference import files
from scripts import partial

# Here and not in the apps that write, so that one process can load them all.
FLAG = flags.DEFINE_string(
    "output",
    None,
    "generate: one JSON result a line, and beside it the configuration. plan: --verify's page.",
)


def check(name: str) -> Path:
    """The file that --output names, links followed.

    Raises:
        InputError: it, or what is written beside it, cannot become a file.
    """
    try:
        path = Path(name).resolve()
        for target in (path, _beside(path), partial.name(path)):
            if not path.parent.is_dir() or (target.exists() and not target.is_file()):
                raise InputError(f"--output={name}: {target} is not a file in an existing folder")
    except (OSError, RuntimeError, ValueError) as error:  # too long, a loop of links, a NUL
        if isinstance(error, InputError):
            raise
        raise InputError(f"--output={name!r} is no path: {error}") from None
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"--output={name}: the folder {path.parent} cannot be written to")
    return path


def write(path: Path, results: Sequence[dict[str, Any]], config: Config) -> None:
    """One result a line, and beside them the configuration; neither replaces anything before both
    are complete.

    Raises:
        InputError: one of them cannot be written.
    """
    lines = "".join(f"{json.dumps(result, ensure_ascii=False)}\n" for result in results)
    settings = json.dumps(dataclasses.asdict(config), indent=1) + "\n"
    try:
        with files.atomic_file(path) as answers, files.atomic_file(_beside(path)) as beside:
            answers.write(lines.encode())
            beside.write(settings.encode())
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.config.json")
