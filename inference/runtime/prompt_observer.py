"""What the end of a prompt reads of it, as the device computes it from cached pages: by this a
prompt with a budget gives up pages (`inference/kv_pages/prompt_pages.py`).
"""

import functools
from collections.abc import Sequence as Items

import jax
import jax.numpy as jnp
import numpy as np

from configs.engine import Config
from configs.model import ModelConfig
from configs.settings.requests import OBSERVED_TOKENS
from inference.runtime.batch import device_pages
from layers import decoder
from layers.backends import backends
from layers.backends.backend import Backend
from layers.kernels.linear import packed
from layers.kv_cache import Cache
from layers.params import Params
from layers.ragged import Ragged, Rectangle
from layers.sparse.snap import ObservedPages


class PromptObserver:
    """Runs `observe` for one engine, on one chip: a program beside those of its steps."""

    def __init__(self, config: Config, attention: str, backend: Backend):
        """`attention`: the implementation that the cache is laid out for."""
        self._config = config
        self._run = functools.partial(
            observe, model=config.chip_model, deterministic=config.engine.deterministic,
            attention=attention, backend=backend,
            is_exact=config.engine.kernels.activations == "exact",
        )  # fmt: skip
        self.is_compiled = False

    def compile(self, params: Params, cache: Cache) -> None:
        """Compiles it, and runs it once over pages of padding."""
        if not self.is_compiled:
            no_pages: list[list[int]] = [[] for _ in self._config.cached_model.page_groups]
            self(params, cache, [0] * OBSERVED_TOKENS, no_pages)
            self.is_compiled = True

    def __call__(
        self, params: Params, cache: Cache, tokens: Items[int], pages: Items[list[int]]
    ) -> np.ndarray:
        """Waits for the attention that the last of these cached tokens give to each: float32 [S].

        Args:
            params, cache: the engine's; what steps in flight write is there.
            tokens: of one sequence, at least `OBSERVED_TOKENS` and at most S.
            pages: its page list of each group.
        """
        config = self._config
        columns = -(-config.page_columns // config.device_pages)
        tables = []
        for group_pages in pages:
            table = np.zeros((1, columns), np.int32)
            table[0, : len(group_pages)] = group_pages
            tables.append(device_pages(table, config)[:, : config.page_columns])
        first = len(tokens) - OBSERVED_TOKENS
        newest = np.array(tokens[first:], np.int32)
        return np.asarray(self._run(params, cache, newest, np.int32(first), tuple(tables)))


@functools.partial(
    jax.jit, static_argnames=("model", "deterministic", "attention", "backend", "is_exact")
)  # engines that differ in nothing of this share it
def observe(
    params: Params,
    cache: Cache,
    tokens_W: jax.Array,
    first: jax.Array,
    tables: tuple[jax.Array, ...],
    *,
    model: ModelConfig,
    deterministic: bool,
    attention: str,
    backend: Backend,
    is_exact: bool,
) -> jax.Array:
    """Feeds cached tokens again, over their pages, without writing.

    Args:
        tokens_W: i32[W].
        first: i32, position of the first of them; the last ends the observed span.
        tables: i32[1, P] a page group.
        is_exact: products leave activations as they are (`packed.exact`).

    Returns:
        Float32 [S]: weights of the softmax, summed over all layers that keep all of the past.
    """
    position_1W = first + jnp.arange(len(tokens_W), dtype=jnp.int32)[None]
    is_valid_1W = jnp.ones(position_1W.shape, bool)
    row = Rectangle(jnp.zeros(1, jnp.int32), position_1W, is_valid_1W, tables)
    ragged = Ragged((row,))

    leaves = list(cache)
    for layer, groups in model.groups_of_layer.items():
        paged = cache[layer].as_paged
        assert paged is not None
        num_tokens = tables[groups[0]].size * paged.page_tokens
        leaves[layer] = ObservedPages(paged.pages, jnp.zeros(num_tokens, jnp.float32))
    with backends.use(backend), packed.exact(is_exact):
        x_TD = decoder.embedded(params, model, tokens_W, ragged)
        output = decoder.layers(
            params, model, x_TD, ragged, tuple(leaves), tokens_T=tokens_W,
            deterministic=deterministic, attention=attention,
        )  # fmt: skip
    assert output.cache is not None
    weights = [leaf.weight_S for leaf in output.cache if isinstance(leaf, ObservedPages)]
    return functools.reduce(jnp.add, weights)
