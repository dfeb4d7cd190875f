"""From what `--model` names to a configuration, a tokenizer and parameters."""

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path

from configs import presets
from configs.errors import InputError, shown
from configs.heads import Heads
from configs.model import ModelConfig
from configs.presets import Preset
from inference.checkpoints import sources, text_files
from inference.checkpoints.checkpoint import Checkpoint
from inference.checkpoints.gguf import gguf_file, gguf_metadata
from inference.checkpoints.gguf.gguf_checkpoint import GgufFile
from inference.checkpoints.hf import config_json, hf_directory, hub, published_heads
from inference.checkpoints.hf.published_heads import PublishedHeads
from inference.checkpoints.load import Progress
from inference.checkpoints.native import orbax_directory
from inference.checkpoints.new_directory import UNFINISHED
from inference.files import mirror


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What `--model` names.

    Attributes:
        config: known without reading weights.
        open: fetches weights that are not cached, and opens the checkpoint.
            Licence terms are shown on stderr before the first download.
        predicting: the layer that predicts a second token; None: a format that has none.
    """

    config: ModelConfig
    open: Callable[[Progress | None], Checkpoint]
    predicting: "Callable[[], Resolved] | None" = None


def resolve(model: str, drafts: bool = False) -> Resolved:
    """Finds a model by preset name, directory, `.gguf` file or hub id. Of the hub only the
    configuration is fetched.

    Args:
        drafts: it is to draft, for which heads do, too.

    Raises:
        InputError: it is none of these, or its description is unsound.
    """
    resolved = _find(model)
    if isinstance(resolved.config, Heads) and not drafts:
        raise InputError(f"{model} holds heads, which draft for a model: name them in --speculate")
    return resolved


def predicting(model: str) -> Resolved:
    """The layer by which a model predicts a second token, as heads that draft for it.

    Raises:
        InputError: as `resolve`, or it has no such layer.
    """
    resolved = _find(model)
    if resolved.predicting is None:
        raise InputError(
            f"{shown(model)} has no layer that predicts a second token: a directory in Hugging "
            "Face format, or a hub id, may have one"
        )
    return resolved.predicting()


def _find(model: str) -> Resolved:
    if model in presets.NAMES:
        preset = presets.get(model)
        return Resolved(preset.config, functools.partial(_open_preset, preset))
    if model in presets.PLANNED:
        return Resolved(presets.get(model).config, functools.partial(_refuse_planned, model))
    path = mirror.path_of(model)
    try:
        exists = bool(model) and path.exists()
    except (OSError, ValueError):  # too long, or holds a NUL
        exists = False
    if exists and path.is_dir():
        return _resolve_directory(path)
    if exists and path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise InputError(f"{model}: pickles can run code when loaded; use safetensors or GGUF")
    if exists and path.suffix == ".safetensors":
        raise InputError(f"{model}: weights alone; name the directory they are in, {path.parent}")
    if exists or path.suffix == ".gguf":
        header = gguf_file.open_gguf(path)
        config = gguf_metadata.read_config(header)
        return Resolved(config, lambda progress: GgufFile.open(header, config))
    if hub.is_id(model):
        try:
            snapshot = hub.open_snapshot(model)
        except InputError as error:
            raise InputError(f"{error}; nor is there a file or directory {model}") from None
        if heads := published_heads.of(snapshot.directory):
            return _of_heads(heads, hub.fetch(snapshot))
        config = config_json.read_model(snapshot.directory)
        config = dataclasses.replace(config, name=snapshot.repo.split("/")[1])
        return _of_directory(config, snapshot.directory, lambda: hub.fetch(snapshot))
    raise InputError(
        f"no model {shown(model)}; valid: a preset ({', '.join(presets.NAMES)}), a directory in "
        "Hugging Face format or written by scripts.convert, a .gguf file, either of them at s3:// "
        "or gs://, or a hub id (owner/name, owner/name@revision)"
    )


def _resolve_directory(path: Path) -> Resolved:
    if path.resolve().name.endswith(UNFINISHED):
        raise InputError(f"{path}: what an interrupted conversion left; convert again")
    if orbax_directory.is_ours(path):
        config, raw = orbax_directory.read_config(path)
        return Resolved(config, lambda progress: orbax_directory.open_directory(path, config, raw))
    if heads := published_heads.of(path):
        return _of_heads(heads, path)
    return _of_directory(hf_directory.read_model(path), path, lambda: path)


def _of_heads(heads: PublishedHeads, directory: Path) -> Resolved:
    """Heads in a layout of others; which tokens they propose may be among their tensors."""
    config = heads.read_config(directory)
    return Resolved(config, lambda progress: heads.open_directory(directory, config))


def _of_directory(config: ModelConfig, described: Path, fetch: Callable[[], Path]) -> Resolved:
    """A directory in Hugging Face format, which may hold nothing but `config.json` yet."""

    def predicting() -> Resolved:
        raw = config_json.read(described / text_files.CONFIG)
        heads = config_json.parse_predicting(raw, described)
        return Resolved(heads, lambda progress: hf_directory.open_predicting(fetch(), heads))

    return Resolved(
        config, lambda progress: hf_directory.open_directory(fetch(), config), predicting
    )


def _refuse_planned(model: str, progress: Progress | None) -> Checkpoint:
    raise InputError(
        f"{model} can be planned (scripts.plan) or timed with random weights (scripts.bench), not "
        f"run: no checkpoint of it is read; what runs: {', '.join(presets.NAMES)}"
    )


def _open_preset(preset: Preset, progress: Progress | None) -> Checkpoint:
    if preset.weights.notice and not sources.cached_path(preset.weights):
        print(preset.weights.notice, file=sys.stderr, flush=True)
    path = sources.fetch(preset.weights, progress)
    if path.is_dir():
        stored = config_json.read_model(path)
        checkpoint: Checkpoint = hf_directory.open_directory(path, preset.config)
    else:
        header = gguf_file.open_gguf(path)
        stored = gguf_metadata.read_config(header)
        checkpoint = GgufFile.open(header, preset.config)
    for field in dataclasses.fields(ModelConfig):
        expected, actual = getattr(preset.config, field.name), getattr(stored, field.name)
        if field.name != "name" and expected != actual:
            raise InputError(f"{path}: {field.name} is {actual!r}, the preset expects {expected!r}")
    return checkpoint
