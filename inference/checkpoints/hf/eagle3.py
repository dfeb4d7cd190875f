"""EAGLE-3 heads in the two layouts in which they are published: SGLang's, whose `config.json` is
that of the layer, with more keys, and that of speculators, whose `config.json` holds the layer's.

Their tensors differ in what stands before the first layer's: `midlayer` and `layers.0`.
"""

import dataclasses
from pathlib import Path

import numpy as np

from configs.errors import InputError, shown
from configs.heads import Eagle3
from configs.model import MOST_CONTEXT, ModelConfig
from inference.checkpoints import load, mapped, names, safetensors_file, text_files
from inference.checkpoints.checkpoint import StoredDirectory
from inference.checkpoints.hf import config_json, hf_directory
from inference.checkpoints.names import NameMap, Stored
from inference.checkpoints.tensor_source import TensorSource
from inference.families.shared.config_keys import Keys
from layers import params

ARCHITECTURES = "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator"
_LAYERS = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}  # kinds that heads consist of
_IDS = "eagle_aux_hidden_state_layer_ids"
_TABLE, _UNREAD = "d2t", "t2d"  # from rows of the head to tokens, and the inverse as flags
_TENSORS = {
    "fuse": "fc.weight",
    "token_norm": "layers.0.input_layernorm.weight",
    "state_norm": "layers.0.hidden_norm.weight",
    "final_norm": "norm.weight",
    "head/table": "lm_head.weight",
    "embed/table": "embed_tokens.weight",
}


def read_config(directory: Path) -> Eagle3:
    """The heads of a directory.

    Raises:
        InputError: the layer is of a kind that heads are not made of, a key is unsound, or the
            tensors that `config.json` does not describe are missing or unsound.
    """
    path = directory / text_files.CONFIG
    raw, source = mapped.read_json(path), _source(directory)
    try:
        return _parsed(raw, source, directory)
    except InputError as error:
        raise error if str(path) in str(error) else InputError(f"{path}: {error}") from None


def _parsed(raw: dict[str, object], source: TensorSource, directory: Path) -> Eagle3:
    keys = Keys(raw)
    layer = keys.nested("transformer_layer_config") or keys
    kind = layer.choice("model_type", _LAYERS, "llama")
    described = {**layer.raw, "architectures": [kind], "tie_word_embeddings": False}
    model = config_json.parse(described, directory)
    target_width = keys.integer("target_hidden_size", model.width)
    if target_width != model.width:
        raise InputError(
            f"target_hidden_size={target_width}: heads of another width ({model.width}) than the "
            "target's are not supported"
        )
    norms = [name for name, key in (("all", "norm_before_fc"), ("each", "fc_norm"))
             if keys.boolean(key, False)]  # fmt: skip
    if len(norms) > 1:
        raise InputError("norm_before_fc and fc_norm: at most one is true")
    fields = {field.name: getattr(model, field.name) for field in dataclasses.fields(ModelConfig)}
    # Drafts behind the longest trained context may be worse, and are verified like all.
    fields |= {"tied": False, "max_context": MOST_CONTEXT}
    return Eagle3(
        **fields,
        features=_features(keys),
        proposed_ids=_proposed_ids(source, model.vocab_size),
        has_normed_stream=keys.boolean("norm_before_residual", False),
        feature_norms=norms[0] if norms else None,
        has_normed_state=keys.boolean("norm_output", False),
        has_embedding=_TENSORS["embed/table"] in source.shapes,
    )


def _features(keys: Keys) -> tuple[int, ...]:
    """Speculators counts layers that have run, SGLang names the last of them from 0 on."""
    nested = keys.nested("eagle_config") or Keys({})
    for source, offset in ((keys, 0), (nested, 1)):
        listed = source.raw.get(_IDS)
        if listed is None:
            continue
        if not isinstance(listed, list) or not all(type(n) is int and n >= 0 for n in listed):
            raise InputError(f"{source.label}{_IDS} must list layers, not {shown(listed)}")
        return tuple(number + offset for number in listed)
    return ()


def _proposed_ids(source: TensorSource, vocab_size: int) -> tuple[int, ...]:
    """The token of each row of the head; (): all tokens, in their order."""
    rows = source.shapes.get(_TENSORS["head/table"], (0,))[0]
    if _TABLE not in source.shapes:
        if rows not in (0, vocab_size):
            raise InputError(
                f"{source.label}: lm_head.weight has {rows} rows for {vocab_size} tokens, and "
                f"there is no {_TABLE} that says which tokens they are"
            )
        return ()
    if source.shapes[_TABLE] != (rows,):
        raise InputError(
            f"{source.label}: {_TABLE} is {list(source.shapes[_TABLE])}; expected [{rows}], an "
            "offset for each row of lm_head.weight"
        )
    ids = np.arange(rows) + source.read(_TABLE, 0, rows).astype(np.int64)
    return () if np.array_equal(ids, np.arange(vocab_size)) else tuple(ids.tolist())


def open_directory(directory: Path, config: Eagle3) -> StoredDirectory:
    """Opens heads; raises an `InputError` if a tensor is missing, left over or unsound."""
    source = _source(directory)
    stored = {name: name for name in source.shapes if name not in (_TABLE, _UNREAD)}
    source, name_map = hf_directory.renamed(source, stored), _names(config)
    load.check(params.flatten(config.parameters()), source, name_map)
    load.check_parts(config, source, name_map)
    return StoredDirectory.of(directory, config, source, name_map, None)


def _source(directory: Path) -> TensorSource:
    """The tensors, by the names that they have in the layout of speculators."""
    source = safetensors_file.open_directory(directory, (_TABLE, _UNREAD))
    stored = {}
    for name in source.shapes:
        spelled = name.removeprefix("model.")
        if spelled.startswith("midlayer."):
            spelled = spelled.replace("midlayer", "layers.0", 1)
        stored[spelled] = name
    return hf_directory.renamed(source, stored)


def _names(config: Eagle3) -> NameMap:
    family = names.huggingface(config)

    def name(path: str) -> Stored:
        part, _, number = path.partition("/")
        if part == "feature_norms":
            is_one = config.feature_norms == "all"
            return Stored(("input_norm.weight" if is_one else f"fc_norm.{number}.weight",))
        if path in _TENSORS:
            return Stored((_TENSORS[path],))
        stored = family(path)
        return Stored(tuple(tensor.removeprefix("model.") for tensor in stored.names))

    return name
