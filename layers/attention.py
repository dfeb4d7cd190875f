"""Softmax attention: MHA, GQA and MQA, with rotary positions, over pages or (without a cache) over
the rows themselves.
"""

from typing import Any

import jax
import jax.numpy as jnp

from configs.model import LayerSpec, ModelConfig
from layers import kv_cache
from layers.kernels import reference
from layers.linear import linear
from layers.mixer import StepContext
from layers.norm import rms_norm
from layers.params import ParamInfo, Params
from layers.rope import rotate


def infos(config: ModelConfig, layer: LayerSpec) -> dict[str, Any]:
    """Fused projections [(N + 2K) H, D] in the order q, k, v; the way out [D, N H]."""
    del layer
    heads, width = config.num_heads + 2 * config.num_kv_heads, config.head_width
    declared = {
        "qkv": ParamInfo((heads * width, config.width), config.dtype, ("heads", "embed")),
        "out": ParamInfo(
            (config.width, config.num_heads * width), config.dtype, ("embed", "heads")
        ),
    }
    if config.qk_norm:
        declared["q_norm"] = ParamInfo((width,), config.dtype, (None,), "ones")
        declared["k_norm"] = ParamInfo((width,), config.dtype, (None,), "ones")
    return declared


def apply(
    params: Params,
    config: ModelConfig,
    layer: LayerSpec,
    x_TD: jax.Array,
    pages: jax.Array | None,
    context: StepContext,
) -> tuple[jax.Array, jax.Array | None]:
    """One attention layer: float32 [T, D], and the pages with this step's keys and values."""
    T, H = x_TD.shape[0], config.head_width
    N, K = config.num_heads, config.num_kv_heads
    with jax.named_scope("qkv"):
        qkv_TXH = linear(x_TD, params["qkv"]).reshape(T, N + 2 * K, H)
    q_TNH, k_TKH, v_TKH = jnp.split(qkv_TXH, (N, N + K), axis=1)
    if config.qk_norm:
        q_TNH = rms_norm(q_TNH, params["q_norm"], config.norm_eps, config.norm_offset)
        k_TKH = rms_norm(k_TKH, params["k_norm"], config.norm_eps, config.norm_offset)
    cos_TH, sin_TH = context.angles
    scale = H**-0.5 if config.attention_scale is None else config.attention_scale
    q_TNH = (rotate(q_TNH, cos_TH, sin_TH) * scale).astype(config.dtype)
    k_TKH = rotate(k_TKH, cos_TH, sin_TH).astype(config.dtype)
    v_TKH = v_TKH.astype(config.dtype)
    with jax.named_scope("attend"):
        out_TNH, pages = attend(q_TNH, k_TKH, v_TKH, pages, context, window=layer.window)
    with jax.named_scope("out"):
        return linear(out_TNH.reshape(T, N * H).astype(config.dtype), params["out"]), pages


def attend(
    q_TNH: jax.Array,
    k_TKH: jax.Array | None,
    v_TKH: jax.Array | None,
    pages: jax.Array | None,
    context: StepContext,
    window: int | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Writes this step's keys and values and attends over all: one call, so that a kernel may fuse
    them.

    Args:
        q_TNH: scaled and rotated queries.
        k_TKH, v_TKH: keys and values of the packed tokens; None where an earlier layer wrote them.
        pages: [pages, page tokens, 2 K H], or None: rows attend among themselves.
        context: rectangles and page tables of the step.
        window: tokens a query sees, itself included; None sees all.
        implementation: 'reference', or None for the best that can run here.

    Returns:
        Float32 [T, N, H] and the updated pages.

    Raises:
        ValueError: the named implementation does not exist.
    """
    if implementation not in (None, "reference"):
        raise ValueError(f"attention implementation is 'reference' or None, not {implementation!r}")
    ragged = context.ragged
    if pages is None:
        assert k_TKH is not None and v_TKH is not None
        rows = zip(*map(ragged.split, (q_TNH, k_TKH, v_TKH)), ragged.rectangles, strict=True)
        outs = [reference.attend_dense(q, k, v, r.position_CW, window) for q, k, v, r in rows]
        return _pack(outs), None
    if k_TKH is not None and v_TKH is not None:
        pages = kv_cache.write(pages, _poison_keys(k_TKH, v_TKH), ragged, context.group)
    outs = [
        reference.attend_pages(
            q_CWNH, pages, rectangle.tables[context.group], rectangle.position_CW, window,
            context.deterministic,
        )
        for q_CWNH, rectangle in zip(ragged.split(q_TNH), ragged.rectangles, strict=True)
    ]  # fmt: skip
    return _pack(outs), pages


def _pack(outs: list[jax.Array]) -> jax.Array:
    return jnp.concatenate([out_CWNH.reshape(-1, *out_CWNH.shape[2:]) for out_CWNH in outs])


def _poison_keys(k_TKH: jax.Array, v_TKH: jax.Array) -> jax.Array:
    """Rows for the pages, [T, 2 K H], where a non-finite value becomes 0 beside a NaN key.

    A masked key is replaced before the softmax, a masked value is only multiplied by 0: so a NaN
        left in a freed page
    would reach its next owner through the values, never through the keys. Whoever may see the key
    still gets the NaN.
    """
    finite_TK1 = jnp.isfinite(v_TKH).all(-1, keepdims=True)
    kv_T2KH = jnp.stack([jnp.where(finite_TK1, k_TKH, jnp.nan), jnp.where(finite_TK1, v_TKH, 0)], 1)
    return kv_T2KH.reshape(k_TKH.shape[0], -1)
