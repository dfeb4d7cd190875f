"""Flags of the apps that serve a model, over HTTP or to a file of requests: `serve` and `batch`."""

import os

from absl import flags

from configs.engine import EngineConfig
from configs.errors import InputError
from configs.settings.section import flag_help
from inference.files import user_files
from inference.request import POOLINGS
from inference.text.tool_calls import formats
from scripts.flags import deployment_flags

MAX_MODEL_LEN = flags.DEFINE_integer(
    "max_model_len", None, flag_help(EngineConfig, "max_context"), lower_bound=1
)
MAX_NUM_SEQS = flags.DEFINE_integer(
    "max_num_seqs", None, flag_help(EngineConfig, "max_seqs"), lower_bound=1
)
TOOL_CALL_PARSER = flags.DEFINE_enum(
    "tool_call_parser", formats.AUTO, formats.CHOICES,
    "How the model writes calls of tools; auto: as its chat template tells it to.",
)  # fmt: skip
CHAT_TEMPLATE = flags.DEFINE_string(
    "chat_template", None,
    "Chat template instead of the checkpoint's: a file, or the template itself ('{% for ...').",
)  # fmt: skip
SERVED_MODEL_NAME = flags.DEFINE_string("served_model_name", None, "The model's name for clients.")
MAX_LOGPROBS = flags.DEFINE_integer("max_logprobs", 20, flag_help(EngineConfig, "top_logprobs"))
POOLING = flags.DEFINE_enum(
    "pooling", "last", POOLINGS, "Of hidden states, what embeddings are: the last, or the mean."
)
WARM_UP = flags.DEFINE_bool("warm_up", True, "Compile every step before the first request.")
flags.adopt_module_key_flags(deployment_flags)


def chat_template() -> str | None:
    """The template of --chat_template, or of its file; raises InputError if it is neither."""
    from inference.text import template_worker

    if (value := CHAT_TEMPLATE.value) is None:
        return None
    label, max_chars = f"--chat_template={value[:80]}", template_worker.MAX_TEMPLATE_CHARS
    if "{{" in value or "{%" in value:
        text = value.replace("\\n", "\n")  # as shells pass it on
    elif not os.path.isfile(path := os.path.expanduser(value)):  # a pipe: two processes read it
        raise InputError(f"{label}: is neither a file nor a template, which holds {{{{ or {{%")
    else:
        try:
            text = user_files.read_text(path, max_chars)
        except InputError as error:
            raise InputError(f"{label}: {error}") from None
    if len(text) > max_chars:
        raise InputError(f"{label}: has more than {max_chars} characters, which no template needs")
    if problem := template_worker.syntax_problem(text):
        raise InputError(f"{label}: {problem}")
    return text
