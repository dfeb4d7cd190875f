"""The decoder: one function composes every model from its `ModelConfig`, to train, score and serve
it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from configs.cache import CacheSpec
from configs.kinds.attention import Attention
from configs.kinds.combined import NoMixer, Parallel
from configs.kinds.compressed import Compressed
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.latent import Latent
from configs.kinds.params import Declared
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.recurrent.linear_attention import LinearAttention
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.s4 import S4
from configs.kinds.recurrent.selective import Mamba
from configs.kinds.recurrent.short_conv import ShortConv
from configs.model import LayerSpec, ModelConfig
from layers import hyper_connections, norm, registry, rope
from layers.backends import backends
from layers.feed_forwards import dense, experts, layer_inputs
from layers.hyper_connections import Connections
from layers.kv_cache import Cache
from layers.linear import add_bias, linear, look_up, soft_cap
from layers.mixers import attention as attend
from layers.mixers import (
    combined,
    compressed,
    delta_net,
    latent,
    linear_attention,
    mamba,
    s4,
    short_conv,
)
from layers.params import Params
from layers.ragged import Ragged
from layers.recurrence.sums import rounded
from layers.registry import Chosen, Leaf, RoutedTokens, StepContext
from layers.weights import Weight
from sharding import collectives

registry.register(Attention, attend.apply)
registry.register(Latent, latent.apply)
registry.register(Compressed, compressed.apply)
registry.register(DeltaNet, delta_net.apply)
registry.register(Mamba, mamba.apply_mamba)
registry.register(Mamba2, mamba.apply_mamba2)
registry.register(Parallel, combined.apply_parallel)
registry.register(NoMixer, combined.apply_none)
registry.register(LinearAttention, linear_attention.apply)
registry.register(S4, s4.apply)
registry.register(ShortConv, short_conv.apply)
registry.register(Gated, dense.gated)
registry.register(Plain, dense.plain)
registry.register(Experts, experts.apply)


class LayersOutput(NamedTuple):
    """Results of `layers`: normalized hidden states and the residual streams of `features`, float32
    [T, D], the cache, and the tokens routed to the experts of each mixture, [L, E], if any.
    """

    hidden_TD: jax.Array
    streams: tuple[jax.Array, ...]
    cache: Any
    routed: RoutedTokens | None


class Stream(NamedTuple):
    """The residual stream, float32 [T, D], and what the layer before adds to it, where the back end
    adds that in a norm (`Backend.norm_of_sum`).
    """

    x_TD: jax.Array
    addend_TD: jax.Array | None = None

    @property
    def sum_TD(self) -> jax.Array:
        return self.x_TD if self.addend_TD is None else self.x_TD + self.addend_TD


def param_infos(config: ModelConfig) -> Declared:
    """Declares every parameter; raises InputError if nothing applies one of the layer kinds yet."""
    for layer in config.pattern:
        for mixer in (layer.mixer, *layer.mixer.parts):
            registry.apply_mixer(mixer)
        if layer.ffn is not None:
            registry.apply_feed_forward(layer.ffn)
    return config.parameters()


def forward(
    params: Params,
    config: ModelConfig,
    tokens_T: jax.Array,
    ragged: Ragged,
    cache: Cache | None = None,
    *,
    deterministic: bool = False,
    attention: str = "reference",
) -> tuple[jax.Array, Any]:
    """Runs packed tokens through the model: normalized hidden states, float32 [T, D], and the
    updated cache.

    Args:
        tokens_T: i32[T] token ids.
        cache: leaves of `kv_cache.abstract`, or None: the rows of a rectangle see only each other.
        deterministic: a token's bits depend on its own history only.
        attention: the implementation that the cache is laid out for (`api.choose`).
    """
    x_TD = embedded(params, config, tokens_T, ragged)
    output = layers(
        params, config, x_TD, ragged, cache, tokens_T=tokens_T, deterministic=deterministic,
        attention=attention,
    )  # fmt: skip
    return output.hidden_TD, output.cache


def embedded(params: Params, config: ModelConfig, tokens_T: jax.Array, ragged: Ragged) -> jax.Array:
    """Tokens as the first layer reads them, float32 [T, D]; arguments as `forward`'s."""
    with jax.named_scope("embed"):
        x_TD = _embed_here(params["embed"]["table"], tokens_T, config) * config.embedding_scale
        if config.learned_positions:
            x_TD += look_up(params["positions"]["table"], ragged.position_T)
        if backends.current().skips_zero_rows:
            x_TD = jnp.where(ragged.valid_T[:, None], rounded(x_TD), 0)
    return x_TD


