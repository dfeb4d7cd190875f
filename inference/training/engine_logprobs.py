"""Log-probabilities of whole sequences as an engine computes them, bit for bit where its sums have
one order: `engine.deterministic`, or the native kernels.

The decoder runs with the engine's packed weights and kernels over pages of its own, a sequence a
row. A token's bits do not depend on its company there, so they are those with which it was sampled.
"""

import functools
import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from configs.cache import BLOCK_TOKENS
from configs.engine import Config
from inference.runtime.model_runner import cache_arguments, for_this_device
from inference.sampling import sampler
from layers import decoder, kv_cache, topk
from layers.backends import backends
from layers.kernels.device import target_device
from layers.kernels.linear import api as linear
from layers.kernels.linear import packed
from layers.params import Params
from layers.ragged import Ragged, Rectangle


class EngineLogprobs:
    """Computes log-probabilities of sequences of up to `max_tokens` tokens with the step's products
    and attention of `config`, whose engine runs on one chip, in chunks as long and as many as the
    engine's. It compiles once.
    """

    def __init__(self, config: Config, max_tokens: int):
        self._config, self._attention = for_this_device(config)
        shapes = self._config.engine.shapes
        self._width = -(-(max_tokens - 1) // shapes.chunk_tokens) * shapes.chunk_tokens
        self._num_rows = max(shapes.prefill_chunks)
        self._compiled: jax.stages.Compiled | None = None
        self._compiling = threading.Lock()

    def pack(self, params: Params) -> Params:
        """Copies parameters, as the model declares them, for the engine's products."""
        return linear.copy_params(self._config, params)

    def __call__(self, weights: Params, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Log-probabilities of each sequence's tokens after the first, float32 [tokens - 1] in
        nats, by packed parameters.
        """
        logprobs: list[np.ndarray] = []
        for first in range(0, len(sequences), self._num_rows):
            some = sequences[first : first + self._num_rows]
            tokens_YX = np.zeros((self._num_rows, self._width + 1), np.int32)
            length_Y = np.zeros(self._num_rows, np.int32)
            for row, sequence in enumerate(some):
                tokens_YX[row, : len(sequence)], length_Y[row] = sequence, len(sequence) - 1
            logprobs_YW = np.asarray(self._run(weights, tokens_YX, length_Y))
            logprobs += [logprobs_YW[row, : len(sequence) - 1] for row, sequence in enumerate(some)]
        return logprobs

    def _run(self, *arrays: Params | np.ndarray) -> jax.Array:
        """`_logprobs`, compiled as the engine compiles its steps."""
        with self._compiling:
            if self._compiled is None:
                kernels = self._config.engine.kernels
                backend = backends.of(target_device(), kernels.linear)
                with backends.use(backend), packed.exact(kernels.activations == "exact"):
                    jitted = jax.jit(
                        functools.partial(
                            _logprobs, config=self._config, attention=self._attention
                        ),
                        compiler_options=dict(backend.compiler_options),
                    )
                    self._compiled = jitted.lower(*arrays).compile()
        logprobs_YW: jax.Array = self._compiled(*arrays)
        return logprobs_YW


def _logprobs(
    weights: Params, tokens_YX: jax.Array, length_Y: jax.Array, *, config: Config, attention: str
) -> jax.Array:
    """Log-probabilities of the tokens behind each row's inputs, float32 [Y, W], for i32[Y, W + 1]
    of which the first `length_Y` are inputs; arbitrary behind these.
    """
    chunk = config.engine.shapes.chunk_tokens
    Y, W = tokens_YX.shape[0], tokens_YX.shape[1] - 1
    logits = functools.partial(decoder.logits, weights, config.model)
    cache, table_YP = _pages(config, attention, Y, W)

    def run(cache: kv_cache.Cache, start: jax.Array) -> tuple[kv_cache.Cache, jax.Array]:
        """A chunk of each row, behind those before it."""
        tokens_YC, targets_YC = (
            jax.lax.dynamic_slice_in_dim(tokens_YX, first, chunk, 1) for first in (start, start + 1)
        )
        position_YC = start + jnp.broadcast_to(jnp.arange(chunk, dtype=jnp.int32), (Y, chunk))
        valid_YC, newest_Y1 = position_YC < length_Y[:, None], jnp.maximum(length_Y - 1, 0)[:, None]
        rectangle = Rectangle(
            jnp.where(valid_YC[:, 0], jnp.arange(Y, dtype=jnp.int32), Y),
            jnp.where(valid_YC, position_YC, newest_Y1), valid_YC,
            (table_YP,) * len(config.model.page_groups),
        )  # fmt: skip
        hidden_TD, cache = decoder.forward(
            weights, config.model, tokens_YC.reshape(-1), Ragged((rectangle,)), cache,
            deterministic=config.engine.deterministic, attention=attention,
        )  # fmt: skip

        def of_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
            hidden_CD, targets_C = row
            logits_CV = logits(hidden_CD)
            return sampler.log_probs(logits_CV, topk.summarize(logits_CV), targets_C)[0]

        return cache, jax.lax.map(of_row, (hidden_TD.reshape(Y, chunk, -1), targets_YC))

    starts = jnp.arange(0, W, chunk, dtype=jnp.int32)
    _, logprobs_CYW = jax.lax.scan(run, cache, starts)
    return jnp.moveaxis(logprobs_CYW, 0, 1).reshape(Y, W)


def _pages(
    config: Config, attention: str, num_rows: int, width: int
) -> tuple[kv_cache.Cache, jax.Array]:
    """An empty cache with pages for rows of a width, and these, i32[Y, P]; page 0 is the sink."""
    model, _, page_tokens, _, _, layout, _ = cache_arguments(config, attention)
    # of a row: whole blocks, as the engine has them
    pages = -(-width // BLOCK_TOKENS) * (BLOCK_TOKENS // page_tokens)
    leaves = kv_cache.abstract(
        model, (1 + num_rows * pages,) * len(model.page_groups), page_tokens, num_rows, 0, layout, 0
    )
    cache: kv_cache.Cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), leaves)
    return cache, 1 + jnp.arange(num_rows * pages, dtype=jnp.int32).reshape(num_rows, pages)
