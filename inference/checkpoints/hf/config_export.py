"""`config.json` as transformers reads it, written from a `ModelConfig`.

The spelling is that of transformers 4, which 5 reads too. What is written is read back and has to
give the same model: a field that no family writes here is an error, never a loss.
"""

from collections.abc import Mapping
from pathlib import Path

from configs.errors import InputError
from configs.model import ModelConfig
from inference.checkpoints import checkpoint
from inference.checkpoints.hf import config_json
from inference.families import families

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def of_model(config: ModelConfig, ids: Mapping[str, object] | None = None) -> dict[str, object]:
    """Returns the `config.json` of a model.

    Args:
        ids: of its tokens, by the names they have there. Those that are not given are null: left
            out, they would be those of the family's best known vocabulary.

    Raises:
        InputError: its family, or something about it, has no counterpart here.
    """
    family = families.ALL.get(config.family)
    if family is None:
        raise InputError(f"{config.name}: the family {config.family} has no config.json")
    for layer in config.pattern:
        if not (
            isinstance(layer.mixer, family.mixers) and isinstance(layer.ffn, family.feed_forwards)
        ):
            kinds = f"{layer.mixer.name} and {layer.ffn.name if layer.ffn else 'no feed-forward'}"
            raise InputError(f"{config.name}: a layer of {kinds} has no place in a config.json")
    raw = {
        "architectures": [family.architecture],
        "model_type": family.model_type or family.name,
        **family.write(config),
        "tie_word_embeddings": config.tied,
        "use_cache": True,
        **{name: (ids or {}).get(name) for name in _TOKEN_IDS},
    }
    read_back = config_json.parse(raw, Path(config.name))
    checkpoint.check_kept(config, read_back, "a config.json", "name", "dtype")
    return raw


def with_dtype(raw: dict[str, object], dtype: str, eos_ids: tuple[int, ...]) -> dict[str, object]:
    """Returns a `config.json` whose weights are stored as `dtype`."""
    key = "dtype" if "dtype" in raw else "torch_dtype"
    ends = {} if raw.get("eos_token_id") is not None or not eos_ids else {"eos_token_id": eos_ids}
    return raw | {key: dtype} | ends
