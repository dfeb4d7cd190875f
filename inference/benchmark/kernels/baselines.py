"""Kernels that compute a case of attention: our implementations, and other libraries' as baselines.

A library may be missing. Kernels without pages get contiguous keys and values of the same numbers.
An implementation that appends does so in every run, as in a step of the engine; the others find the
newest tokens in the pages.
"""

import functools
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from configs.settings.kernels import ATTENTIONS
from inference.benchmark.kernels.attention_case import Arrays, Case
from layers.kernels.attention import api
from layers.kernels.attention.contract import Options
from layers.kernels.device import Device
from layers.ragged import Ragged

Sizes = Mapping[str, int]  # keyword arguments of a kernel that change nothing but its time
_FLASH = "flash_attn3_jax"
_TPU_INFERENCE = "tpu_inference"


class Kernel(NamedTuple):
    """One way to compute attention.

    Attributes:
        name: as results call it.
        limit: (case, device) -> why it cannot run, to be read after its name; None if it can.
        store: keys and values in its own layout, a copy of those of the arrays.
        attend: (queries, arrays, stored, **sizes) -> [Y, W, N, H], and what is stored then.
        candidates: (case, device, whether to tune) -> sizes to try, its default first. When tuning,
            the default is spelled out, since a call without sizes takes what was tuned before.
        has_lengths: whether rows may differ in length.
        is_paged: whether it reads pages.
    """

    name: str
    limit: Callable[[Case, Device], str | None]
    store: Callable[[Case, Arrays], object]
    attend: Callable[..., tuple[jax.Array, object]]
    candidates: Callable[[Case, Device, bool], Sequence[Sizes]] = lambda case, device, tunes: ({},)
    has_lengths: bool = True
    is_paged: bool = True


def kernels() -> list[Kernel]:
    """Ours, and then the baselines."""
    baselines = _CUDNN, _FLASH_PAGED, _FLASH_CONTIGUOUS, _RAGGED_PAGED
    return [*map(_engine_kernel, ATTENTIONS), *baselines]


# --- ours -----------------------------------------------------------------------------------------


def _engine_kernel(name: str) -> Kernel:
    def limit(case: Case, device: Device) -> str | None:
        return api.implementation(name).limit(case.demand, device)

    def attend(
        q_YWNH: jax.Array, arrays: Arrays, pages: jax.Array, **sizes: int
    ) -> tuple[jax.Array, jax.Array]:
        chosen: Any = api.implementation(name)
        options = Options(dtype=q_YWNH.dtype.name)
        arguments = pages, arrays.rectangle, 0, arrays.page_format, options
        if chosen.append_and_attend is None:
            out_YWNH = chosen.attend_pages(q_YWNH, *arguments, **sizes)
        else:
            out_YWNH, pages = chosen.append_and_attend(
                q_YWNH, arrays.newest_YWX, *arguments, **sizes
            )
        return out_YWNH.astype(q_YWNH.dtype), pages  # as the next product of a step reads it

    kernel = Kernel(name, limit, functools.partial(_written, name), attend)
    return kernel._replace(candidates=_hopper_sizes) if name == "pallas_gpu" else kernel


@functools.partial(jax.jit, static_argnums=(0, 1))
def _written(name: str, case: Case, arrays: Arrays) -> jax.Array:
    """Pages as an implementation writes them; NaN where it will append."""
    chosen = api.implementation(name)
    shape = chosen.layout(1 + case.rows * case.columns, case.page_tokens, case.page_format)
    pages = jnp.zeros(shape.shape, shape.dtype)
    row_YSX = jnp.concatenate([arrays.k_YSKH, arrays.v_YSKH], axis=2)
    row_TX = row_YSX.reshape(-1, *row_YSX.shape[2:])
    pages = chosen.write(pages, row_TX, Ragged((arrays.contexts,)), 0)
    if chosen.append_and_attend is None:
        return pages
    newest_TX = jnp.full((case.rows * case.queries, *row_TX.shape[1:]), jnp.nan, row_TX.dtype)
    return chosen.write(pages, newest_TX, Ragged((arrays.rectangle,)), 0)


