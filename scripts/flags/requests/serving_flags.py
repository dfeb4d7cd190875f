"""Flags of the apps that serve a model, over HTTP or to a file of requests: `serve` and `batch`."""

from absl import flags

from inference.request import POOLINGS
from inference.text.tool_calls import formats
from scripts.flags import deployment_flags

MAX_MODEL_LEN = flags.DEFINE_integer(
    "max_model_len", None, "Tokens of a prompt and its answer (engine.max_context)."
)
MAX_NUM_SEQS = flags.DEFINE_integer(
    "max_num_seqs", None, "Sequences that run at the same time (engine.max_seqs)."
)
TOOL_CALL_PARSER = flags.DEFINE_enum(
    "tool_call_parser", formats.AUTO, formats.CHOICES,
    "How the model writes calls of tools; auto: as its chat template tells it to.",
)  # fmt: skip
SERVED_MODEL_NAME = flags.DEFINE_string("served_model_name", None, "The model's name for clients.")
MAX_LOGPROBS = flags.DEFINE_integer(
    "max_logprobs", 20, "Alternatives of a token that requests may ask for (engine.top_logprobs)."
)
POOLING = flags.DEFINE_enum(
    "pooling", "last", POOLINGS, "Of hidden states, what embeddings are: the last, or the mean."
)
WARM_UP = flags.DEFINE_bool("warm_up", True, "Compile every step before the first request.")
flags.adopt_module_key_flags(deployment_flags)
