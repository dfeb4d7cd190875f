"""Softmax attention: MHA, GQA and MQA, with rotary positions or none, over pages or (without a
cache) over the rows themselves.
"""

import jax
import jax.numpy as jnp

from configs.cache import PageFormat
from configs.kinds.attention import Attention
from configs.model import ModelConfig
from layers import norm, page_rows, temperature
from layers.backends import backends
from layers.backends.backend import Append
from layers.kernels.attention import api, mask, reference
from layers.kernels.attention.contract import Implementation, Options, Stretch
from layers.kv_cache import Dense, Indexed, Paged
from layers.linear import add_bias, linear, project_out
from layers.params import Params
from layers.ragged import Ragged
from layers.registry import Leaf, StepContext
from layers.rope import rotate
from layers.sparse import quest
from sharding import collectives
from sharding.collectives import CONTEXT

_GATES = {"sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus}  # of heads


def apply(
    params: Params,
    config: ModelConfig,
    kind: Attention,
    x_TD: jax.Array,
    leaf: Leaf,
    context: StepContext,
) -> tuple[jax.Array, Leaf]:
    """One attention layer: float32 [T, D], and the leaf of `attend`."""
    T, N, V = x_TD.shape[0], kind.num_heads, kind.value_width or kind.head_width
    k_TKH = v_TKH = gate_TNH = None
    with jax.named_scope("qkv"):
        paged = None if leaf is None else leaf.as_paged
        append = backends.current().append(
            context.attention, (N, kind.num_kv_heads, kind.head_width), kind.qk_norm is not None
        )
        if append and paged is not None and _appends(config, kind, paged, context):
            q_TNH, leaf = _appended(append, params, config, kind, x_TD, paged, context)
        else:
            q_TNH, k_TKH, v_TKH, gate_TNH = _heads(params, config, kind, x_TD, context)
        q_TNH = temperature.scaled(q_TNH, kind.temperature, context.ragged.position_T)
    with jax.named_scope("attend"):
        out_TNH, leaf = attend(
            q_TNH, k_TKH, v_TKH, leaf, context, kind.score_cap, params.get("sinks"),
            kind.token_budget,
            config.dtype if gate_TNH is None and kind.head_gate is None else "float32",
        )  # fmt: skip
    if kind.value_width is not None:
        out_TNH = out_TNH[..., :V]
    if gate_TNH is not None:
        out_TNH *= jax.nn.sigmoid(gate_TNH)
    if kind.head_gate is not None:
        gate_TNX = linear(x_TD, params["gate"]).reshape(T, N, -1)  # of each element, or of the head
        out_TNH *= _GATES[kind.head_gate](gate_TNX)
    return project_out(out_TNH.reshape(T, N * V), params, config.dtype), leaf


def _heads(
    params: Params, config: ModelConfig, kind: Attention, x_TD: jax.Array, context: StepContext
) -> tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]:
    """Queries, scaled, keys and values for `attend`, of the model's type, and gates of what it
    returns, float32: [T, N, H] each, if the layer has them.
    """
    T, H = x_TD.shape[0], kind.head_width
    K, X = kind.num_kv_heads, kind.query_rows // H
    inputs = "qkv" if kind.has_values else "qk"
    k_TKH = v_TKH = gate_TNH = None
    if context.is_owner:
        projected_TX = add_bias(linear(x_TD, params[inputs]), params, f"{inputs}_bias")
        if kind.value_width is None:
            projected_TXH = projected_TX.reshape(T, -1, H)
            v_TKH = projected_TXH[:, X + K :] if kind.has_values else projected_TXH[:, X:]
        else:
            projected_TXH = projected_TX[:, : (X + K) * H].reshape(T, -1, H)
            v_TKH = projected_TX[:, (X + K) * H :].reshape(T, K, -1)
        q_TNH, k_TKH = projected_TXH[:, :X], projected_TXH[:, X : X + K]
        if kind.has_value_norm:
            v_TKH = norm.rms_norm(v_TKH, jnp.ones(v_TKH.shape[-1]), config.norm_eps)
        k_TKH = _rotated(k_TKH * kind.key_scale, params.get("k_norm"), config, kind, context)
        k_TKH = k_TKH.astype(config.dtype)
        v_TKH = _clipped(v_TKH, kind)
        if kind.value_scale != 1:
            v_TKH *= kind.value_scale
        v_TKH = v_TKH.astype(config.dtype)
        if kind.value_width is not None:
            v_TKH = jnp.pad(v_TKH, ((0, 0), (0, 0), (0, H - kind.value_width)))
    else:
        q_TNH = add_bias(linear(x_TD, params["q"]), params, "q_bias").reshape(T, X, H)
    if kind.has_output_gate:
        q_TNH, gate_TNH = q_TNH[:, ::2], q_TNH[:, 1::2]
    q_TNH = _rotated(q_TNH, params.get("q_norm"), config, kind, context) * _scale(kind)
    return q_TNH.astype(config.dtype), k_TKH, v_TKH, gate_TNH


