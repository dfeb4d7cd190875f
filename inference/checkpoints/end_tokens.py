"""The end tokens of a checkpoint. What its authors recommend for sampling is not read: a request
says what it wants.
"""

from pathlib import Path

from configs.errors import InputError, shown
from inference.checkpoints import text_files
from inference.checkpoints.hf import config_json
from inference.request import MAX_STOP_IDS

_MAX_EOS_IDS = MAX_STOP_IDS // 2  # the rest of a row is for a request's own stop ids


def read_eos_ids(directory: Path, vocab_size: int) -> tuple[int, ...]:
    """End-token ids of a directory: of `generation_config.json` and of `config.json`, whose authors
    may know of one each.

    Raises:
        InputError: a file is unsound, or as `check_ids`.
    """
    ids: list[int] = []
    for path in (directory / text_files.GENERATION, directory / text_files.CONFIG):
        if path.exists():
            value = config_json.read(path).get("eos_token_id")
            ids += check_ids(value, vocab_size, str(path))
    return tuple(dict.fromkeys(ids))


def check_ids(value: object, vocab_size: int, label: str) -> tuple[int, ...]:
    """Returns end-token ids, each once; raises an `InputError` for ids outside the vocabulary."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InputError(
                f"{label}: eos_token_id {shown(token)} is not an id from 0 to {vocab_size - 1}"
            )
    unique = tuple(dict.fromkeys(ids))
    if len(unique) > _MAX_EOS_IDS:
        raise InputError(f"{label}: {len(unique)} eos_token_ids; at most {_MAX_EOS_IDS} are kept")
    return unique
