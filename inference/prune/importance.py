"""What matters in a model: scores of every unit and of every layer, from forward passes over a
calibration text, with one layer in memory at a time.
"""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from configs.errors import InputError
from inference.checkpoints.load import Progress
from inference.layerwise.parts import Parts
from inference.layerwise.reader import Reader
from inference.layerwise.stream import OF_LAYER, Notes, Stream, Values
from inference.prune import axes, loss
from inference.prune.watch import Aggregate, ImportanceWatch

Scores = dict[str, np.ndarray]  # float64, of a layer by axis

INFLUENCE, LOSS = "influence", "loss"  # what a layer's score is
RANDOM = "random"

_OF_DEPTH = "depth"  # the part with the losses without each layer
_LOSS = "loss"
_BRANCH_BYTES = 1 << 29  # of streams without a layer each, that are in memory together


@dataclasses.dataclass(frozen=True)
class Method:
    """How scores are made.

    Attributes:
        aggregate: of tokens' activations.
        depth: a layer matters as far as it turns the residual stream (`INFLUENCE`), or as the loss
            rises without it (`LOSS`).
        counts_visits: experts matter by the tokens that are routed to them, not by the norms of
            their results.
        random_seed: every score is drawn at random instead, as a baseline; None: none is.
    """

    aggregate: Aggregate = Aggregate()
    depth: str = INFLUENCE
    counts_visits: bool = False
    random_seed: int | None = None


