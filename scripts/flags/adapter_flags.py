"""The flags that name adapters."""

from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from configs.adapters import RANKS
from configs.engine import Config
from configs.errors import InputError
from configs.model import ModelConfig
from configs.settings.adapters import EXTRAS, MOST_RANKS, AdapterConfig
from inference.files import mirror

if TYPE_CHECKING:
    from inference.adapters.table import AdapterTable
    from inference.runtime.adapter_weights import AdapterWeights

ADAPTER = flags.DEFINE_string(
    "adapter",
    None,
    "Directory of a LoRA adapter as the peft package writes it, on disk or at s3:// or gs://, or "
    "a .gguf file of one. "
    "generate: with which the model answers. convert: which becomes part of the weights.",
)
_NAME = "adapter"  # by which requests choose it
_SLOTS = 8  # of a server, unless it is told


def name() -> str | None:
    """What requests choose: the adapter, if there is one."""
    return None if ADAPTER.value is None else _NAME


def directories(folder: str | None = None) -> dict[str, Path]:
    """The adapter, if there is one, or those in a folder, by their names; raises InputError if the
    folder has none, or two of one name.
    """
    if folder is None:
        return {} if ADAPTER.value is None else {_NAME: mirror.whole(ADAPTER.value)}
    from inference.adapters import adapter_file
    from inference.adapters.peft_directory import CONFIG

    by_name: dict[str, Path] = {}
    for label, path in adapter_file.listed(mirror.whole(folder)):
        if (other := by_name.setdefault(label, path)) != path:
            raise InputError(
                f"--adapters={folder}: {other.name} and {path.name} are both adapters with the "
                f"name {label}; rename one"
            )
    if not by_name:
        raise InputError(
            f"--adapters={folder}: has no folder of an adapter, with {CONFIG}, and no .gguf file"
        )
    return by_name


def with_room(config: Config, adapters: dict[str, Path]) -> Config:
    """The configuration of an engine that has room for these adapters. Raises InputError if one is
    not sound, or of a rank above the largest.
    """
    if not adapters:
        return config
    from inference.adapters import adapter_file

    rooms = [adapter_file.room(path, config.model) for path in adapters.values()]
    room = config.engine.adapters
    rank = max(room.rank, *(-(-header.rank // RANKS) * RANKS for header in rooms))
    extras = {*room.extras, *(extra for header in rooms for extra in header.extras)}
    slots = room.slots or min(len(adapters), _SLOTS)
    return config.with_engine(slots=slots, rank=rank, extras=tuple(sorted(extras)))


def read(model: ModelConfig) -> "AdapterWeights | None":
    """The adapter, if there is one. Raises InputError if it is none of the model's."""
    from inference.adapters import adapter_file

    paths, most = directories().values(), AdapterConfig(rank=MOST_RANKS, extras=EXTRAS)
    return next((adapter_file.read(path, model, most) for path in paths), None)


def load(table: "AdapterTable", adapters: dict[str, Path]) -> None:
    """Reads these adapters; raises InputError as `AdapterTable.load`."""
    for label, directory in adapters.items():
        table.load(label, directory)
