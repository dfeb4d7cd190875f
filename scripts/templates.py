"""Which of a checkpoint's chat templates writes a conversation."""

import copy
from typing import Any

from absl import flags

from configs.errors import InputError

FLAG = flags.DEFINE_string(
    "template",
    None,
    "Name of the chat template; default: the one that the checkpoint has for the conversation.",
)


def choose(tokenizer: Any, name: str | None) -> Any:
    """A tokenizer that writes every conversation with the template of this name; with None, as it
    is.

    Raises:
        InputError: the checkpoint has no such template; lists those it has.
    """
    if name is None:
        return tokenizer
    named = tokenizer.templates
    if tokenizer.template is not None:
        named = {"default": tokenizer.template} | named
    if name not in named:
        have = f"valid: {', '.join(named)}" if named else "this checkpoint has none"
        raise InputError(f"no chat template {name[:80]!r}; {have}")
    chosen = copy.copy(tokenizer)
    chosen.template, chosen.templates = named[name], {}
    return chosen
