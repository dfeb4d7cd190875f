"""The flag that names an adapter."""

from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from configs.engine import Config
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


def name() -> str | None:
    """What requests choose: the adapter, if there is one."""
    return None if ADAPTER.value is None else _NAME


def with_room(config: Config) -> Config:
    """The configuration of an engine that has room for the adapter. Raises InputError if it is none
    of the model's.
    """
    if (weights := read(config.model)) is None:
        return config
    return config.with_engine(slots=1, rank=-(-weights.rank // _RANKS) * _RANKS)


def read(model: ModelConfig) -> "AdapterWeights | None":
    """The adapter, if there is one. Raises InputError if it is none of the model's."""
    if (directory := ADAPTER.value) is None:
        return None
    from inference.adapters import peft_directory

    return peft_directory.read(_path(directory), model, MOST_RANKS)


def load(adapters: "AdapterTable") -> None:
    """Reads the adapter, if there is one."""
    if (directory := ADAPTER.value) is not None:
        adapters.load(_NAME, _path(directory))


def _path(directory: str) -> Path:
    path = mirror.path_of(directory)
    mirror.complete(path)
    return path