def layers(
    params: Params,
    config: ModelConfig,
    x_TD: jax.Array,
    ragged: Ragged,
    cache: Cache | None = None,
    *,
    tokens_T: jax.Array | None = None,
    mixed_TX: jax.Array | None = None,
    features: tuple[int, ...] = (),
    deterministic: bool = False,
    attention: str = "reference",
) -> LayersOutput:
    """Runs what `embedded` returns through the layers and the last norm; else as `forward`.

    Args:
        tokens_T: i32[T] token ids, which `ModelConfig.layer_inputs` and routers by token id read.
        mixed_TX: what the first layer's mixer reads in place of the normalized stream.
        features: numbers of layers, from 1 on, behind which the residual stream is returned too.
    """
    angles = {
        turns: turns and rope.angles(*turns, ragged.position_T, config.max_context)
        for turns in {layer.mixer.rotation: None for layer in config.pattern}
    }
    inputs_LTP = inputs_of_layers(params, config, tokens_T, x_TD)
    leaves: list[Leaf] = [None] * config.num_layers if cache is None else list(cache)
    stream, streams, routed = Stream(x_TD), {}, []
    choices: dict[int, tuple[Any, ...]] = {}
    ids_T = tokens_T if config.reads_tokens else None
    for index, (weights, layer) in enumerate(zip(params["layers"], config.layers, strict=True)):
        owner = config.cache_specs[index].owner
        home = index if owner is None else owner
        leaf: Leaf | Chosen = leaves[home]
        if layer.mixer.choice_owner is not None:
            leaf = Chosen(leaves[home], choices[layer.mixer.choice_owner])
        with jax.named_scope(f"layer_{index}"):
            stream, leaf, layer_routed = _block_once(
                weights, stream, leaf, ragged, angles[layer.mixer.rotation],
                None if inputs_LTP is None else inputs_LTP[index],
                None if index else mixed_TX, ids_T, config=config, layer=layer,
                spec=config.cache_specs[home], groups=config.groups_of_layer.get(home, (0,)),
                is_owner=owner is None, is_choice_owner=index in config.choice_owners,
                deterministic=deterministic, attention=attention,
            )  # fmt: skip
        if isinstance(leaf, Chosen):
            leaf, choices[index] = leaf
        leaves[home] = leaf
        if index + 1 in features:
            streams[index + 1] = stream.sum_TD
        routed += [] if layer_routed is None else [layer_routed]
    if config.hyper_connections is not None:
        kind = config.hyper_connections
        stream = Stream(hyper_connections.closed(params["hyper"], config, kind, stream.sum_TD))
    return LayersOutput(
        norm.of_sum(*stream, params.get("final_norm"), config)[0],
        tuple(streams[number] for number in features),
        None if cache is None else tuple(leaves),
        jax.tree.map(_side_by_side, *routed) if routed else None,
    )


def layer(
    weights: Params,
    config: ModelConfig,
    index: int,
    x_TD: jax.Array,
    ragged: Ragged,
    leaf: Leaf | Chosen = None,
    input_TP: jax.Array | None = None,
) -> tuple[jax.Array, Leaf | Chosen]:
    """Runs one layer without pages, for a caller that goes layer by layer: the residual stream
    behind it, and the leaf for sharers. Its products are traced in the caller's own trace, so that
    `layers.kernels.linear.observed` leaves may note their inputs.

    Args:
        x_TD: the residual stream, float32 [T, D], or streams as the layer before left them.
        leaf: that of the layer whose cache, or choice, this one shares; None where it shares none.
        input_TP: the layer's input of each token (`inputs_of_layers`).
    """
    kinds, owner = config.layers[index], config.cache_specs[index].owner
    if isinstance(leaf, Chosen):
        leaf = Chosen(None, leaf.choices)
    turns = kinds.mixer.rotation
    stream, leaf, _ = _block(
        weights, Stream(x_TD), leaf, ragged,
        turns and rope.angles(*turns, ragged.position_T, config.max_context), input_TP, None, None,
        config=config, layer=kinds, spec=config.cache_specs[index if owner is None else owner],
        groups=(0,), is_owner=owner is None, is_choice_owner=index in config.choice_owners,
        deterministic=False, attention="reference",
    )  # fmt: skip
    return stream.sum_TD, leaf


