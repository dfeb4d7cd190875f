"""Flags of the apps that answer files of requests: `generate` and `batch`."""

from absl import flags

INPUT = flags.DEFINE_string(
    "input",
    None,
    "generate: JSONL with a 'prompt' or 'messages' a line, and sampling of its own. batch: JSONL "
    "of OpenAI's batches.",
)
OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "Start over: drop what an earlier run of --output has left or finished."
)
