"""Where the modules that adapters may change lie in our parameters."""

import dataclasses
import itertools
from collections.abc import Iterator

from configs import adapters
from configs.model import ModelConfig
from inference.checkpoints import names
from inference.checkpoints.hf import split_tensors
from inference.families.shared.parts import Part, Rows
from inference.runtime.adapter_weights import Place

_WEIGHT = ".weight"
_ALL = slice(None)


@dataclasses.dataclass(frozen=True)
class Module:
    """A linear module of transformers', [F, D], and the parts of our matrices that it is.

    Attributes:
        places: of each part, and which of the module's rows it has.
    """

    shape: tuple[int, int]
    places: tuple[tuple[Place, Rows], ...]


def modules_of(config: ModelConfig) -> dict[str, Module]:
    """The modules that adapters may change, by the names that transformers gives them."""
    modules: dict[str, Module] = {}
    for tensor, shape, place, rows in _parts(config):
        name = tensor.removesuffix(_WEIGHT)
        before = modules[name].places if name in modules else ()
        modules[name] = Module(shape, (*before, (place, rows)))
    return modules


def _parts(config: ModelConfig) -> Iterator[tuple[str, tuple[int, int], Place, Rows]]:
    """(tensor, shape of its module, place of some of its rows, which rows these are)."""
    name_of, split = names.huggingface(config), dict(split_tensors.parts_of(config))
    for path, info in adapters.adaptable(config).items():
        tensors = name_of(path).names
        counts = info.stacked if len(tensors) > 1 else info.shape[:1]
        if len(tensors) != len(counts):
            continue
        num_modules, firsts = adapters.num_modules(info), itertools.accumulate(counts, initial=0)
        for nth, (name, count, first) in enumerate(zip(tensors, counts, firsts, strict=False)):
            shape = count, info.shape[1]
            part = split.get(name, Part(name, shape, shape, _ALL))
            is_matrix = len(part.stored) == 2 and part.columns is None and not part.transposed
            if part.tensor.endswith(_WEIGHT) and is_matrix:
                rows, columns = part.stored
                modules = range(nth, nth + 1) if len(tensors) > 1 else range(num_modules)
                yield part.tensor, (rows, columns), Place(path, first, shape, modules), part.rows