def _side_by_side(*counts_E: jax.Array) -> jax.Array:
    """[L, E] of an [E] a mixture, zeros where one has fewer experts."""
    num_experts = max(map(len, counts_E))
    return jnp.stack(
        [jnp.pad(mixture_E, (0, num_experts - len(mixture_E))) for mixture_E in counts_E]
    )


def _block(
    weights: Params,
    stream: Stream,
    leaf: Leaf | Chosen,
    ragged: Ragged,
    angles: tuple[jax.Array, jax.Array] | None,
    input_TP: jax.Array | None,
    mixed_TX: jax.Array | None,
    tokens_T: jax.Array | None,
    *,
    config: ModelConfig,
    layer: LayerSpec,
    spec: CacheSpec,
    groups: tuple[int, ...],
    is_owner: bool,
    is_choice_owner: bool,
    deterministic: bool,
    attention: str,
) -> tuple[Stream, Leaf | Chosen, RoutedTokens | None]:
    """One layer around the residual stream: mixer, then feed-forward, which reads what the mixer
    added to, or what the mixer read (`LayerSpec.parallel_norms`); with its routed tokens.
    """
    page_format = spec.page_format(config.cache_dtype)
    ragged = ragged if spec.window is None else ragged.undropped
    context = StepContext(
        ragged, angles, spec, groups[0], is_owner, deterministic, attention, page_format,
        groups[-1], is_choice_owner, tokens_T,
    )  # fmt: skip
    is_before, is_behind = config.norms_of(layer)
    has_norm = is_before and mixed_TX is None
    x_TD, hidden_TD, connections = _read(weights, config, layer, "mixer", stream, has_norm)
    if mixed_TX is not None:
        hidden_TD = mixed_TX
    mix = registry.apply_mixer(layer.mixer)
    out_TD, leaf = mix(weights["mixer"], config, layer.mixer, hidden_TD, leaf, context)
    if is_behind:
        out_TD = norm.apply(out_TD, weights.get("mixer_post_norm"), config)
    to_mixer, to_ffn = layer.factors or (None, None)
    entering_TD, routed = x_TD, None
    stream = _added(config, x_TD, hidden_TD, out_TD, to_mixer, connections)
    if layer.ffn is not None:
        with jax.named_scope("ffn"):
            if layer.parallel_norms:
                x_TD = stream.sum_TD
            if layer.parallel_norms == 2:
                _, hidden_TD, connections = _read(
                    weights, config, layer, "ffn", Stream(entering_TD), is_before
                )
            elif not layer.parallel_norms:
                x_TD, hidden_TD, connections = _read(
                    weights, config, layer, "ffn", stream, is_before
                )
            feed = registry.apply_feed_forward(layer.ffn)
            out_TD, routed = feed(weights["ffn"], config, layer.ffn, hidden_TD, context)
        if is_behind:
            out_TD = norm.apply(out_TD, weights.get("ffn_post_norm"), config)
        stream = _added(config, x_TD, hidden_TD, out_TD, to_ffn, connections)
    if input_TP is not None:
        assert config.layer_inputs is not None
        with jax.named_scope("inputs"):
            x_TD, input_params = stream.sum_TD, weights["inputs"]
            added_TD = layer_inputs.apply(input_params, config, config.layer_inputs, x_TD, input_TP)
            stream = Stream(x_TD, added_TD)
    if config.has_layer_scales:
        stream = Stream(stream.sum_TD * weights["scale"].astype(jnp.float32))
    if backends.current().norm_of_sum(config.width) is None:
        stream = Stream(stream.sum_TD)  # as the first layer's, for which the layer is traced
    return stream, leaf, routed


