"""Who can compute a case of attention: our implementations, and peers beside them.

Peers are libraries that may be there or not. Those without pages get contiguous keys and values of
the same numbers.
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from configs.engine import ATTENTIONS
from inference.benchmark.attention_case import Arrays, Case
from layers.kernels.attention import api
from layers.kernels.device import Device
from layers.ragged import Ragged

Sizes = Mapping[str, int]  # keyword arguments of a kernel that change nothing but its time
_FLASH = "flash_attn3_jax"


class Contender(NamedTuple):
    """Somebody who computes attention.

    Attributes:
        name: as results call it.
        limit: (case, device) -> what keeps it from that, to be read after its name; None: nothing.
        store: keys and values as it wants them, made of the arrays.
        attend: (queries, arrays, stored, **sizes) -> [C, W, N, H].
        candidates: (case, device) -> sizes to choose from, the first without tuning.
        has_lengths: rows may have different ones.
    """

    name: str
    limit: Callable[[Case, Device], str | None]
    store: Callable[[Case, Arrays], Any]
    attend: Callable[..., jax.Array]
    candidates: Callable[[Case, Device], Sequence[Sizes]] = lambda case, device: ({},)
    has_lengths: bool = True


def everyone() -> list[Contender]:
    """Ours, and then peers."""
    return [*map(_ours, ATTENTIONS), _CUDNN, _FLASH_ATTENTION]


# --- ours -----------------------------------------------------------------------------------------


def _ours(name: str) -> Contender:
    def limit(case: Case, device: Device) -> str | None:
        return api.implementation(name).limit(case.demand, device)

    def store(case: Case, arrays: Arrays) -> jax.Array:
        return _written(name, case, arrays)

    def attend(q_CWNH: jax.Array, arrays: Arrays, pages: jax.Array, **sizes: int) -> jax.Array:
        chosen: Any = api.implementation(name)
        return chosen.attend_pages(q_CWNH, pages, arrays.rectangle, 0, **sizes)

    candidates = _splits if name == "pallas_gpu" else Contender._field_defaults["candidates"]
    return Contender(name, limit, store, attend, candidates)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _written(name: str, case: Case, arrays: Arrays) -> jax.Array:
    """Pages that an implementation has written."""
    chosen = api.implementation(name)
    shape = chosen.layout(
        1 + case.rows * case.columns, case.page_tokens, case.kv_heads, case.head_width, case.dtype
    )
    pages = jnp.zeros(shape.shape, shape.dtype)
    k_TKH, v_TKH = (
        x_CSKH.reshape(-1, *x_CSKH.shape[2:]) for x_CSKH in (arrays.k_CSKH, arrays.v_CSKH)
    )
    return chosen.write(pages, k_TKH, v_TKH, Ragged((arrays.contexts,)), 0)


def _splits(case: Case, device: Device) -> Sequence[Sizes]:
    """Blocks that share a row's pages: what the kernel chooses by itself, which fills the device,
    and others around that.
    """
    if not case.is_decode:
        return ({},)
    full = max(1, device.num_cores // (case.rows * case.kv_heads))
    around = {1, full // 2, 2 * full, 4 * full} - {full}
    return ({}, *({"num_splits": n} for n in sorted(around) if 1 <= n <= case.columns))


# --- peers ----------------------------------------------------------------------------------------


def _cudnn_limit(case: Case, device: Device) -> str | None:
    if device.platform != "gpu":
        return "is a library for NVIDIA's GPUs"
    if case.dtype not in ("bfloat16", "float16"):
        return f"computes in bfloat16 and float16, not {case.dtype}"
    if not case.is_decode and case.queries != case.context:
        return "has no causal mask for rows that continue a prefix"
    return None


def _cudnn(q_CWNH: jax.Array, arrays: Arrays, stored: Any) -> jax.Array:
    is_prefill = q_CWNH.shape[1] > 1
    return jax.nn.dot_product_attention(
        q_CWNH, *stored, scale=1.0, is_causal=is_prefill, implementation="cudnn",
        key_value_seq_lengths=None if is_prefill else arrays.length_C,
    )  # fmt: skip


_CUDNN = Contender(
    "cudnn",
    _cudnn_limit,
    lambda case, arrays: (arrays.k_CSKH, arrays.v_CSKH),
    _cudnn,
)


def _flash_limit(case: Case, device: Device) -> str | None:
    if device.platform != "gpu" or "H" not in device.kind:
        return "is a library for Hopper GPUs"
    if importlib.util.find_spec(_FLASH) is None:
        return "is not installed (pip install flash-attn3-jax)"
    if case.head_width != 128 or case.dtype not in ("bfloat16", "float16"):
        return "is built for heads of 128 in bfloat16 and float16"
    return None


def _flash_store(case: Case, arrays: Arrays) -> Any:
    """Pages of keys and pages of values, [pages, page tokens, K, H] each."""

    def paged(x_CSKH: jax.Array) -> jax.Array:
        short = case.columns * case.page_tokens - case.context
        x_CSKH = jnp.pad(x_CSKH, ((0, 0), (0, short), (0, 0), (0, 0)))
        own = x_CSKH.reshape(-1, case.page_tokens, *x_CSKH.shape[2:])
        pages = jnp.zeros((1 + own.shape[0], *own.shape[1:]), own.dtype)
        return pages.at[arrays.table_CP.reshape(-1)].set(own)

    return jax.jit(lambda k, v: (paged(k), paged(v)))(arrays.k_CSKH, arrays.v_CSKH)


def _flash(q_CWNH: jax.Array, arrays: Arrays, stored: Any, **sizes: int) -> jax.Array:
    library: Any = importlib.import_module(_FLASH)
    return library.flash_mha_with_kvcache(
        q_CWNH, *stored, cache_seqlens=arrays.length_C, page_table=arrays.table_CP,
        softmax_scale=1.0, is_causal=q_CWNH.shape[1] > 1, **sizes,
    )  # fmt: skip


def _flash_splits(case: Case, device: Device) -> Sequence[Sizes]:
    """As with ours; by itself it does not split."""
    full = max(1, device.num_cores // (case.rows * case.kv_heads))
    around = sorted({1, full, 2 * full} if case.is_decode else {1})
    return [{"num_splits": n} for n in around if n <= case.columns]


# Its cached lengths are whole pages, as its documentation says.
_FLASH_ATTENTION = Contender(
    "flash-attn3-jax", _flash_limit, _flash_store, _flash, _flash_splits, has_lengths=False
)
