"""The flags of those that run a model, and of `plan`, so that one process can load all: in which
formats its weights and its cache are, and on how many chips.
"""

from absl import flags

from configs import precision
from configs.engine import EngineConfig
from configs.settings import kernels
from configs.settings.section import flag_help

WEIGHTS = flags.DEFINE_string(
    "weights",
    None,
    "Format of the weights: bfloat16, float32, file (as the checkpoint stores each, 4-bit blocks "
    "of a .gguf file among them), or what each is rounded to while it is read: "
    f"{', '.join(precision.OURS)}; default: the model's type, or that of a quantized directory. "
    f"`plan` reads no checkpoint, and leaves tables as they are: {', '.join(precision.PLANNED)}.",
)
ACTIVATIONS = flags.DEFINE_enum(
    "activations", None, kernels.ACTIVATIONS, flag_help(EngineConfig, "activations")
)
CACHE = flags.DEFINE_string(
    "cache",
    None,
    "Format of the cache (model.cache_format): int8, fp8 or int4; default: the model's type.",
)
MESH = flags.DEFINE_string("mesh", "", "Chips of a replica: data=1,model=2,expert=1.")