def _hopper_sizes(case: Case, device: Device, tunes: bool) -> Sequence[Sizes]:
    """The kernel's default sizes; then other numbers of splits, and two stages, so that two blocks
    may share a multiprocessor.
    """
    if not (tunes and case.is_decode):
        return ({},)
    from layers.kernels.attention import gpu, splits  # as in `api`

    itemsize = jnp.dtype(case.dtype).itemsize
    max_stages = gpu.most_stages(case.page_tokens, case.head_width, itemsize)
    default = gpu.default_sizes(case.rows * case.kv_heads, max_stages, device)
    full, stages = default["num_splits"], default["num_stages"]
    around = [(n, stages) for n in (1, full // 2, 2 * full, 4 * full)] + [(full, 2), (2 * full, 2)]
    alternatives = [
        {"num_splits": n, "num_stages": s}
        for n, s in dict.fromkeys(around)
        if 1 <= n <= min(case.columns, splits.most_splits(1, device))
    ]
    return [default, *(sizes for sizes in alternatives if sizes != default)]


# --- baselines ------------------------------------------------------------------------------------


def _cudnn_limit(case: Case, device: Device) -> str | None:
    if device.platform != "gpu":
        return "is a library for NVIDIA's GPUs"
    if case.dtype not in ("bfloat16", "float16"):
        return f"computes in bfloat16 and float16, not {case.dtype}"
    if not case.is_decode and case.queries != case.context:
        return "has no causal mask for rows that continue a prefix"
    return None


def _contiguous(case: Case, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    return jnp.copy(arrays.k_YSKH), jnp.copy(arrays.v_YSKH)


def _cudnn(q_YWNH: jax.Array, arrays: Arrays, stored: Any) -> tuple[jax.Array, object]:
    is_prefill = q_YWNH.shape[1] > 1
    out_YWNH = jax.nn.dot_product_attention(
        q_YWNH, *stored, scale=1.0, is_causal=is_prefill, implementation="cudnn",
        key_value_seq_lengths=None if is_prefill else arrays.length_Y,
    )  # fmt: skip
    return out_YWNH, stored


_CUDNN = Kernel("cudnn", _cudnn_limit, _contiguous, _cudnn, is_paged=False)


def _flash_limit(case: Case, device: Device) -> str | None:
    if device.platform != "gpu" or "H" not in device.kind:
        return "is a library for Hopper GPUs"
    if importlib.util.find_spec(_FLASH) is None:
        return "is not installed (pip install flash-attn3-jax)"
    if case.head_width != 128 or case.dtype not in ("bfloat16", "float16"):
        return "is built for heads of 128 in bfloat16 and float16"
    return None


@functools.partial(jax.jit, static_argnums=0)
def _flash_pages(case: Case, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """Pages of keys and pages of values, [pages, page tokens, K, H] each."""

    def paged(x_YSKH: jax.Array) -> jax.Array:
        short = case.columns * case.page_tokens - case.context
        x_YSKH = jnp.pad(x_YSKH, ((0, 0), (0, short), (0, 0), (0, 0)))
        rows = x_YSKH.reshape(-1, case.page_tokens, *x_YSKH.shape[2:])
        pages = jnp.zeros((1 + rows.shape[0], *rows.shape[1:]), rows.dtype)
        return pages.at[arrays.table_YP.reshape(-1)].set(rows)

    return paged(arrays.k_YSKH), paged(arrays.v_YSKH)


def _flash(
    q_YWNH: jax.Array, arrays: Arrays, stored: Any, *, is_paged: bool, **sizes: int
) -> tuple[jax.Array, object]:
    library: Any = importlib.import_module(_FLASH)
    out_YWNH = library.flash_mha_with_kvcache(
        q_YWNH, *stored, cache_seqlens=arrays.length_Y,
        page_table=arrays.table_YP if is_paged else None,
        softmax_scale=1.0, is_causal=q_YWNH.shape[1] > 1, **sizes,
    )  # fmt: skip
    return out_YWNH, stored


def _flash_splits(case: Case, device: Device, tunes: bool) -> Sequence[Sizes]:
    """As for our kernel; the library's default is not to split."""
    full = max(1, device.num_cores // (case.rows * case.kv_heads))
    around = sorted({1, full, 2 * full} if case.is_decode else {1})
    return [{"num_splits": n} for n in around if n <= case.columns]


# Its cached lengths are whole pages, as its documentation says.
_FLASH_PAGED = Kernel(
    "flash-attn3-jax", _flash_limit, _flash_pages, functools.partial(_flash, is_paged=True),
    _flash_splits, has_lengths=False,
)  # fmt: skip
_FLASH_CONTIGUOUS = Kernel(
    "flash-attn3-contiguous", _flash_limit, _contiguous, functools.partial(_flash, is_paged=False),
    _flash_splits, is_paged=False,
)  # fmt: skip


def _ragged_limit(case: Case, device: Device) -> str | None:
    if device.platform != "tpu":
        return "is a library for TPUs"
    if importlib.util.find_spec(_TPU_INFERENCE) is None:
        return "is not installed (pip install --no-deps tpu-inference)"
    if case.head_width % 128 or case.dtype != "bfloat16":
        return "is built here for heads of a multiple of 128 in bfloat16"
    return None


def ragged_library() -> Any:
    """tpu-inference's RPA v3 (arXiv 2604.15464), without what its package imports for a server."""
    if _TPU_INFERENCE not in sys.modules:
        spec = importlib.util.find_spec(_TPU_INFERENCE)
        assert spec is not None and spec.submodule_search_locations is not None
        package = types.ModuleType(_TPU_INFERENCE)
        package.__path__ = spec.submodule_search_locations
        sys.modules[_TPU_INFERENCE] = package
    return importlib.import_module(f"{_TPU_INFERENCE}.kernels.ragged_paged_attention.v3.kernel")


@functools.partial(jax.jit, static_argnums=0)
def _ragged_pages(case: Case, arrays: Arrays) -> jax.Array:
    """[pages, page tokens, K, 2, H], a head's key before its value."""
    row_YSX = jnp.stack([arrays.k_YSKH, arrays.v_YSKH], axis=3)
    short = case.columns * case.page_tokens - case.context
    row_YSX = jnp.pad(row_YSX, ((0, 0), (0, short), (0, 0), (0, 0), (0, 0)))
    rows = row_YSX.reshape(-1, case.page_tokens, *row_YSX.shape[2:])
    pages = jnp.zeros((1 + rows.shape[0], *rows.shape[1:]), rows.dtype)
    return pages.at[arrays.table_YP.reshape(-1)].set(rows)


def _ragged(q_YWNH: jax.Array, arrays: Arrays, pages: jax.Array) -> tuple[jax.Array, object]:
    """It appends, and takes rows of one token first, then longer ones."""
    Y, W, N, H = q_YWNH.shape
    k_TKH, v_TKH = jnp.split(arrays.newest_YWX.reshape(Y * W, -1, H), 2, axis=1)
    num_decoding = Y if W == 1 else 0
    out_TNH, pages = ragged_library().ragged_paged_attention(
        q_YWNH.reshape(Y * W, N, H), k_TKH, v_TKH, pages, arrays.length_Y,
        arrays.table_YP.reshape(-1), jnp.arange(Y + 1, dtype=jnp.int32) * W,
        jnp.array([num_decoding, num_decoding, Y], jnp.int32),
    )  # fmt: skip
    return out_TNH.reshape(q_YWNH.shape), pages


_RAGGED_PAGED = Kernel("tpu-inference", _ragged_limit, _ragged_pages, _ragged)
