"""A smaller model of the same vocabulary proposes (Leviathan et al. 2023, arXiv 2211.17192; Chen et
al. 2023, arXiv 2302.01318).

Its layers cache in pages beside the model's own, so prefixes, forks, preemption and swapping serve
both, and it has no committed length of its own: what it has cached of rejected drafts is written
over.
"""

import jax

from configs.model import ModelConfig
from inference.speculation import drafting
from inference.speculation.own_pages import OwnPages
from inference.speculation.proposer import DraftInputs, Drafts, SampledStep, Stateless
from layers import decoder
from layers.kv_cache import Cache
from layers.params import Params
from layers.ragged import Ragged, Rectangle


class DraftModelProposer(Stateless):
    """Drafts with a model of its own pages."""

    features: tuple[int, ...] = ()

    def __init__(self, draft: ModelConfig, pages: OwnPages, attention: str):
        """`attention`: the implementation that the cache is laid out for."""
        self._model, self._pages, self._attention = draft, pages, attention

    def observe(
        self, params: Params, cache: Cache, state: tuple[()], step: SampledStep
    ) -> tuple[Cache, tuple[()]]:
        return cache, state

    def propose(
        self, params: Params, cache: Cache, state: tuple[()], inputs: DraftInputs
    ) -> tuple[Cache, Drafts | None]:
        """As `Proposer` says; the last draft is fed as well, since the next step may follow it."""
        weights, draft_cache = params["draft"], self._pages.of(cache)
        if inputs.prompts is not None:
            _, draft_cache = self._forward(weights, draft_cache, inputs.prompt_YW, inputs.prompts)
        drafts = None
        if inputs.decode is not None:
            width = inputs.decode.position_YW.shape[1]

            def feed(
                draft_cache: Cache, token_R: jax.Array, column: Rectangle
            ) -> tuple[Cache, jax.Array]:
                hidden_RD, draft_cache = self._forward(
                    weights, draft_cache, token_R[:, None], column
                )
                return draft_cache, decoder.logits(weights, self._model, hidden_RD)

            draft_cache, drafts = drafting.one_by_one(
                feed, draft_cache, inputs, inputs.decode, width, self._model.vocab_size
            )
        return self._pages.put(cache, draft_cache), drafts

    def _forward(
        self, weights: Params, cache: Cache, tokens_YW: jax.Array, rectangle: Rectangle
    ) -> tuple[jax.Array, Cache]:
        ragged = self._pages.view(Ragged((rectangle,)))
        return decoder.forward(
            weights, self._model, tokens_YW.ravel(), ragged, cache, attention=self._attention
        )
