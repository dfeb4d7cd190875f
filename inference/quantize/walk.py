"""A model's matrices, a layer at a time: what they read is observed, they get few bits, and the
layers behind them read what is left of their results.

One layer is in memory, as float32, and the residual stream of all windows. Each finished layer is a
file (`parts.py`); a run that goes on reads those that there are, runs them as before, and so comes
to the same numbers.
"""

import dataclasses

import numpy as np

from configs.errors import InputError
from configs.kinds.params import leaves
from configs.model import ModelConfig
from inference.checkpoints import load
from inference.checkpoints.load import Progress
from inference.checkpoints.native import blocks
from inference.checkpoints.opened import Contents
from inference.quantize import layer
from inference.quantize.parts import Parts
from inference.quantize.plan import METHODS, Plan
from inference.quantize.stream import LayerValues, Stream

REST = "rest"  # the part of all that belongs to no layer

_LOOKED_UP = "embed/table", "inputs/table"  # by tokens
_LAST = "head/table", "final_norm"


class Walk:
    """A walk through a model.

    Args:
        contents: of its checkpoint.
        config: the model; its `dtype` is that of what stays as it is.
        plan: what becomes of it.
        parts: what is finished.
    """

    def __init__(self, contents: Contents, config: ModelConfig, plan: Plan, parts: Parts):
        self._contents, self._plan, self._parts = contents, plan, parts
        formats = tuple((path, (name,)) for path, name in plan.formats.items())
        self.config = dataclasses.replace(config, formats=formats)  # what comes of it
        self._runs = dataclasses.replace(config, dtype="float32", formats=(), cache_format=None)
        self._stored = {"/".join(path): info for path, info in leaves(self.config.parameters())}

    @property
    def names(self) -> list[str]:
        """Of all parts."""
        return [REST, *(f"layer-{index:04d}" for index in range(self.config.num_layers))]

    def run(self, tokens_YW: np.ndarray | None, progress: Progress | None = None) -> None:
        """Finishes all parts.

        Args:
            tokens_YW: the windows that the model reads, ids; None: it reads nothing.
            progress: called with layers done and in all.

        Raises:
            InputError: a number is not finite, or a part cannot be written.
        """
        if not self._parts.has(REST):
            rest = [path for path in self._stored if not path.startswith("layers/")]
            self._parts.write(REST, {path: self._rounded(path) for path in rest}, {})
        method, stream = METHODS[self._plan.method], None
        if tokens_YW is not None:
            ids, places = np.unique(tokens_YW, return_inverse=True)
            stream = Stream(self._runs, self._embedding(ids), places.reshape(tokens_YW.shape))
        for index, name in enumerate(self.names[1:]):
            if progress:
                progress(index, self.config.num_layers, "quantizing layers")
            prefix = f"layers/{index}/"
            own = {path.removeprefix(prefix): info for path, info in self._stored.items()
                   if path.startswith(prefix)}  # fmt: skip
            if not self._parts.has(name):
                values = {path: self._values(prefix + path) for path in own}
                paths = [path for path in own if prefix + path in self._plan.formats]
                inputs = {}
                if stream is not None:
                    inputs = stream.observe(index, values, paths, method.has_products)
                made, errors = layer.rounded(method, values, own, inputs)
                self._parts.write(name, {prefix + path: a for path, a in made.items()}, errors)
            if stream is not None and index + 1 < self.config.num_layers:
                numbers = self.numbers(name)
                stream.advance(index, {path: numbers[prefix + path] for path in own})
        if progress:
            progress(self.config.num_layers, self.config.num_layers, "quantizing layers")

    def numbers(self, name: str) -> LayerValues:
        """What a finished part's arrays stand for, float32, by path."""
        return {path: self._numbers(path, own) for path, own in self._parts.read(name).items()}

    def _numbers(self, path: str, array: np.ndarray) -> np.ndarray:
        if array.dtype == np.uint8:
            return blocks.numbers(self._stored[path], array)
        return np.asarray(array, np.float32)

    def _embedding(self, ids: np.ndarray) -> LayerValues:
        """What tokens are embedded with, the rows of these ids."""
        found = {}
        for path, array in self._parts.read(REST).items():
            if not path.startswith(_LAST):
                found[path] = self._numbers(path, array[ids] if path in _LOOKED_UP else array)
        return found

    def _rounded(self, path: str) -> np.ndarray:
        """A parameter in its own format, rounded to nearest a block of rows at a time."""
        stored = self._contents.name_map(path)
        return np.asarray(load.StoredParameter(self._contents.source, stored, self._stored[path]))

    def _values(self, path: str) -> np.ndarray:
        """A parameter as it is in the checkpoint, float32."""
        info = dataclasses.replace(self._stored[path], format="float32")
        stored = self._contents.name_map(path)
        found = np.asarray(load.StoredParameter(self._contents.source, stored, info))
        if not np.isfinite(found).all():
            raise InputError(f"{path} holds numbers that are not finite")
        return found
