"""Flags of the apps that say what a model takes of chips: `plan` and `compile`."""

from absl import flags

BATCH = flags.DEFINE_string(
    "batch", "1", "Sequences, or `plan`: requests, at a time (`plan`: 1,16,64 sweeps)."
)
CONTEXT = flags.DEFINE_string(
    "context", "1024", "Tokens of a prompt (`plan`: 1024,4096 sweeps), or of a whole sequence."
)