class Importance:
    """Scores of a checkpoint's units; what is finished goes to `parts`, one part a layer."""

    def __init__(self, reader: Reader, method: Method, parts: Parts):
        self._reader, self._method, self._parts = reader, method, parts
        self.config = reader.config

    def run(self, tokens_YW: np.ndarray, progress: Progress | None = None) -> None:
        """Scores all that are not scored yet on windows of ids; raises InputError if a number is
        not finite, or a part cannot be written.
        """
        if self._method.random_seed is not None:
            return
        names = [self._name(index) for index in range(self.config.num_layers)]
        if not all(map(self._parts.has, names)):
            stream = start(self._reader, tokens_YW)
            for index, name in enumerate(names):
                if progress:
                    progress(index, len(names), "scoring layers")
                values = self._reader.layer(index)
                watch = self._watch(index)  # of a finished layer, too: the stream gets equal bits
                notes = stream.advance(index, values, watch)
                if not self._parts.has(name):
                    scores = self._scores(index, values, watch, notes, tokens_YW.size)
                    self._parts.write(name, scores, {})
            if progress:
                progress(len(names), len(names), "scoring layers")
        if self._method.depth == LOSS and not self._parts.has(_OF_DEPTH):
            self._parts.write(_OF_DEPTH, {_LOSS: self._losses(tokens_YW, progress)}, {})

    def layer(self, index: int) -> Scores:
        """Returns the scores of a layer's units, by axis."""
        if self._method.random_seed is None:
            scores = dict(self._parts.read(self._name(index)))
        else:
            scores = self._random(index)
        return {name: np.asarray(array) for name, array in scores.items()}

    def depth(self) -> np.ndarray:
        """Returns what each layer matters, float64 [L]."""
        if self._method.depth == LOSS and self._method.random_seed is None:
            return np.array(self._parts.read(_OF_DEPTH)[_LOSS])
        layers = range(self.config.num_layers)
        return np.array([float(self.layer(index)[axes.LAYERS][0]) for index in layers])

    def _name(self, index: int) -> str:
        return f"layer-{index:04d}"

    def _watch(self, index: int) -> ImportanceWatch:
        layer = self.config.layers[index]
        readers = axes.width_readers(self.config, index)
        scored = [f"{part.prefix}/{axis.scored}" for axis, part in axes.of_layer(layer)]
        eps = getattr(layer.mixer, "norm_eps", None) or self.config.norm_eps
        return ImportanceWatch(
            frozenset(readers) | frozenset(scored), layer, frozenset(readers),
            self._method.aggregate, self._method.counts_visits, eps,
        )  # fmt: skip

    def _scores(
        self, index: int, values: Values, watch: ImportanceWatch, notes: list[Notes], tokens: int
    ) -> Scores:
        totals: Scores = {}
        for batch in notes:
            for path, noted in sorted(batch.items()):
                for name, array in noted.items():
                    key = f"{name}:{path}"  # several matrices read the model's channels
                    totals[key] = totals.get(key, 0) + np.asarray(array, np.float64)
        scores: Scores = {axes.LAYERS: totals.pop(f"{axes.LAYERS}:{OF_LAYER}").reshape(1) / tokens}
        for key, total in totals.items():
            name, _, _ = key.partition(":")
            score = self._method.aggregate.whole(total)
            scores[name] = scores.get(name, 0) + score
        for axis, part in axes.of_layer(watch.layer):
            if axis.of_results:
                gain = values[f"{part.prefix}/{axis.of_results}"] + self.config.norm_offset
                scores[axis.name] = scores[axis.name] * np.abs(gain)
        for name, score in scores.items():
            if not np.isfinite(score).all():
                raise InputError(f"layer {index}: activations of {name} are not finite")
        return scores

    def _random(self, index: int) -> Scores:
        seed = self._method.random_seed
        layer, scores = self.config.layers[index], {}
        for axis, part in axes.of_layer(layer):
            size = axis.size(part.kind)
            experts = part.kind.experts if axis.is_stacked else None
            shape = (experts[0], size) if experts else (size,)
            draws = np.random.default_rng([seed or 0, index, axes.AXES.index(axis)])
            scores[axis.name] = draws.random(shape)
        draws = np.random.default_rng([seed or 0, index, len(axes.AXES)])
        return scores | {axes.WIDTH: draws.random(self.config.width), axes.LAYERS: draws.random(1)}

    def _losses(self, tokens_YW: np.ndarray, progress: Progress | None) -> np.ndarray:
        """By how much the loss rises without each layer, float64 [L]; infinite where another layer
        reads what it made.
        """
        windows_YW, config = loss.spread(tokens_YW), self.config
        owners = {spec.owner for spec in config.cache_specs} | config.choice_owners
        free = [index for index in range(config.num_layers) if index not in owners]
        most = max(_BRANCH_BYTES // (4 * windows_YW.size * config.width), 1)
        groups = [free[first : first + most] for first in range(0, len(free), most)]
        rises, total = np.full(config.num_layers, math.inf), len(groups) * config.num_layers
        for nth, group in enumerate(groups):

            def of_group(done: int, first: int = nth * config.num_layers) -> None:
                if progress:
                    progress(first + done, total, "leaving each layer out")

            rises[group] = self._rises(windows_YW, group, of_group)
        return rises

    def _rises(
        self, windows_YW: np.ndarray, group: list[int], progress: Callable[[int], None]
    ) -> np.ndarray:
        """By how much the loss rises without each of some layers, whose streams are in memory
        together.
        """
        base, branches = start(self._reader, windows_YW), dict[int, Stream]()
        for index in range(self.config.num_layers):
            progress(index)
            values = self._reader.layer(index)
            if index in group:
                branches[index] = base.branch()
            for without, stream in (*branches.items(), (None, base)):
                if without != index:
                    stream.advance(index, values)
        progress(self.config.num_layers)
        losses = [loss.of_stream(self._reader, stream, windows_YW)
               for stream in (base, *branches.values())]  # fmt: skip
        return np.array(losses[1:]) - losses[0]


def start(reader: Reader, tokens_YW: np.ndarray) -> Stream:
    """Returns windows of ids before a model's first layer."""
    ids, places = np.unique(tokens_YW, return_inverse=True)
    return Stream(reader.config, reader.embedding(ids), places.reshape(tokens_YW.shape))
