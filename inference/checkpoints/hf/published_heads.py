"""Which layout of published heads a directory has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from configs.heads import Heads
from inference.checkpoints import mapped, text_files
from inference.checkpoints.checkpoint import StoredDirectory
from inference.checkpoints.hf import dflash, eagle3


class PublishedHeads(NamedTuple):
    """How heads of a layout are read.

    Attributes:
        architectures: names of transformers' classes, one of which `config.json` lists.
        kind: of `speculators_model_type`; None: speculators has no such heads.
        read_config, open_directory: as in `eagle3`.
    """

    architectures: tuple[str, ...]
    kind: str | None
    read_config: Callable[[Path], Heads]
    open_directory: Callable[[Path, Any], StoredDirectory]


ALL = (
    PublishedHeads(eagle3.ARCHITECTURES, "eagle3", eagle3.read_config, eagle3.open_directory),
    PublishedHeads(dflash.ARCHITECTURES, None, dflash.read_config, dflash.open_directory),
)


def of(directory: Path) -> PublishedHeads | None:
    """The layout of a directory whose `config.json` is one of heads; None: it is of no such."""
    path = directory / text_files.CONFIG
    if not path.exists():
        return None
    raw = mapped.read_json(path)
    listed = raw.get("architectures")
    first = listed[0] if isinstance(listed, list) and listed else None
    kind = raw.get("speculators_model_type")
    for layout in ALL:
        if first in layout.architectures or (kind is not None and kind == layout.kind):
            return layout
    return None