def _appends(config: ModelConfig, kind: Attention, leaf: Paged, context: StepContext) -> bool:
    """Whether one kernel makes queries of what their product leaves, and writes keys and values."""
    return (
        context.is_owner
        and collectives.num_chips(CONTEXT) == 1  # another chip's tokens look like padding
        and not leaf.is_read_only
        and context.page_format is not None
        and context.page_format.dtype == config.dtype
        and kind.has_values
        and not (kind.has_value_norm or kind.has_output_gate)
        and kind.qk_norm in (None, "head")
        and kind.input_limit is None
        and kind.key_scale == kind.value_scale == 1
        and kind.value_width is None
        and not kind.rotates_first
        and not (kind.rope is not None and kind.rope.neighbours)
    )


def _appended(
    append: Append,
    params: Params,
    config: ModelConfig,
    kind: Attention,
    x_TD: jax.Array,
    leaf: Paged,
    context: StepContext,
) -> tuple[jax.Array, Paged]:
    """Queries for `attend`, and the leaf with keys and values in its pages."""
    angles = context.angles
    if angles is None:
        angles = (jnp.zeros((len(x_TD), 0)),) * 2
    norms = (params["q_norm"], params["k_norm"]) if kind.qk_norm else None
    q_TNH, pages = append(
        linear(x_TD, params["qkv"]), angles, norms,
        context.ragged.page_T(context.group, leaf.page_tokens), leaf.pages,
        shape=(kind.num_heads, kind.num_kv_heads, kind.head_width), dtype=config.dtype,
        scale=_scale(kind), eps=config.norm_eps, offset=config.norm_offset,
        bias_X=params.get("qkv_bias"),
    )  # fmt: skip
    return q_TNH, leaf.with_pages(pages)


def _scale(kind: Attention) -> float:
    return kind.head_width**-0.5 if kind.scale is None else kind.scale


