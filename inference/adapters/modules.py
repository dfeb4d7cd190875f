"""Where the modules that adapters may change lie in our parameters."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from configs import adapters
from configs.model import ModelConfig
from inference.checkpoints import names
from inference.checkpoints.hf import split_tensors
from inference.checkpoints.names import NameMap
from inference.families.shared.parts import Part, Rows
from inference.runtime.adapter_weights import Factors, Place

_WEIGHT = ".weight"
_ALL = slice(None)


@dataclasses.dataclass(frozen=True)
class Module:
    """A linear module of transformers', [F, D], and the parts of our matrices that it is. An
    embedding is one, [D, V], as if tokens were columns of zeros and a one.

    Attributes:
        places: of each part, and which of the module's rows it has.
        extra: which of `AdapterConfig.extras` it is; "": none.
    """

    shape: tuple[int, int]
    places: tuple[tuple[Place, Rows], ...]
    extra: str

    def factors(self, down_RD: np.ndarray, up_FR: np.ndarray) -> dict[Place, Factors]:
        """The factors of each part, of those of the module."""
        return {
            place: Factors(up_FR[rows].T, down_RD.T)
            if place.is_transposed
            else Factors(down_RD, up_FR[rows])
            for place, rows in self.places
        }


def modules_of(config: ModelConfig, extras: Iterable[str] = ()) -> dict[str, Module]:
    """The modules that adapters may change, by the names that transformers gives them, those of
    `AdapterConfig.extras` among them.
    """
    split = dict(split_tensors.parts_of(config))
    return _joined(_parts(config, extras, names.huggingface(config), split))


def gguf_modules(config: ModelConfig) -> dict[str, Module]:
    """As `modules_of`, by the names of llama.cpp's tensors; no latents are among them."""
    return _joined(_parts(config, ["vocab"], names.gguf(config), {}))


def _joined(parts: Iterator[tuple[str, tuple[int, int], str, Place, Rows]]) -> dict[str, Module]:
    modules: dict[str, Module] = {}
    for tensor, shape, extra, place, rows in parts:
        name = tensor.removesuffix(_WEIGHT)
        before = modules[name].places if name in modules else ()
        modules[name] = Module(shape, (*before, (place, rows)), extra)
    return modules


def _parts(
    config: ModelConfig, extras: Iterable[str], name_of: NameMap, split: Mapping[str, Part]
) -> Iterator[tuple[str, tuple[int, int], str, Place, Rows]]:
    """(tensor, shape of its module, which extra it is, place of some of its rows, which rows)."""
    for path, info in adapters.adaptable(config, extras).items():
        tensors, extra = name_of(path).names, adapters.extra_of(path, info)
        if info.is_table:
            V, D = info.shape
            yield tensors[0], (D, V), extra, Place(path, 0, (V, D), range(1), True), _ALL
            continue
        is_one = len(tensors) == 1 and len(info.shape) == 2
        counts = info.shape[:1] if is_one else info.stacked
        if len(tensors) != len(counts):
            continue
        num_modules, firsts = adapters.num_modules(info), itertools.accumulate(counts, initial=0)
        for nth, (name, count, first) in enumerate(zip(tensors, counts, firsts, strict=False)):
            shape = count, info.shape[-1]
            part = split.get(name, Part(name, shape, shape, _ALL))
            if part.tensor.endswith(_WEIGHT) and len(part.stored) == 2 and part.columns is None:
                rows, columns = part.stored
                modules = range(num_modules) if is_one else range(nth, nth + 1)
                place = Place(path, first, shape, modules, part.transposed)
                yield part.tensor, (rows, columns), extra, place, part.rows