_block_once = jax.jit(  # traced once for all layers of a kind: tracing is most of a warm start
    _block,
    static_argnames=(
        "config",
        "layer",
        "spec",
        "groups",
        "is_owner",
        "is_choice_owner",
        "deterministic",
        "attention",
    ),
)


def _read(
    weights: Params,
    config: ModelConfig,
    layer: LayerSpec,
    part: str,
    stream: Stream,
    has_norm: bool,
) -> tuple[jax.Array, jax.Array, Connections | None]:
    """What is in front of a part of a layer ("mixer" or "ffn"): the residual stream, or streams;
    what the part reads, [T, D], float32 or where it is normed the type that products read; and how
    its output goes to several streams.
    """
    kind = layer.mixer if part == "mixer" else layer.ffn
    assert kind is not None
    streams_TX = connections = None
    if config.hyper_connections is not None:
        streams_TX, hyper = stream.sum_TD, config.hyper_connections
        x_TMD = hyper_connections.opened(streams_TX, hyper)
        x_TD, connections = hyper_connections.read(weights[f"{part}_hyper"], config, hyper, x_TMD)
        stream = Stream(x_TD)
    if has_norm and not kind.norms_input:
        readers = (layer.mixer, layer.ffn) if layer.parallel_norms == 1 else (kind,)
        reads_float32 = layer.factors or any(reader and reader.reads_float32 for reader in readers)
        dtype = "float32" if reads_float32 else config.dtype
        hidden_TD, x_TD = norm.of_sum(*stream, weights.get(f"{part}_norm"), config, dtype)
    else:
        hidden_TD = x_TD = stream.sum_TD
    return x_TD if streams_TX is None else streams_TX, hidden_TD, connections


def _added(
    config: ModelConfig,
    x_TD: jax.Array,
    normed_TD: jax.Array,
    out_TD: jax.Array,
    factors: tuple[float, float] | None,
    connections: Connections | None,
) -> Stream:
    """The residual stream, or streams, behind a part of a layer; see `LayerSpec.factors`."""
    if config.residual_scale != 1:
        out_TD = rounded(out_TD * config.residual_scale)
    if connections is not None:
        assert config.hyper_connections is not None
        x_TMD = hyper_connections.opened(x_TD, config.hyper_connections)
        return Stream(hyper_connections.added(x_TMD, out_TD, connections))
    if factors is None:
        return Stream(x_TD, out_TD)
    return Stream(rounded(factors[0] * normed_TD) + rounded(factors[1] * out_TD))


def logits(params: Params, config: ModelConfig, hidden_QD: jax.Array) -> jax.Array:
    """Head over packed rows: float32 [Q, V], on a mesh the chip's part of it."""
    with jax.named_scope("head"):
        head = params["head"] if "table" in params.get("head", ()) else params["embed"]
        logits_QV = linear(hidden_QD, head["table"])
        if config.has_head_bias:
            logits_QV = add_bias(logits_QV, params["head"], "table_bias")
        logits_QV *= config.logit_scale
        return soft_cap(logits_QV, config.logit_cap)


def inputs_of_layers(
    params: Params, config: ModelConfig, tokens_T: jax.Array | None, x_TD: jax.Array
) -> jax.Array | None:
    """Each layer's input of its tokens, float32 [L, T, P], where the model has such inputs."""
    if config.layer_inputs is None:
        return None
    assert tokens_T is not None, "inputs of layers are looked up by tokens"
    with jax.named_scope("inputs"):
        rows_TX = _embed_here(params["inputs"]["table"], tokens_T, config)
        return layer_inputs.of_tokens(params["inputs"], config, config.layer_inputs, rows_TX, x_TD)


def _embed_here(table_VD: Weight, tokens_T: jax.Array, config: ModelConfig) -> jax.Array:
    """`embed`, where each chip of a mesh holds a part of the rows."""
    if collectives.num_chips() == 1:
        return look_up(table_VD, tokens_T)
    local_T = tokens_T - collectives.chip() * config.vocab_size
    is_own_T1 = ((local_T >= 0) & (local_T < config.vocab_size))[:, None]
    rows_TD = look_up(table_VD, jnp.clip(local_T, 0, config.vocab_size - 1))
    return collectives.total(jnp.where(is_own_T1, rows_TD, 0))
