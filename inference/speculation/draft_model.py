"""A smaller model of the same vocabulary proposes (Leviathan et al. 2023, arXiv 2211.17192; Chen et
al. 2023, arXiv 2302.01318).

Its layers cache in pages beside the model's own, so prefixes, forks, preemption and swapping serve
both, and it has no committed length of its own: what it has cached of rejected drafts is written
over. It draws with the request's own filters. Where acceptance is coupled it does with its noise
too, so that both agree wherever their laws are close.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from configs.engine import Config
from inference.sampling import gumbel, sampler
from inference.sampling.gumbel import Purpose
from inference.speculation.proposer import Asked, Drafts, Emitted
from layers import decoder, topk
from layers.kernels.device import target_is_cpu
from layers.kv_cache import Cache
from layers.params import Params
from layers.ragged import Ragged, Rectangle


class DraftModel:
    """A `Proposer` that keeps nothing in the slots."""

    def __init__(self, config: Config, attention: str):
        """`attention`: the implementation that the cache is laid out for."""
        assert config.draft is not None
        self._model, self._attention = config.draft, attention
        own = [group.spec for group in config.cached_model.page_groups]
        self._groups = [own.index(group.spec) for group in self._model.page_groups]
        self._first_leaf = config.chip_model.num_layers

    def init(self) -> tuple[()]:
        """As `Proposer` says."""
        return ()

    def admit(self, state: Any, slot_A: jax.Array, history_AS: jax.Array) -> Any:
        """As `Proposer` says."""
        return state

    def observe(self, state: Any, emitted: Emitted) -> Any:
        """As `Proposer` says."""
        return state

    def propose(
        self, params: Params, cache: Cache, state: Any, asked: Asked
    ) -> tuple[Cache, Drafts]:
        """As `Proposer` says; the last draft is fed as well, since the next step may follow it."""
        weights, own = params["draft"], cache[self._first_leaf :]
        if asked.prompts is not None:
            _, own = self._forward(weights, own, asked.prompt_YW, asked.prompts)
        drafts = Drafts(jnp.zeros((0, 0), jnp.int32))
        if asked.decode is not None and asked.decode.position_YW.shape[1] > 1:
            own, drafts = self._draft(weights, own, asked, asked.decode)
        return (*cache[: self._first_leaf], *own), drafts

    def _draft(
        self, weights: Params, cache: Cache, asked: Asked, decode: Rectangle
    ) -> tuple[Cache, Drafts]:
        rows, width = decode.position_YW.shape
        has_law = asked.needs_law and not asked.greedy

        def feed(nth: jax.Array | int, held: Any) -> Any:
            cache, token_R, draft_RW, law_RWV = held
            column = _column(decode, nth)
            hidden_RD, cache = self._forward(weights, cache, token_R[:, None], column)
            logits_RV = decoder.logits(weights, self._model, hidden_RD)
            position_R = column.position_YW[:, 0] + 1
            if has_law:
                law_RV = sampler.law(logits_RV, asked.sampling, position_R, asked.counts)
                keys_R2 = gumbel.row_keys(asked.sampling.seed, position_R, Purpose.DRAFT)
                token_R, law_RWV = sampler.draw(law_RV, keys_R2), law_RWV.at[:, nth].set(law_RV)
            else:
                token_R = _sample(logits_RV, asked, position_R)
            return cache, token_R, draft_RW.at[:, nth].set(token_R), law_RWV

        no_law = jnp.zeros((rows, width, self._model.vocab_size * has_law), jnp.float32)
        held = cache, asked.token_R, jnp.zeros_like(decode.position_YW), no_law
        if target_is_cpu():  # unrolled, XLA's CPU backend copies the pages once a token
            held = jax.lax.fori_loop(0, width, feed, held)
        else:
            for nth in range(width):
                held = feed(nth, held)
        cache, _, draft_RW, law_RWV = held
        return cache, Drafts(draft_RW[:, :-1], law_RWV[:, :-1] if has_law else None)

    def _forward(
        self, weights: Params, cache: Cache, tokens_YW: jax.Array, rectangle: Rectangle
    ) -> tuple[jax.Array, Cache]:
        tables = tuple(rectangle.tables[group] for group in self._groups)
        ragged = Ragged((dataclasses.replace(rectangle, tables=tables),))
        return decoder.forward(
            weights, self._model, tokens_YW.ravel(), ragged, cache, attention=self._attention
        )


def _sample(logits_RV: jax.Array, asked: Asked, position_R: jax.Array) -> jax.Array:
    summary = topk.summarize(logits_RV)
    if asked.greedy:
        return summary.best_Q
    return sampler.sample(logits_RV, summary, asked.sampling, position_R, asked.counts)


def _column(rectangle: Rectangle, nth: jax.Array | int) -> Rectangle:
    """One token of each row."""
    position_Y1, valid_Y1 = (
        jax.lax.dynamic_slice_in_dim(x_YW, nth, 1, axis=1)
        for x_YW in (rectangle.position_YW, rectangle.valid_YW)
    )
    return dataclasses.replace(rectangle, position_YW=position_Y1, valid_YW=valid_Y1)