def attend(
    q_TNH: jax.Array,
    k_TKH: jax.Array | None,
    v_TKH: jax.Array | None,
    leaf: Leaf,
    context: StepContext,
    score_cap: float | None = None,
    sinks_N: jax.Array | None = None,
    token_budget: int | None = None,
    dtype: str = "float32",
) -> tuple[jax.Array, Leaf]:
    """Writes this step's keys and values and attends over all: one call, which a kernel may fuse.
    Returns [T, N, H] of float32 or of `dtype`, which the caller rounds to, and the leaf with this
    step's keys and values. Raises ValueError if there are no keys.

    Args:
        q_TNH: scaled and rotated queries.
        k_TKH, v_TKH: keys and values of the packed tokens, or keys and the values in them; None
            where an earlier layer wrote them.
        leaf: pages as the chosen implementation lays them out. None, or an earlier layer's keys and
            values: rows attend among themselves.
        sinks_N: a learned logit a query head, as in `contract.Options`.
        token_budget: as `Attention.token_budget`, over pages; without a cache all is read.
    """
    ragged, spec = context.ragged, context.spec
    options = Options(
        spec.window, score_cap, sinks_N, context.deterministic, spec.chunked, spec.first_tokens,
        dtype,
    )  # fmt: skip
    paged = None if leaf is None else leaf.as_paged
    if paged is None:
        dense = leaf if k_TKH is None or v_TKH is None else Dense(k_TKH, v_TKH)
        if not isinstance(dense, Dense):
            raise ValueError("attention needs keys and values, its own or an earlier layer's")
        queries, keys, values = map(ragged.split, (q_TNH, dense.k_TKH, dense.v_TKH))
        rows = zip(queries, keys, values, ragged.rectangles, strict=True)
        return ragged.pack([reference.attend_dense(*row, options) for row in rows]), dense
    chosen, page_format = api.implementation(context.attention), context.page_format
    assert page_format is not None
    arguments, outs = (context.group, page_format, options), []
    is_divided, new_TX = collectives.num_chips(CONTEXT) > 1, None
    if k_TKH is not None and v_TKH is not None and not paged.is_read_only:
        row_TX = packed_row(k_TKH, v_TKH, page_format.values_in_keys)
        row_TX = page_rows.as_stored(row_TX, page_format)
        if chosen.append_and_attend is not None and not is_divided:
            pages = paged.pages
            parts = zip(ragged.split(q_TNH), ragged.split(row_TX), ragged.rectangles, strict=True)
            for q_YWNH, row_YWX, rectangle in parts:
                out_YWNH, pages = chosen.append_and_attend(
                    q_YWNH, row_YWX, pages, rectangle, *arguments
                )
                outs.append(out_YWNH)
            return ragged.pack(outs), paged.with_pages(pages)
        if is_divided and chosen.append_and_attend_part is not None:
            new_TX = row_TX
        else:
            paged = paged.with_pages(chosen.write(paged.pages, row_TX, ragged, context.group))
    if token_budget is not None:
        assert isinstance(paged, Indexed)
        paged = quest.summarized(paged, ragged, context.group, page_format)
        for q_YWNH, rectangle in zip(ragged.split(q_TNH), ragged.rectangles, strict=True):
            outs.append(quest.attend(chosen, q_YWNH, paged, rectangle, *arguments, token_budget))
        return ragged.pack(outs), paged
    if is_divided:
        out_TNH, pages = _attend_divided(chosen, q_TNH, new_TX, paged.pages, ragged, *arguments)
        return out_TNH, paged if new_TX is None else paged.with_pages(pages)
    for q_YWNH, rectangle in zip(ragged.split(q_TNH), ragged.rectangles, strict=True):
        out_YWNH, paged = paged.attend(chosen.attend_pages, q_YWNH, rectangle, *arguments)
        outs.append(out_YWNH)
    return ragged.pack(outs), paged


