"""The flag that three apps share, so that one process can load all."""

from absl import flags

TEXT = flags.DEFINE_string(
    "text",
    None,
    "evaluate: file to score; default: Python's own help topics. train: file to train on; default: "
    "the sources of the running Python's standard library. prune: file that the model reads, text "
    "or (.jsonl) lines of objects with text or messages; default: what the model writes itself.",
)
