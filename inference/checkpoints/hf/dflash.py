"""DFlash heads as they are published: a `config.json` of Qwen3's keys with a `dflash_config`, and
layers with what makes their context (`fc`, `hidden_norm`) beside them.
"""

import dataclasses
from pathlib import Path

from configs.errors import InputError, shown
from configs.heads import DFlash
from configs.model import MOST_CONTEXT, ModelConfig
from inference.checkpoints import load, mapped, names, safetensors_file, text_files
from inference.checkpoints.checkpoint import StoredDirectory
from inference.checkpoints.hf import config_json
from inference.checkpoints.names import NameMap, Stored
from inference.families.shared.config_keys import Keys
from layers import params

ARCHITECTURES = ("DFlashDraftModel",)
_LAYER = "Qwen3ForCausalLM"  # the kind that heads consist of
_NESTED = "dflash_config"
_IDS = "target_layer_ids"
_TENSORS = {"fuse": "fc.weight", "state_norm": "hidden_norm.weight", "final_norm": "norm.weight"}


def read_config(directory: Path) -> DFlash:
    """The heads of a directory.

    Raises:
        InputError: a key is missing or unsound, or their attention is of another kind.
    """
    path = directory / text_files.CONFIG
    raw = mapped.read_json(path)
    try:
        return _parsed(raw, directory)
    except InputError as error:
        raise error if str(path) in str(error) else InputError(f"{path}: {error}") from None


def _parsed(raw: dict[str, object], directory: Path) -> DFlash:
    keys = Keys(raw)
    keys.require_neutral(is_causal=(None, False))
    stated = Keys({**raw, **(keys.nested(_NESTED) or Keys({})).raw}, f"{_NESTED}: ")
    described = {**raw, "architectures": [_LAYER], "tie_word_embeddings": False}
    model = config_json.parse(described, directory)
    cap = stated.optional_number("final_logit_softcapping")
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(ModelConfig)}
    # Drafts behind the longest trained context may be worse, and are verified like all.
    fields |= {"tied": False, "max_context": MOST_CONTEXT}
    fields |= {
        "embedding_scale": stated.number("input_embedding_scale", 1.0),
        "logit_scale": stated.number("output_multiplier", 1.0),
        "logit_cap": cap or None,
    }
    return DFlash(
        **fields,
        features=_features(stated),
        mask_id=stated.integer("mask_token_id", limit=model.vocab_size - 1),
        block_tokens=stated.integer("block_size", 16),
    )


def _features(keys: Keys) -> tuple[int, ...]:
    """Layers are named from 0 on, and count here once they have run."""
    listed = keys.raw.get(_IDS)
    if not isinstance(listed, list) or not all(type(n) is int and n >= 0 for n in listed):
        raise InputError(f"{keys.label}{_IDS} must list layers, not {shown(listed)}")
    return tuple(number + 1 for number in listed)


def open_directory(directory: Path, config: DFlash) -> StoredDirectory:
    """Opens heads; raises an `InputError` if a tensor is missing, left over or unsound."""
    source, name_map = safetensors_file.open_directory(directory), _names(config)
    load.check(params.flatten(config.parameters()), source, name_map)
    load.check_parts(config, source, name_map)
    return StoredDirectory.of(directory, config, source, name_map, None)


def _names(config: DFlash) -> NameMap:
    family = names.huggingface(config)

    def name(path: str) -> Stored:
        if path in _TENSORS:
            return Stored((_TENSORS[path],))
        return Stored(tuple(tensor.removeprefix("model.") for tensor in family(path).names))

    return name