def _attend_divided(
    chosen: Implementation,
    q_TNH: jax.Array,
    new_TX: jax.Array | None,
    pages: jax.Array,
    ragged: Ragged,
    group: int,
    page_format: PageFormat,
    options: Options,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the tokens of all chips along `context`, [T, N, H] of `options.dtype`, where
    each attends over its own: they exchange a log-sum-exp a head, and sum their weighted results
    in the queries' precision, of bfloat16 half the bytes. Sinks count once, behind the exchange.
    And the pages, with a chip's own of new rows, where there are some.
    """
    chips, chip = collectives.num_chips(CONTEXT), collectives.chip(CONTEXT)
    first_tokens = -(-options.first_tokens // chips)
    local = options._replace(sinks_N=None, first_tokens=first_tokens, dtype="float32")
    outs, totals = [], []
    new = [None] * len(ragged.rectangles) if new_TX is None else ragged.split(new_TX)
    for q_YWNH, row_YWX, rectangle in zip(ragged.split(q_TNH), new, ragged.rectangles, strict=True):
        bounds = mask.on_chip(reference.bounds(rectangle, options), chip, chips)
        stretch = Stretch(pages, rectangle.tables[group], bounds)
        part = stretch, rectangle.valid_YW, page_format, local
        if row_YWX is None:
            assert chosen.attend_part is not None
            out_YWNH, total_YWN = chosen.attend_part(q_YWNH, *part)
        else:
            assert chosen.append_and_attend_part is not None
            out_YWNH, total_YWN, pages = chosen.append_and_attend_part(
                q_YWNH, row_YWX, rectangle.kv_position_YW, (chip, chips), *part
            )
        outs.append(out_YWNH)
        totals.append(total_YWN)
    total_TN = ragged.pack(totals)
    total_CTN = collectives.gather(total_TN, CONTEXT)
    if options.sinks_N is not None:
        sinks_1TN = jnp.broadcast_to(options.sinks_N, (1, *total_TN.shape))
        total_CTN = jnp.concatenate([total_CTN, sinks_1TN])
    share_TN1 = jax.nn.softmax(total_CTN, axis=0)[chip][..., None]
    weighted_TNH = (ragged.pack(outs) * share_TN1).astype(q_TNH.dtype)
    return collectives.total(weighted_TNH, CONTEXT).astype(options.dtype), pages


def _rotated(
    x_TNH: jax.Array,
    weight: jax.Array | None,
    config: ModelConfig,
    kind: Attention,
    context: StepContext,
) -> jax.Array:
    """Heads after norm (of each, or of all at once), limit and RoPE, if any; with `rotates_first`
    after RoPE, norm and limit: float32 [T, N, H].
    """
    angles = None if kind.rope is None else context.angles
    neighbours = kind.rope is not None and kind.rope.neighbours
    if kind.rotates_first and angles is not None:
        x_TNH = rotate(x_TNH, *angles, neighbours)
    if kind.qk_norm == "plain":
        x_TNH = norm.rms_norm(x_TNH, jnp.ones(kind.head_width), config.norm_eps)
    elif weight is not None and kind.qk_norm == "each":
        H = kind.head_width
        unweighted_TNH = norm.layer_norm(x_TNH, jnp.ones(H), jnp.zeros(H), config.norm_eps)
        x_TNH = unweighted_TNH * weight.astype(jnp.float32).reshape(-1, H)
    elif weight is not None:
        parts_TXX = x_TNH.reshape(x_TNH.shape[0], -1, weight.shape[0])
        is_divided = kind.qk_norm == "all"
        x_TNH = norm.apply(parts_TXX, weight, config, is_divided).reshape(x_TNH.shape)
    x_TNH = _clipped(x_TNH, kind)
    if kind.rotates_first or angles is None:
        return x_TNH
    return rotate(x_TNH, *angles, neighbours)


def _clipped(x_TNH: jax.Array, kind: Attention) -> jax.Array:
    if kind.input_limit is None:
        return x_TNH
    return jnp.clip(x_TNH, -kind.input_limit, kind.input_limit)


def packed_row(k_TKH: jax.Array, v_TKH: jax.Array, is_inside: bool) -> jax.Array:
    """Keys and values for the pages, [T, 2 K, H], where a non-finite value becomes 0, and NaN in
    its key; or keys alone, whose first elements are the values, with NaN in the others.

    The softmax replaces a masked score, but multiplies a masked value by 0: a NaN left in a freed
    page would reach its next owner through values, never through keys. Queries that see the key get
    the NaN.
    """
    is_finite_TKH = jnp.isfinite(v_TKH)
    if is_inside:
        is_finite_TK1 = is_finite_TKH.all(-1, keepdims=True)
        tail_TKX = jnp.where(is_finite_TK1, k_TKH[..., v_TKH.shape[-1] :], jnp.nan)
        return jnp.concatenate([jnp.where(is_finite_TKH, v_TKH, 0), tail_TKX], axis=-1)
    k_TKH, v_TKH = jnp.where(is_finite_TKH, k_TKH, jnp.nan), jnp.where(is_finite_TKH, v_TKH, 0)
    return jnp.concatenate([k_TKH, v_TKH], axis=1)
