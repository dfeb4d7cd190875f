"""The residual stream of calibration windows: what each layer reads, and what it leaves."""

import collections
import functools
from collections.abc import Collection

import jax
import numpy as np

from configs.errors import InputError
from configs.model import ModelConfig
from inference.quantize import input_statistics
from inference.quantize.folds import Values
from inference.quantize.input_statistics import BatchStatistics, InputStatistics
from layers import decoder, params, ragged
from layers.kernels.linear.observed import Observed
from layers.params import Params
from layers.registry import Chosen, Leaf

_TOKENS = 2048  # that run through a layer together, about
_ROWS = 256  # inputs of a matrix that are kept as they are, about


class Stream:
    """Windows on their way through a model, in float32 without formats.

    Args:
        embedding: the tables that tokens are embedded with, by path; of those that tokens look rows
            up in, the rows of the windows' distinct ids.
        tokens_YW: the windows, as indices of these ids.
    """

    def __init__(self, config: ModelConfig, embedding: Values, tokens_YW: np.ndarray):
        if config.reads_tokens:
            raise InputError(
                f"{config.name} chooses experts by ids of tokens, for which nothing is calibrated "
                "yet: quantize it by a method that reads no text"
            )
        self._config = config
        declared = config.parameters()
        self._layers = config.declared_layers
        infos = {name: declared[name] for name in ("embed", "positions", "inputs")
                 if name in declared}  # fmt: skip
        values = params.unflatten(infos, dict(embedding))
        num_windows = max(_TOKENS // tokens_YW.shape[1], 1)
        self._shapes, self._x, self._inputs = [], [], []
        for start in range(0, len(tokens_YW), num_windows):
            windows_YW = tokens_YW[start : start + num_windows]
            x_TD, inputs_LTP = _embedded(values, windows_YW, config=config)
            self._shapes.append(windows_YW.shape)
            self._x.append(np.asarray(x_TD))
            self._inputs.append(None if inputs_LTP is None else np.asarray(inputs_LTP))
        self._kinds: dict[object, int] = {}  # the first layer of each kind, whose program is used
        owners = [_read_by(config, layer) for layer in range(config.num_layers)]
        self._reads = collections.Counter(owner for owner in owners if owner is not None)
        self._for_sharers: dict[int, list[Leaf | Chosen]] = {}  # by owner, for layers to come

    def observe(
        self, index: int, values: Values, paths: Collection[str], has_products: bool
    ) -> dict[str, InputStatistics]:
        """What a layer's matrices of these paths read, by path; `values` are the layer's, before
        they get few bits, and `has_products` asks for sums of x x^T.
        """
        statistics: dict[str, InputStatistics] = {}
        num_rows = -(-_ROWS // len(self._x))
        weights = self._weights(index, values)
        for nth, shape in enumerate(self._shapes):
            noted = _observe_layer(
                weights, *self._inputs_of(index, nth), config=self._config, index=self._kind(index),
                shape=shape, paths=frozenset(paths), num_rows=num_rows, has_products=has_products,
            )  # fmt: skip
            for path, batch in jax.device_get(noted).items():
                statistics[path] = input_statistics.merged(statistics.get(path), batch)
        return statistics

    def advance(self, index: int, values: Values) -> None:
        weights, for_sharers = self._weights(index, values), []
        for nth, shape in enumerate(self._shapes):
            x_TD, leaf = _run_layer(
                weights, *self._inputs_of(index, nth), config=self._config, index=self._kind(index),
                shape=shape,
            )  # fmt: skip
            self._x[nth] = np.asarray(x_TD)
            for_sharers.append(jax.device_get(leaf) if self._reads[index] else None)
        if self._reads[index]:
            self._for_sharers[index] = for_sharers
        owner = _read_by(self._config, index)
        if owner is not None:
            self._reads[owner] -= 1
            if not self._reads[owner]:
                del self._for_sharers[owner]

    def _weights(self, index: int, values: Values) -> Params:
        return jax.device_put(params.unflatten(self._layers[index], dict(values)))

    def _inputs_of(
        self, index: int, nth: int
    ) -> tuple[np.ndarray, Leaf | Chosen, np.ndarray | None]:
        owner, inputs_LTP = _read_by(self._config, index), self._inputs[nth]
        leaf = None if owner is None else self._for_sharers[owner][nth]
        return self._x[nth], leaf, None if inputs_LTP is None else inputs_LTP[index]

    def _kind(self, index: int) -> int:
        layer, spec = self._config.layers[index], self._config.cache_specs[index]
        home = spec if spec.owner is None else self._config.cache_specs[spec.owner]
        is_choice_owner = index in self._config.choice_owners
        return self._kinds.setdefault((layer, home, spec.owner is None, is_choice_owner), index)


def _read_by(config: ModelConfig, index: int) -> int | None:
    """The earlier layer whose cache, or choice, a layer reads."""
    owner = config.cache_specs[index].owner
    return config.layers[index].mixer.choice_owner if owner is None else owner


@functools.partial(jax.jit, static_argnames="config")
def _embedded(
    values: Params, tokens_YW: jax.Array, *, config: ModelConfig
) -> tuple[jax.Array, jax.Array | None]:
    tokens_T, rows = tokens_YW.reshape(-1), ragged.contiguous(*tokens_YW.shape)
    x_TD = decoder.embedded(values, config, tokens_T, rows)
    return x_TD, decoder.inputs_of_layers(values, config, tokens_T, x_TD)


_STATIC = "config", "index", "shape"


@functools.partial(jax.jit, static_argnames=_STATIC)
def _run_layer(
    weights: Params, x_TD: jax.Array, leaf: Leaf | Chosen, input_TP: jax.Array | None,
    *, config: ModelConfig, index: int, shape: tuple[int, int],
) -> tuple[jax.Array, Leaf | Chosen]:  # fmt: skip
    rows = ragged.contiguous(*shape)
    return decoder.layer(weights, config, index, x_TD, rows, leaf, input_TP)


@functools.partial(jax.jit, static_argnames=(*_STATIC, "paths", "num_rows", "has_products"))
def _observe_layer(
    weights: Params, x_TD: jax.Array, leaf: Leaf | Chosen, input_TP: jax.Array | None,
    *, config: ModelConfig, index: int, shape: tuple[int, int], paths: frozenset[str],
    num_rows: int, has_products: bool,
) -> dict[str, BatchStatistics]:  # fmt: skip
    noted: dict[str, BatchStatistics] = {}
    infos = config.declared_layers[index]

    def watched(path: str, weight: jax.Array) -> jax.Array | Observed:
        def note(x_XD: jax.Array, sizes_E: jax.Array | None) -> None:
            noted[path] = input_statistics.of_batch(x_XD, sizes_E, num_rows, has_products)

        return Observed(weight, note) if path in paths else weight

    leaves = {path: watched(path, leaf) for path, leaf in params.flatten(weights).items()}
    decoder.layer(
        params.unflatten(infos, leaves), config, index, x_TD, ragged.contiguous(*shape), leaf,
        input_TP,
    )  # fmt: skip
    return noted
