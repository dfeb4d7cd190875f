"""The small files that travel with weights: tokenizer, chat templates, end tokens, what made them.
Copied as they are between directories.
"""

import re
from pathlib import Path

from configs.errors import InputError
from inference.checkpoints import mapped

CONFIG = "config.json"  # written anew, unlike the others
TOKENIZER = "tokenizer.json"
TEKKEN = "tekken.json"  # Mistral's own, which counts where the other is missing
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"
PROVENANCE = "provenance.json"  # what made the weights; the module of that name appends to it
NAMES = (
    TOKENIZER, TEKKEN, TOKENIZER_CONFIG, "special_tokens_map.json", "added_tokens.json",
    GENERATION, TEMPLATE, PROVENANCE,
)  # fmt: skip

_TEMPLATE_NAME = re.compile(r"[\w.-]{1,80}")
_MAX_TEMPLATES = 64


def read(directory: Path) -> dict[str, bytes]:
    """The files of a directory, by path; raises an `InputError` if one cannot be read."""
    paths = {name: directory / name for name in NAMES if (directory / name).exists()}
    paths |= {f"{TEMPLATES}/{path.name}": path for path in named_templates(directory).values()}
    sizes = dict.fromkeys((TOKENIZER, TEKKEN, PROVENANCE), (mapped.MAX_TOKENIZER_BYTES,))
    return {
        name: mapped.read_text(path, *sizes.get(name, ())).encode() for name, path in paths.items()
    }


def named_templates(directory: Path) -> dict[str, Path]:
    """Named chat templates; raises an `InputError` for too many, or a name that is not valid."""
    folder = directory / TEMPLATES
    paths = sorted(folder.glob("*.jinja")) if folder.is_dir() else []
    if len(paths) > _MAX_TEMPLATES:
        raise InputError(f"{folder}: {len(paths)} templates; at most {_MAX_TEMPLATES} are read")
    for path in paths:
        check_template_name(path.stem, str(folder))
    return {path.stem: path for path in paths}


def check_template_name(name: object, label: str) -> None:
    """Raises an `InputError` unless a name is of letters, digits, '_', '.' and '-'."""
    if not isinstance(name, str) or not _TEMPLATE_NAME.fullmatch(name):
        raise InputError(f"{label}: {str(name)[:80]!r} is no name of a chat template")
