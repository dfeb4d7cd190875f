"""DFlash: layers of attention fill in a whole block of drafts at once (2026, arXiv 2602.06036).

Keys and values of a token that the target has seen are projections of the target's fused states, in
every layer the same ones. The newest token and masks behind it are the block: they see each other
and all that is cached, and the output at a mask is the draft in its place.
"""

import dataclasses

import jax
import jax.numpy as jnp

from configs import heads
from configs.kinds.attention import Attention
from configs.model import ModelConfig
from inference.speculation import drafting
from inference.speculation.own_pages import OwnPages
from inference.speculation.proposer import DraftInputs, Drafts, SampledStep, Stateless
from layers import decoder, norm, rope
from layers.kv_cache import Cache
from layers.linear import linear
from layers.mixers import attention
from layers.params import Params
from layers.ragged import Ragged
from layers.registry import StepContext


class DFlashProposer(Stateless):
    """Drafts with layers that read what it caches of the target's states."""

    def __init__(
        self, draft: heads.DFlash, target: ModelConfig, pages: OwnPages, attention: str
    ) -> None:
        """`target`: the model as one chip computes it; `attention`: the implementation that the
        cache is laid out for.
        """
        self.heads, self.pages, self._attention = draft, pages, attention
        self.features = draft.features
        self._target = dataclasses.replace(
            target, embedding_scale=draft.embedding_scale, logit_scale=draft.logit_scale,
            logit_cap=draft.logit_cap,
        )  # fmt: skip

    def propose(
        self, params: Params, cache: Cache, state: tuple[()], inputs: DraftInputs
    ) -> tuple[Cache, Drafts | None]:
        """As `Proposer` says; what the block leaves in the pages is written over by `observe`."""
        if (decode := inputs.decode) is None:
            return cache, None
        rows, width = decode.position_YW.shape
        block = dataclasses.replace(decode, causal_Y=jnp.zeros(rows, bool))
        tokens_RW = jnp.full((rows, width), self.heads.mask_id).at[:, 0].set(inputs.token_R)
        hidden_TD, draft_cache = self.block(
            params, self.pages.of(cache), tokens_RW.ravel(), self.pages.view(Ragged((block,)))
        )
        masked_QD = hidden_TD.reshape(rows, width, -1)[:, 1:].reshape(rows * (width - 1), -1)
        repeated = jax.tree.map(
            lambda x: jnp.repeat(x, width - 1, axis=0), (inputs.sampling, inputs.counts)
        )
        token_Q, prob_QV = drafting.draw(
            self.logits(params, masked_QD),
            dataclasses.replace(inputs, sampling=repeated[0], counts=repeated[1]),
            decode.position_YW[:, 1:].ravel(),
        )
        prob_RkV = None if prob_QV is None else prob_QV.reshape(rows, width - 1, -1)
        return self.pages.put(cache, draft_cache), Drafts(token_Q.reshape(rows, -1), prob_RkV)

    def block(
        self, params: Params, cache: Cache, tokens_T: jax.Array, ragged: Ragged
    ) -> tuple[jax.Array, Cache]:
        """Its layers over newest tokens and masks: normalized states, f32[T, D], and its pages."""
        embedded_TD = decoder.embedded(params, self._target, tokens_T, ragged)
        output = decoder.layers(
            params["draft"], self.heads, embedded_TD, ragged, cache, attention=self._attention
        )
        return output.hidden_TD, output.cache

    def logits(self, params: Params, hidden_QD: jax.Array) -> jax.Array:
        """By the target's output table: f32[Q, V]."""
        return decoder.logits(params, self._target, hidden_QD)

    def observe(
        self, params: Params, cache: Cache, state: tuple[()], step: SampledStep
    ) -> tuple[Cache, tuple[()]]:
        ragged = self.pages.view(step.ragged)
        draft_cache = self.cached(params, self.pages.of(cache), step.features, ragged)
        return self.pages.put(cache, draft_cache), state

    def cached(
        self, params: Params, cache: Cache, features: tuple[jax.Array, ...], ragged: Ragged
    ) -> Cache:
        """Its pages with keys and values of the target's states, f32[T, D] each; what would attend
        with them has no reader, and is not computed.
        """
        weights, config = params["draft"], self.heads
        fused_TD = linear(jnp.concatenate(features, axis=-1), weights["fuse"])
        state_TD = norm.apply(fused_TD, weights["state_norm"], config)
        leaves = []
        for index, layer in enumerate(config.layers):
            kind, spec, angles = layer.mixer, config.cache_specs[index], None
            assert isinstance(kind, Attention)
            if kind.rope is not None:
                angles = rope.angles(
                    kind.rope, kind.head_width, ragged.position_T, config.max_context
                )
            context = StepContext(
                ragged, angles, spec, config.groups_of_layer[index][0], is_owner=True,
                deterministic=False, attention=self._attention,
                page_format=spec.page_format(config.cache_dtype),
            )  # fmt: skip
            mixer = weights["layers"][index]["mixer"]
            _, leaf = attention.apply(mixer, config, kind, state_TD, cache[index], context)
            assert leaf is not None
            leaves.append(leaf)
        return tuple(leaves)
