"""A smaller model of the same vocabulary proposes (Leviathan et al. 2023, arXiv 2211.17192; Chen et
al. 2023, arXiv 2302.01318).

Its layers cache in pages beside the model's own, so prefixes, forks, preemption and swapping serve
both, and it has no committed length of its own: what it has cached of rejected drafts is written
over.
"""

from typing import Any

import jax
import jax.numpy as jnp

from configs.model import ModelConfig
from inference.speculation import drafting
from inference.speculation.own_pages import OwnPages
from inference.speculation.proposer import Asked, Drafts, Fed
from layers import decoder
from layers.kv_cache import Cache
from layers.params import Params
from layers.ragged import Ragged, Rectangle


class DraftModel:
    """A `Proposer` that keeps nothing in the slots."""

    features: tuple[int, ...] = ()

    def __init__(self, draft: ModelConfig, pages: OwnPages, attention: str):
        """`attention`: the implementation that the cache is laid out for."""
        self._model, self._pages, self._attention = draft, pages, attention

    def init(self) -> tuple[()]:
        """As `Proposer` says."""
        return ()

    def admit(
        self, state: Any, slot_A: jax.Array, source_A: jax.Array, history_AS: jax.Array
    ) -> Any:
        """As `Proposer` says."""
        return state

    def observe(self, params: Params, cache: Cache, state: Any, fed: Fed) -> tuple[Cache, Any]:
        """As `Proposer` says."""
        return cache, state

    def propose(
        self, params: Params, cache: Cache, state: Any, asked: Asked
    ) -> tuple[Cache, Drafts]:
        """As `Proposer` says; the last draft is fed as well, since the next step may follow it."""
        weights, own = params["draft"], self._pages.of(cache)
        if asked.prompts is not None:
            _, own = self._forward(weights, own, asked.prompt_YW, asked.prompts)
        drafts = Drafts(jnp.zeros((0, 0), jnp.int32))
        if asked.decode is not None and (width := asked.decode.position_YW.shape[1]) > 1:

            def feed(own: Cache, token_R: jax.Array, column: Rectangle) -> Any:
                hidden_RD, own = self._forward(weights, own, token_R[:, None], column)
                return own, decoder.logits(weights, self._model, hidden_RD)

            own, drafts = drafting.one_by_one(
                feed, own, asked, asked.decode, width, self._model.vocab_size
            )
        return self._pages.put(cache, own), drafts

    def _forward(
        self, weights: Params, cache: Cache, tokens_YW: jax.Array, rectangle: Rectangle
    ) -> tuple[jax.Array, Cache]:
        ragged = self._pages.seen(Ragged((rectangle,)))
        return decoder.forward(
            weights, self._model, tokens_YW.ravel(), ragged, cache, attention=self._attention
        )
