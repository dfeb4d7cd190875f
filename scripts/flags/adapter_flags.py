"""The flags that name adapters."""

from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from configs.engine import Config
from configs.errors import InputError
from configs.model import ModelConfig
from configs.settings.adapters import MOST_RANKS
from inference.files import mirror

if TYPE_CHECKING:
    from inference.adapters.table import AdapterTable
    from inference.runtime.adapter_weights import AdapterWeights

ADAPTER = flags.DEFINE_string(
    "adapter",
    None,
    "Directory of a LoRA adapter as the peft package writes it, on disk or at s3:// or gs://. "
    "generate: with which the model answers. convert: which becomes part of the weights.",
)
_NAME = "adapter"  # by which requests choose it
_RANKS = 8  # an engine's rank is a multiple, so that adapters of about one size share its programs
_SLOTS = 8  # of a server, unless it is told


def name() -> str | None:
    """What requests choose: the adapter, if there is one."""
    return None if ADAPTER.value is None else _NAME


def directories(folder: str | None = None) -> dict[str, Path]:
    """The adapter, if there is one, or those in a folder, each by the name of its own; raises
    InputError if the folder has none.
    """
    if folder is None:
        return {} if ADAPTER.value is None else {_NAME: mirror.whole(ADAPTER.value)}
    from inference.adapters import peft_directory

    top = mirror.whole(folder)
    by_name = {
        path.parent.name: path.parent for path in sorted(top.glob(f"*/{peft_directory.CONFIG}"))
    }
    if not by_name:
        raise InputError(
            f"--adapters={folder}: has no folder of an adapter, with {peft_directory.CONFIG}"
        )
    return by_name


def with_room(config: Config, adapters: dict[str, Path]) -> Config:
    """The configuration of an engine that has room for these adapters. Raises InputError if one is
    not sound, or of a rank above the largest.
    """
    if not adapters:
        return config
    from inference.adapters import peft_directory

    rank = max(map(peft_directory.rank, adapters.values()))
    room, rank = config.engine.adapters, -(-rank // _RANKS) * _RANKS
    if room.slots:  # as it was told
        return config.with_engine(rank=max(rank, room.rank))
    return config.with_engine(slots=min(len(adapters), _SLOTS), rank=rank)


def read(model: ModelConfig) -> "AdapterWeights | None":
    """The adapter, if there is one. Raises InputError if it is none of the model's."""
    from inference.adapters import peft_directory

    paths = directories().values()
    return next((peft_directory.read(path, model, MOST_RANKS) for path in paths), None)


def load(table: "AdapterTable", adapters: dict[str, Path]) -> None:
    """Reads these adapters; raises InputError as `AdapterTable.load`."""
    for label, directory in adapters.items():
        table.load(label, directory)
