"""`auto_map` of a `config.json`: classes that a repository brings as code, which is never run."""

import logging
import re
from pathlib import Path

from configs.errors import shown
from inference.checkpoints import mapped

_AUTO, _TEXT = "AutoModel", "AutoModelForCausalLM"
_HEAD = re.compile(r"(?:Model|For[A-Z][A-Za-z]*)$")  # of a class: what it has on its layers


def warn(path: Path) -> None:
    """Warns in a line where `auto_map` names another model than `architectures` does.

    Args:
        path: a `config.json`, which may be missing.
    """
    raw = mapped.read_json(path) if path.exists() else {}
    architectures, auto_map = raw.get("architectures"), raw.get("auto_map")
    if not isinstance(architectures, list) or not isinstance(auto_map, dict):
        return
    classes = {  # without repository and module
        key: name.rpartition(".")[2]
        for key, name in auto_map.items()
        if key.startswith(_AUTO) and isinstance(name, str)
    }
    if _TEXT in classes:
        classes = {_TEXT: classes[_TEXT]}
    if not classes or any(name in _names(architectures, key) for key, name in classes.items()):
        return
    key, name = next(iter(classes.items()))
    logging.warning(
        "%s: auto_map: %s is %s, code of the repository, which is never run: the model is served "
        "as %s, which architectures names",
        *(path, shown(key), shown(name), shown(architectures[0])),
    )


def _names(architectures: list[object], key: str) -> set[str]:
    """Classes of the models that these are, which a key of `auto_map` may name."""
    stated = {name for name in architectures if isinstance(name, str)}
    return stated | {_HEAD.sub("", name) + (key.removeprefix(_AUTO) or "Model") for name in stated}
