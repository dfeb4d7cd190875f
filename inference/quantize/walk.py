"""A model's matrices, a layer at a time: what they read is observed, they get few bits, and the
layers behind them read what is left of their results.

One layer is in memory, as float32, and the residual stream of all windows. Each finished layer is a
file (`parts.py`); a run that goes on reads those that there are, runs them as before, and so comes
to the same numbers.
"""

import dataclasses

import jax
import numpy as np

from configs.kinds.params import ParamInfo, leaves
from configs.model import ModelConfig
from inference.checkpoints import load
from inference.checkpoints.checkpoint import Contents
from inference.checkpoints.load import Progress
from inference.checkpoints.names import Stored
from inference.checkpoints.native import blocks
from inference.layerwise import input_statistics, reader
from inference.layerwise.parts import Parts
from inference.layerwise.stream import Stream, Values
from inference.quantize import folds, layer, rotation
from inference.quantize import plan as plans
from inference.quantize.plan import Plan
from inference.quantize.rotation import Rotation
from layers import quantized

OUTSIDE_LAYERS = "rest"  # the part of all that belongs to no layer


class Walk:
    """A walk through a checkpoint's model, whose `dtype` is that of parameters which stay as they
    are; what is finished goes to `parts`.
    """

    def __init__(self, contents: Contents, config: ModelConfig, plan: Plan, parts: Parts):
        self._contents, self._plan, self._parts = contents, plan, parts
        self._source, plain = config, rotation.untied(config) if plan.rotates else config
        formats = tuple((path, (name,)) for path, name in plan.formats.items())
        self.config = dataclasses.replace(plain, formats=formats)  # what comes of it
        self._runs = dataclasses.replace(plain, dtype="float32", formats=(), cache_format=None)
        self._infos = _flat(plain)
        self._rotation: Rotation | None = None
        if plan.rotates:
            self._rotation = Rotation(config, self._values(rotation.FINAL_NORM))

    @property
    def names(self) -> list[str]:
        return [OUTSIDE_LAYERS, *(f"layer-{index:04d}" for index in range(self.config.num_layers))]

    def run(self, tokens_YW: np.ndarray | None, progress: Progress | None = None) -> None:
        """Finishes all parts; the model reads windows of ids `tokens_YW`, if any; raises InputError
        if a number is not finite, or a part cannot be written.
        """
        if not self._parts.has(OUTSIDE_LAYERS):
            paths = [path for path in self._infos if not path.startswith("layers/")]
            self._parts.write(OUTSIDE_LAYERS, {path: self._table(path) for path in paths}, {})
        stream = None
        if tokens_YW is not None:
            ids, places = np.unique(tokens_YW, return_inverse=True)
            stream = Stream(self._runs, self._embedding(ids), places.reshape(tokens_YW.shape))
        for index, name in enumerate(self.names[1:]):
            if progress:
                progress(index, self.config.num_layers, "quantizing layers")
            if not self._parts.has(name):
                self._parts.write(name, *self._layer(index, stream))
            if stream is not None and index + 1 < self.config.num_layers:
                stream.advance(index, self.numbers(index))
        if progress:
            progress(self.config.num_layers, self.config.num_layers, "quantizing layers")

    def _layer(
        self, index: int, stream: Stream | None
    ) -> tuple[dict[str, np.ndarray], dict[str, float]]:
        """A layer's arrays, by their whole paths, and the errors of its matrices' results."""
        method, prefix = plans.method(self._plan.method), f"layers/{index}/"
        infos = {path.removeprefix(prefix): info for path, info in self._infos.items()
                 if path.startswith(prefix)}  # fmt: skip
        formats = {path: self._plan.formats[prefix + path] for path in infos
                   if prefix + path in self._plan.formats}  # fmt: skip
        values = {path: self._values(prefix + path) for path in infos}
        if self._rotation is not None:
            values = self._rotation.layer(values)
        inputs = {}
        if stream is not None:
            inputs = input_statistics.observed(stream, index, values, formats, method.has_products)
        layer.balanced(
            method, values, inputs, formats, folds.of_layer(self._runs, index), self.config.dtype
        )
        rounded, errors = layer.rounded(method, values, inputs, formats, infos)
        return {prefix + path: array for path, array in rounded.items()}, errors

    def numbers(self, index: int) -> Values:
        """What a finished layer's arrays stand for, float32, by their paths in it."""
        prefix, arrays = f"layers/{index}/", self._parts.read(self.names[1 + index])
        numbers = {}
        for path in self._infos:
            if path.startswith(prefix):
                parts = {name.removeprefix(f"{path}/"): array for name, array in arrays.items()
                         if name.startswith(f"{path}/")}  # fmt: skip
                numbers[path.removeprefix(prefix)] = (
                    blocks.joined(parts, self._infos[path].shape[-1])
                    if parts
                    else self._numbers(path, arrays[path])
                )
        return numbers

    def _numbers(self, path: str, array: np.ndarray) -> np.ndarray:
        if path not in self._plan.formats:
            return np.asarray(array, np.float32)
        info = dataclasses.replace(self._infos[path], format=self._plan.formats[path])
        return blocks.numbers(info, array)

    def _embedding(self, ids: np.ndarray) -> Values:
        """What tokens are embedded with, the rows of these ids."""
        numbers = {}
        for path, array in self._parts.read(OUTSIDE_LAYERS).items():
            if not path.startswith(reader.LAST):
                numbers[path] = self._numbers(
                    path, array[ids] if path in reader.LOOKED_UP else array
                )
        return numbers

    def _table(self, path: str) -> np.ndarray:
        """What belongs to no layer, as it is stored: rounded to nearest, whatever the method."""
        dtype, parts = jax.numpy.dtype(self._infos[path].format), []
        for rows in load.rows_of(self._contents.source, self._stored(path)):
            reader.check_finite(path, rows)
            if self._rotation is not None:
                rows = self._rotation.rest(path, rows)
            if path in self._plan.formats:
                rows = quantized.quantize(self._plan.formats[path], np.asarray(rows, np.float32))
            parts.append(np.asarray(rows, None if path in self._plan.formats else dtype))
        return np.concatenate(parts)

    def _values(self, path: str) -> np.ndarray:
        """A parameter as it is in the checkpoint, float32."""
        return reader.read(self._contents.source, self._stored(path), path, self._infos[path])

    def _stored(self, path: str) -> Stored:
        """What a parameter is made of: a head that becomes one, of the embedding."""
        is_new = path == "head/table" and self._source.tied
        return self._contents.name_map("embed/table" if is_new else path)


def _flat(config: ModelConfig) -> dict[str, ParamInfo]:
    return {"/".join(path): info for path, info in leaves(config.parameters())}
