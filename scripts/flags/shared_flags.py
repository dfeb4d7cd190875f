"""Flags that two apps share, so that one process can load both."""

from absl import flags

NEW_TOKENS = flags.DEFINE_integer(
    "new_tokens", 48, "Tokens to generate a request (`plan`: none unless given)."
)
DEVICE = flags.DEFINE_enum(
    "device",
    "auto",
    ["auto", "cpu", "gpu", "tpu"],
    "Whatever JAX computes on; or that, or nothing.",
)
REPEATS = flags.DEFINE_integer("repeats", 3, "Measurements of each; medians are reported.")
RATE = flags.DEFINE_float("rate", None, "Requests a second (`plan`: to keep --slo for).")
