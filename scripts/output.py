"""Where an app's results go: checked before any work, written whole or not at all."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from configs.engine import Config
from configs.errors import InputError
from inference import files
from scripts import partial, targets

# Here and not in the apps that write, so that one process can load them all.
FLAG = flags.DEFINE_string(
    "output",
    None,
    "generate: one JSON result a line, and beside it the configuration. plan: --verify's page. "
    "convert: the directory, which must not exist yet.",
)


def check(name: str, source: str | None = None) -> Path:
    """The file that --output names, links followed.

    Args:
        name: the flag's value.
        source: the file that is read, if any.

    Raises:
        InputError: it, or what is written beside it, cannot become a file or is the one that is
            read.
    """
    label = f"--output={name}"
    path = targets.check(label, name)
    for target in (path, _beside(path), partial.name(path)):
        written = targets.check(label, str(target))
        if source is not None and written == Path(source).resolve():
            raise InputError(f"{label}: {written} is the --input, which would be replaced")
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
