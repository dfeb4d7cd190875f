"""The flags of those that run a model, and of `plan`, so that one process can load all: in which
format its weights are, and on how many chips.
"""

from absl import flags

from configs import precision

WEIGHTS = flags.DEFINE_string(
    "weights",
    None,
    "Format of the weights: bfloat16, float32, or file (as the checkpoint stores each, 4-bit "
    "blocks of a .gguf file among them); default: the model's type. `plan` reads no checkpoint: "
    f"{', '.join(precision.FORMATS)}.",
)
MESH = flags.DEFINE_string("mesh", "", "Chips of a replica: data=1,model=2,expert=1.")
