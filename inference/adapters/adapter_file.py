"""Adapters on disk: directories of the `peft` package, and `.gguf` files."""

from pathlib import Path

from configs.model import ModelConfig
from configs.settings.adapters import AdapterConfig
from inference.adapters import gguf_adapter, peft_directory
from inference.runtime.adapter_weights import AdapterWeights


def listed(folder: Path) -> list[tuple[str, Path]]:
    """The adapters in a folder, in the order of their names: those of their directories, or of
    their files without the ending. Two may have one name.
    """
    directories = (path.parent for path in folder.glob(f"*/{peft_directory.CONFIG}"))
    files = folder.glob(f"*{gguf_adapter.ENDING}")
    return sorted([*((path.name, path) for path in directories), *((p.stem, p) for p in files)])


def room(path: Path, config: ModelConfig) -> AdapterConfig:
    """The room that an adapter of a model takes, by its header; raises InputError as `read`, which
    checks the rest.
    """
    read_room = gguf_adapter.room if _is_gguf(path) else peft_directory.room
    return read_room(path, config)


def read(path: Path, config: ModelConfig, room: AdapterConfig) -> AdapterWeights:
    """An adapter of a model, checked, for which there is so much room.

    Raises:
        InputError: it is no LoRA adapter of this model, or not sound, or there is less room.
    """
    read_adapter = gguf_adapter.read if _is_gguf(path) else peft_directory.read
    return read_adapter(path, config, room)


def _is_gguf(path: Path) -> bool:
    return path.suffix == gguf_adapter.ENDING
