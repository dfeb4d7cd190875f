"""The flag that counts samples, which two apps share."""

from absl import flags

SAMPLES = flags.DEFINE_integer(
    "samples",
    1,
    "plan: answers that each request samples (best_of). prune: windows of text that importance is "
    "measured on; default there: 1024.",
)
