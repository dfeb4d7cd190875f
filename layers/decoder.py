"""The decoder: one function composes every model from its `ModelConfig`, to train, score and serve
it.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from configs.model import LayerSpec, ModelConfig
from layers import attention, ffn, rope
from layers.linear import linear
from layers.mixer import Mixer, StepContext
from layers.norm import rms_norm
from layers.params import ParamInfo, Params
from layers.ragged import Ragged

MIXERS: Mapping[str, Mixer] = {"attention": Mixer(attention.infos, attention.apply)}


def param_infos(config: ModelConfig, mixers: Mapping[str, Mixer] = MIXERS) -> Any:
    """Declaration of every parameter of the model."""
    table = ParamInfo((config.vocab_size, config.width), config.dtype, ("vocab", "embed"))
    norm = ParamInfo(
        (config.width,), config.dtype, ("embed",), "zeros" if config.norm_offset else "ones"
    )

    def block(layer_index: int) -> dict[str, Any]:
        layer = config.layers[layer_index]
        declared = {
            "mixer_norm": norm,
            "mixer": mixers[layer.mixer].infos(config, layer),
            "ffn_norm": norm,
            "ffn": ffn.infos(config),
        }
        if config.post_norms:
            declared |= {"mixer_post_norm": norm, "ffn_post_norm": norm}
        return declared

    declared = {
        "embed": {"table": table},
        "layers": tuple(block(i) for i in range(config.num_layers)),
        "final_norm": norm,
    }
    return declared if config.tied else declared | {"head": {"table": table}}


def forward(
    params: Params,
    config: ModelConfig,
    tokens_T: jax.Array,
    ragged: Ragged,
    cache: Any = None,
    *,
    deterministic: bool = False,
    mixers: Mapping[str, Mixer] = MIXERS,
) -> tuple[jax.Array, Any]:
    """Runs packed tokens through the model.

    Args:
        params: values in the structure of `param_infos`.
        config: the model.
        tokens_T: i32[T] token ids.
        ragged: which token belongs where.
        cache: leaves of `kv_cache.abstract`, or None: the rows of a rectangle see only each other.
        deterministic: a token's bits depend on its own history only.
        mixers: implementations of the mixers that the layers name.

    Returns:
        Normalized hidden states, float32 [T, D], and the updated cache.
    """
    position_T = ragged.position_T
    angles = {
        layer.rope: rope.angles(layer.rope, config.head_width, position_T)
        for layer in config.pattern
    }
    leaves = [None] * config.num_layers if cache is None else list(cache)
    with jax.named_scope("embed"):
        x_TD = embed(params["embed"]["table"], tokens_T) * config.embedding_scale
    for index, (weights, layer) in enumerate(zip(params["layers"], config.layers, strict=True)):
        owner = config.cache_specs[index].owner
        home = index if owner is None else owner
        with jax.named_scope(f"layer_{index}"):
            x_TD, leaves[home] = _block(
                weights, x_TD, leaves[home], ragged, angles[layer.rope], config=config, layer=layer,
                mixer=mixers[layer.mixer], group=config.group_of_layer.get(home, 0),
                is_owner=owner is None, deterministic=deterministic,
            )  # fmt: skip
    hidden_TD = _norm(x_TD, params["final_norm"], config)
    return hidden_TD, None if cache is None else tuple(leaves)


@functools.partial(  # traced once for all layers of a kind: tracing is most of a warm start
    jax.jit,
    static_argnames=("config", "layer", "mixer", "group", "is_owner", "deterministic"),
)
def _block(
    weights: Params,
    x_TD: jax.Array,
    leaf: jax.Array | None,
    ragged: Ragged,
    angles: tuple[jax.Array, jax.Array],
    *,
    config: ModelConfig,
    layer: LayerSpec,
    mixer: Mixer,
    group: int,
    is_owner: bool,
    deterministic: bool,
) -> tuple[jax.Array, jax.Array | None]:
    """One layer around the residual stream: mixer, then feed-forward."""
    context = StepContext(ragged, angles, group, is_owner, deterministic)
    hidden_TD = _norm(x_TD, weights["mixer_norm"], config)
    out_TD, leaf = mixer.apply(weights["mixer"], config, layer, hidden_TD, leaf, context)
    if config.post_norms:
        out_TD = _norm(out_TD, weights["mixer_post_norm"], config)
    x_TD = x_TD + out_TD
    with jax.named_scope("ffn"):
        hidden_TD = _norm(x_TD, weights["ffn_norm"], config)
        out_TD = ffn.gated(weights["ffn"], config, hidden_TD)
    if config.post_norms:
        out_TD = _norm(out_TD, weights["ffn_post_norm"], config)
    return x_TD + out_TD, leaf


def logits(params: Params, config: ModelConfig, hidden_QD: jax.Array) -> jax.Array:
    """Head over packed rows: float32 [Q, V]."""
    with jax.named_scope("head"):
        return linear(hidden_QD, (params["embed"] if config.tied else params["head"])["table"])


def embed(table_VD: jax.Array, tokens_T: jax.Array) -> jax.Array:
    """Rows of the embedding, float32 [T, D]; read as bits, since XLA's CPU backend converts a
    gathered bfloat16 table whole.
    """
    if table_VD.dtype != jnp.bfloat16:
        return table_VD[tokens_T].astype(jnp.float32)
    bits_TD = jax.lax.bitcast_convert_type(table_VD, jnp.uint16)[tokens_T]
    return jax.lax.bitcast_convert_type(bits_TD, jnp.bfloat16).astype(jnp.float32)


def _norm(x_TD: jax.Array, weight: jax.Array, config: ModelConfig) -> jax.Array:
    return rms_norm(x_TD, weight, config.norm_eps, config.norm_offset)
