"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434), of all tokens or of those that
an indexer chooses.

Over pages it is *absorbed*: queries are projected into the space of the latent vectors, which are
read once for all heads, and each head's result is projected out of it. Without a cache (training,
scoring) keys and values of all heads are projected out of the latent vectors, which takes fewer
operations where a key meets many queries.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from configs.kinds.latent import Latent
from configs.model import ModelConfig
from layers import norm, temperature, weights
from layers.kv_cache import Dense
from layers.linear import add_bias, each_linear, linear, project_out
from layers.mixers import indexer
from layers.mixers.attention import attend
from layers.params import Params
from layers.registry import Chosen, Leaf, StepContext
from layers.rope import rotate
from layers.weights import Weight


def apply(
    params: Params,
    config: ModelConfig,
    kind: Latent,
    x_TD: jax.Array,
    leaf: Leaf | Chosen,
    context: StepContext,
) -> tuple[jax.Array, Leaf | Chosen]:
    """One layer: float32 [T, D], and the leaf of `attention.attend` or `indexer.attend`."""
    T, C, H = x_TD.shape[0], kind.rank, kind.nope_width
    scale = (H + kind.rope_width) ** -0.5 if kind.scale is None else kind.scale
    k_T1X = latent_T1C = None
    with jax.named_scope("qkv"):
        down_TX, up = _queries_from(params, config, kind, x_TD)
        q_TNX = scale * linear(down_TX, up).reshape(T, kind.num_heads, -1)
        q_TNX = temperature.scaled(q_TNX, kind.temperature, context.ragged.position_T)
        q_rope_TNR = _rotated(q_TNX[..., H:], kind, context)
        if context.is_owner:
            k_T1X, latent_T1C = _latents(params, config, kind, x_TD, context)
    index = None
    if kind.local_indexer is not None:
        with jax.named_scope("index"):
            index = indexer.project(params["indexer"], config, kind, x_TD, down_TX, context)
    mix = _attention(config, kind, index)
    choice = leaf if isinstance(leaf, Chosen) else None
    cached = leaf.leaf if isinstance(leaf, Chosen) else leaf
    is_paged = cached is not None and cached.as_paged is not None
    k_up, v_up = (weights.of(params[name]).array for name in ("k_up", "v_up"))
    if not is_paged and k_up is not None and v_up is not None:
        if k_T1X is not None and latent_T1C is not None:
            cached = Dense(k_T1X, latent_T1C)
        assert isinstance(cached, Dense)
        k_T1X, latent_T1C = cached.k_TKH, cached.v_TKH
        k_TNH = _out_of(latent_T1C[:, 0], k_up, "TC,NCH->TNH").astype(config.dtype)
        v_TNX = _out_of(latent_T1C[:, 0], v_up, "TC,NXC->TNX").astype(config.dtype)
        k_rope_TNR = jnp.broadcast_to(k_T1X[..., C:], q_rope_TNR.shape)
        q_TNX = jnp.concatenate([q_TNX[..., :H], q_rope_TNR], axis=-1).astype(config.dtype)
        k_TNX = jnp.concatenate([k_TNH, k_rope_TNR], axis=-1)
        with jax.named_scope("attend"):
            out_TNX, leaf = mix(q_TNX, k_TNX, v_TNX, choice, context)
        leaf = Chosen(cached, leaf.choices) if isinstance(leaf, Chosen) else cached
    else:
        with jax.named_scope("absorb"):
            q_TNC = each_linear(q_TNX[..., :H].astype(config.dtype), params["k_up"])
            q_TNX = jnp.concatenate([q_TNC, q_rope_TNR], axis=-1).astype(config.dtype)
        with jax.named_scope("attend"):
            out_TNC, leaf = mix(q_TNX, k_T1X, latent_T1C, leaf, context)
        with jax.named_scope("expand"):
            out_TNX = each_linear(out_TNC.astype(config.dtype), params["v_up"])
    return project_out(out_TNX.reshape(T, -1), params, config.dtype), leaf


def _attention(
    config: ModelConfig, kind: Latent, index: indexer.Index | None
) -> Callable[..., tuple[jax.Array, Leaf | Chosen]]:
    if kind.indexer is None:
        return functools.partial(attend, dtype=config.dtype)
    return functools.partial(indexer.attend, index, kind.indexer)


def _queries_from(
    params: Params, config: ModelConfig, kind: Latent, x_TD: jax.Array
) -> tuple[jax.Array, Weight]:
    if kind.query_rank is None:
        return x_TD, params["q"]
    down_TX = add_bias(linear(x_TD, params["q_down"]), params, "q_down_bias")
    down_TX = norm.rms_norm(down_TX, params["q_norm"], kind.norm_eps, config.norm_offset)
    return down_TX, params["q_up"]


def _latents(
    params: Params, config: ModelConfig, kind: Latent, x_TD: jax.Array, context: StepContext
) -> tuple[jax.Array, jax.Array]:
    """The one key of all heads [T, 1, C + R], and the latent vector that is its first part."""
    projected_TX = add_bias(linear(x_TD, params["kv_down"]), params, "kv_down_bias")
    latent_TC = norm.rms_norm(
        projected_TX[:, : kind.rank], params["kv_norm"], kind.norm_eps, config.norm_offset
    )
    latent_T1C = latent_TC[:, None].astype(config.dtype)
    rope_T1R = _rotated(projected_TX[:, None, kind.rank :], kind, context).astype(config.dtype)
    return jnp.concatenate([latent_T1C, rope_T1R], axis=-1), latent_T1C


def _rotated(x_TNR: jax.Array, kind: Latent, context: StepContext) -> jax.Array:
    if context.angles is None or kind.rope is None:
        return x_TNR
    return rotate(x_TNR, *context.angles, kind.rope.neighbours)


def _out_of(latent_TC: jax.Array, w: jax.Array, dims: str) -> jax.Array:
    exact = jax.lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    return jnp.einsum(
        dims, latent_TC.astype(w.dtype), w, precision=exact, preferred_element_type=jnp.float32
    )
