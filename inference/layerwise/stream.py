"""The residual stream of windows of text: what each layer reads, and what it leaves."""

import collections
import copy
import dataclasses
import functools
from collections.abc import Mapping

import jax
import numpy as np

from configs.errors import InputError
from configs.model import ModelConfig
from layers import decoder, params, ragged
from layers.kernels.linear.observed import Observed
from layers.params import Params
from layers.registry import Chosen, Leaf

Values = dict[str, np.ndarray]  # float32, of a layer, by their paths in it
Note = Mapping[str, jax.Array]  # what a watch notes of one product, or of a layer

_TOKENS = 2048  # that run through a layer together, about


@dataclasses.dataclass(frozen=True)
class Watch:
    """What is noted of a batch of windows while a layer runs. It is traced with the layer: equal
    watches share a program.

    Attributes:
        paths: matrices whose products are noted.
    """

    paths: frozenset[str]

    def of_product(
        self,
        path: str,
        weight: jax.Array,
        x_XD: jax.Array,
        sizes_E: jax.Array | None,
        shape: tuple[int, int],
    ) -> Note:
        """Notes a product's inputs.

        Args:
            weight: the matrix [F, D], or a stack of them [E, F, D].
            x_XD: its inputs; of a stack those of each matrix, one matrix behind the other.
            sizes_E: i32, how many inputs each matrix of a stack has.
            shape: windows of the batch, and tokens of one.
        """
        raise NotImplementedError

    def of_layer(self, before_TD: jax.Array, behind_TD: jax.Array) -> Note:
        """Notes the residual stream before a layer and behind it, float32."""
        return {}


OF_LAYER = ""  # the path of what `Watch.of_layer` notes
Notes = Mapping[str, Mapping[str, np.ndarray]]  # of a batch, by path


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
                f"{config.name} chooses experts by ids of tokens: its layers do not run one by one "
                "yet, as methods that read text need"
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

    @property
    def num_batches(self) -> int:
        """Batches of windows that run through a layer one after the other."""
        return len(self._x)

    def observe(self, index: int, values: Values, watch: Watch) -> list[Notes]:
        """Runs a layer of these values, and returns what a watch notes of each batch; the stream
        stays before the layer.
        """
        weights, notes = self._weights(index, values), []
        for nth in range(self.num_batches):
            notes.append(jax.device_get(_observe_layer(
                weights, *self._inputs_of(index, nth), config=self._config, index=self._kind(index),
                shape=self._shapes[nth], watch=watch,
            )))  # fmt: skip
        return notes

    def advance(self, index: int, values: Values, watch: Watch | None = None) -> list[Notes]:
        """Runs a layer of these values: the stream goes behind it. Returns what a watch notes of
        each batch meanwhile.
        """
        weights, for_sharers, notes = self._weights(index, values), [], []
        for nth in range(self.num_batches):
            x_TD, leaf, noted = _run_layer(
                weights, *self._inputs_of(index, nth), config=self._config, index=self._kind(index),
                shape=self._shapes[nth], watch=watch,
            )  # fmt: skip
            self._x[nth] = np.asarray(x_TD)
            for_sharers.append(jax.device_get(leaf) if self._reads[index] else None)
            notes.append(jax.device_get(noted))
        if self._reads[index]:
            self._for_sharers[index] = for_sharers
        owner = _read_by(self._config, index)
        if owner is not None:
            self._reads[owner] -= 1
            if not self._reads[owner]:
                del self._for_sharers[owner]
        return notes

    def branch(self) -> "Stream":
        """Returns the same stream, which goes on by itself."""
        branch = copy.copy(self)
        branch._x, branch._reads = list(self._x), self._reads.copy()
        branch._for_sharers = dict(self._for_sharers)
        return branch

    def hidden(self, nth: int) -> np.ndarray:
        """Returns a batch of the stream, float32 [windows, tokens, D]."""
        return self._x[nth].reshape(*self._shapes[nth], -1)

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


_STATIC = "config", "index", "shape", "watch"


def _watched_layer(
    weights: Params, x_TD: jax.Array, leaf: Leaf | Chosen, input_TP: jax.Array | None,
    *, config: ModelConfig, index: int, shape: tuple[int, int], watch: Watch | None,
) -> tuple[jax.Array, Leaf | Chosen, dict[str, Note]]:  # fmt: skip
    noted: dict[str, Note] = {}
    infos = config.declared_layers[index]

    def watched(path: str, weight: jax.Array) -> jax.Array | Observed:
        def note(x_XD: jax.Array, sizes_E: jax.Array | None) -> None:
            assert watch is not None
            noted[path] = watch.of_product(path, weight, x_XD, sizes_E, shape)

        return Observed(weight, note) if watch is not None and path in watch.paths else weight

    leaves = {path: watched(path, leaf) for path, leaf in params.flatten(weights).items()}
    behind_TD, leaf = decoder.layer(
        params.unflatten(infos, leaves), config, index, x_TD, ragged.contiguous(*shape), leaf,
        input_TP,
    )  # fmt: skip
    if watch is not None:
        noted[OF_LAYER] = watch.of_layer(x_TD, behind_TD)
    return behind_TD, leaf, noted


_run_layer = jax.jit(_watched_layer, static_argnames=_STATIC)


@functools.partial(jax.jit, static_argnames=_STATIC)
def _observe_layer(
    weights: Params, x_TD: jax.Array, leaf: Leaf | Chosen, input_TP: jax.Array | None,
    *, config: ModelConfig, index: int, shape: tuple[int, int], watch: Watch,
) -> dict[str, Note]:  # fmt: skip
    """What is noted alone: what nothing notes is not computed."""
    return _watched_layer(
        weights, x_TD, leaf, input_TP, config=config, index=index, shape=shape, watch=watch
    )[2]
