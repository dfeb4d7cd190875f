"""Where the modules that adapters may change lie in our parameters."""

import itertools

from configs.model import ModelConfig
from inference.checkpoints import names
from inference.runtime import adapter_weights
from inference.runtime.adapter_weights import Place

_WEIGHT = ".weight"


def places(config: ModelConfig) -> dict[str, Place]:
    """The place of each module, by the name that transformers gives it."""
    name_of, by_module = names.huggingface(config), dict[str, Place]()
    for path, info in adapter_weights.adaptable(config).items():
        tensors, counts = name_of(path).names, info.stacked or info.shape[:1]
        if len(tensors) != len(counts) or not all(name.endswith(_WEIGHT) for name in tensors):
            continue  # several matrices in one tensor, which no module is
        firsts = itertools.accumulate(counts, initial=0)
        for nth, (tensor, count, first) in enumerate(zip(tensors, counts, firsts, strict=False)):
            place = Place(path, first, (count, info.shape[1]), nth)
            by_module[tensor.removesuffix(_WEIGHT)] = place
    return by_module
