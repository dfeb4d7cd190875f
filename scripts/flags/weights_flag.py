"""The flag of those that run a model's weights, and of `plan`, so that one process can load all."""

from absl import flags

from configs import precision

WEIGHTS = flags.DEFINE_string(
    "weights",
    None,
    "Format of the weights: bfloat16, float32, or file (as the checkpoint stores each, 4-bit "
    "blocks of a .gguf file among them); default: the model's type. `plan` reads no checkpoint: "
    f"{', '.join(precision.FORMATS)}.",
)
