"""The metadata of a `.gguf` file as a `ModelConfig`.

llama.cpp stores what its own code does not know; the rest (which layers have a window, which do not
rotate) stands with each family (`inference/families`).
"""

import functools

from configs.errors import InputError, shown
from configs.model import ModelConfig
from inference.checkpoints.gguf import gguf_file
from inference.checkpoints.gguf.gguf_scan import Header
from inference.families import families
from inference.families.family import GgufReader, ModelFields
from inference.families.shared.gguf_keys import RMS_EPSILON, GgufKeys

# Every reader understands these, or they say nothing about the mathematics. Others are refused.
_KNOWN_KEYS = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length",
    "attention.value_length", RMS_EPSILON,
    "rope.freq_base", "rope.dimension_count", "rope.scaling.type",
    "rope.scaling.factor", "rope.scaling.original_context_length", "rope.scaling.finetuned",
}  # fmt: skip


def read_config(header: Header) -> ModelConfig:
    """Returns the model that a file describes.

    Raises:
        InputError: another architecture, a missing key, or a key that changes the model and is not
            understood.
    """
    try:
        return _build(header)
    except ValueError as error:
        raise InputError(f"{header.path}: {error}") from None


def _build(header: Header) -> ModelConfig:
    name = header.metadata.get("general.architecture")
    readers = families.gguf_readers()
    if not isinstance(name, str) or name not in readers:
        is_projector = isinstance(name, str) and name == "clip"
        why = "reads images for another file: name that one" if is_projector else "is not supported"
        raise InputError(f"architecture {shown(name)} {why}; valid: {', '.join(readers)}")
    family, reader = readers[name]
    keys = GgufKeys(
        name,
        header.metadata,
        {tensor: entry.shape for tensor, entry in header.tensors.items()},
        functools.partial(gguf_file.read_numbers, header),
    )
    keys.refuse_unknown(_KNOWN_KEYS.union(reader.reads, [reader.epsilon]))
    title = header.metadata.get("general.name")
    title = title if isinstance(title, str) else header.path.stem
    fields: ModelFields = {"name": title, "family": family, **_widths(keys, reader)}
    return ModelConfig(**fields | reader.build(keys))


def _widths(keys: GgufKeys, reader: GgufReader) -> ModelFields:
    head_width = keys.head_width
    for key in ("attention.value_length", "rope.dimension_count"):
        if key not in reader.free_widths and keys.integer(key, head_width) != head_width:
            raise InputError(f"{keys.architecture}.{key} differs from the head width {head_width}")
    embedding = keys.shapes.get("token_embd.weight")
    if embedding is None:
        raise InputError("tensor 'token_embd.weight' is missing")
    return {
        "vocab_size": embedding[0],
        "width": keys.integer("embedding_length"),
        "num_layers": keys.num_layers,
        "max_context": keys.integer("context_length"),
        "norm_eps": keys.number(RMS_EPSILON if keys.has(RMS_EPSILON) else reader.epsilon),
        "tied": "output.weight" not in keys.shapes,
    }
