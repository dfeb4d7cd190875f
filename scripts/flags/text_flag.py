"""The flag that two apps share, so that one process can load both."""

from absl import flags

TEXT = flags.DEFINE_string(
    "text",
    None,
    "evaluate: file to score; default: Python's own help topics. train: file to train on; default: "
    "the sources of the running Python's standard library.",
)
