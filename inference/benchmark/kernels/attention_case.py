"""Attention over pages as a benchmark: sizes, random arrays on the device, bytes and FLOPs, and
exact values in float64.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from configs.cache import BLOCK_TOKENS, PageFormat, keys_values
from configs.kinds.attention import Attention
from configs.model import LayerSpec, ModelConfig
from inference.planner import cost
from inference.planner.cost import Operation, Rows, Work
from layers.kernels.attention.contract import Demand
from layers.ragged import Rectangle

_SAMPLED_ROWS, _SAMPLED_QUERIES = 4, 3
# Largest error of a head's output, as a share of its norm. The softmax's weights are rounded to the
# type of the values, and some kernels round the output too; errors of many weights average out.
_BOUNDS = {"float32": 1e-5, "float16": 1.5 * 2.0**-11, "bfloat16": 1.5 * 2.0**-8}


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of `queries` tokens each, the newest of sequences of `context` tokens.

    Attributes:
        heads, kv_heads, head_width: N, K and H.
        page_tokens: tokens a page holds.
        is_shuffled: whether pages lie in random order; else in order, as in a contiguous cache.
        dtype: of queries and pages.
    """

    rows: int
    queries: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_width: int = 128
    page_tokens: int = 64
    is_shuffled: bool = True
    dtype: str = "bfloat16"

    @property
    def is_decode(self) -> bool:
        """Whether rows have one token each."""
        return self.queries == 1

    @property
    def columns(self) -> int:
        """P: entries of a page table, in whole blocks of attention."""
        return -(-self.context // BLOCK_TOKENS) * (BLOCK_TOKENS // self.page_tokens)

    @property
    def page_format(self) -> PageFormat:
        return keys_values(self.kv_heads, self.head_width).page_format(self.dtype)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the sequences' keys and values."""
        return self.rows * self.context * self.page_format.bytes_per_token

    @property
    def demand(self) -> Demand:
        return Demand(
            self.heads, self.page_format, self.page_tokens, deterministic=False,
            table_entries=self.rows * self.columns,
        )  # fmt: skip

    @functools.cached_property
    def operation(self) -> Operation:
        """Its cost by the planner, with the newest tokens already in the cache."""
        model = ModelConfig(
            "case", "case", vocab_size=2, width=self.heads * self.head_width, num_layers=1,
            max_context=self.context, dtype=self.dtype,
            pattern=(LayerSpec(Attention(self.heads, self.kv_heads, self.head_width, None), None),),
        )  # fmt: skip
        rows = Rows(self.rows, self.queries, self.context)
        work = Work(self.rows * self.queries, (rows,), 0)
        whole = next(o for o in cost.step_operations(model, work) if o.kind == "attention")
        written = self.cache_bytes * self.queries / self.context
        return dataclasses.replace(whole, cache_bytes=whole.cache_bytes - written)

    @property
    def label(self) -> str:
        order = "shuffled" if self.is_shuffled else "in order"
        return (
            f"{'decode' if self.is_decode else 'prefill'} {self.rows} x {self.queries} at "
            f"{self.context}, {self.heads}/{self.kv_heads} heads of {self.head_width}, pages of "
            f"{self.page_tokens} {order}, {self.dtype}"
        )


class Arrays(NamedTuple):
    """Scaled queries, contiguous keys and values, page tables and lengths, on the device."""

    q_YWNH: jax.Array
    k_YSKH: jax.Array
    v_YSKH: jax.Array
    table_YP: jax.Array  # page 0 is the sink
    length_Y: jax.Array  # i32[Y], at least `queries`

    @property
    def rectangle(self) -> Rectangle:
        """A row's queries are its newest tokens."""
        return self._rectangle(self.q_YWNH.shape[1], self.length_Y)

    @property
    def page_format(self) -> PageFormat:
        """`Case.page_format`."""
        _, _, K, H = self.k_YSKH.shape
        return keys_values(K, H).page_format(self.k_YSKH.dtype.name)

    @property
    def newest_YWX(self) -> jax.Array:
        """Packed rows of the queries' own tokens, [Y, W, 2 K, H]."""
        kv_position_YW11 = self.rectangle.kv_position_YW[:, :, None, None]
        newest = [
            jnp.take_along_axis(x, kv_position_YW11, axis=1) for x in (self.k_YSKH, self.v_YSKH)
        ]
        return jnp.concatenate(newest, axis=2)

    @property
    def contexts(self) -> Rectangle:
        """All tokens of the sequences, to be written to pages."""
        Y, S = self.k_YSKH.shape[:2]
        return self._rectangle(S, jnp.full(Y, S, jnp.int32))

    def _rectangle(self, width: int, length_Y: jax.Array) -> Rectangle:
        slot_Y = jnp.arange(length_Y.shape[0], dtype=jnp.int32)
        position_YW = length_Y[:, None] - width + jnp.arange(width, dtype=jnp.int32)
        return Rectangle(slot_Y, position_YW, jnp.ones(position_YW.shape, bool), (self.table_YP,))


def draw(case: Case, seed: int) -> Arrays:
    """Fresh random arrays of full rows."""
    generator = np.random.default_rng(seed)
    count = case.rows * case.columns
    order = generator.permutation(count) if case.is_shuffled else np.arange(count)
    table_YP = 1 + order.reshape(case.rows, -1).astype(np.int32)
    q_YWNH, k_YSKH, v_YSKH = _random(case, seed)
    length_Y = jnp.full(case.rows, case.context, jnp.int32)
    return Arrays(q_YWNH, k_YSKH, v_YSKH, jnp.asarray(table_YP), length_Y)


def ragged(case: Case, arrays: Arrays, seed: int) -> Arrays:
    """The same with random lengths from `queries` to `context`."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(case.queries, case.context, case.rows, np.int32, endpoint=True)
    return arrays._replace(length_Y=jnp.asarray(lengths))


@functools.partial(jax.jit, static_argnums=0)
def _random(case: Case, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    queries = case.rows, case.queries, case.heads, case.head_width
    keys = case.rows, case.context, case.kv_heads, case.head_width
    q, k, v = (
        jax.random.normal(key, shape, case.dtype)
        for key, shape in zip(
            jax.random.split(jax.random.key(seed), 3), (queries, keys, keys), strict=True
        )
    )
    return (q * case.head_width**-0.5).astype(case.dtype), k, v


class Sample(NamedTuple):
    """Some outputs of a case in float64.

    Attributes:
        arrays: that they are computed from.
        values: (row, token) -> [N, H].
    """

    arrays: Arrays
    values: dict[tuple[int, int], np.ndarray]


def sample(case: Case, arrays: Arrays) -> Sample:
    """The first and the last rows and queries, and some between."""
    rows = np.unique(np.linspace(0, case.rows - 1, _SAMPLED_ROWS).astype(int))
    tokens = np.unique(np.linspace(0, case.queries - 1, _SAMPLED_QUERIES).astype(int))
    q_YWNH, length_Y = np.asarray(arrays.q_YWNH), np.asarray(arrays.length_Y)
    keys, values = (np.asarray(jnp.take(x, rows, axis=0)) for x in (arrays.k_YSKH, arrays.v_YSKH))
    expected = Sample(arrays, {})
    for row, k_SKH, v_SKH in zip(rows, keys, values, strict=True):
        for token in tokens:
            stop = length_Y[row] - case.queries + token + 1
            expected.values[row, token], _ = exact(q_YWNH[row, token], k_SKH[:stop], v_SKH[:stop])
    return expected


def error(sample: Sample, out_YWNH: jax.Array) -> float | None:
    """Largest error of a head's output, as a share of its norm, over the sample; None where any
    value of the whole output is not finite.
    """
    computed_YWNH = np.asarray(out_YWNH, np.float64)
    if not np.isfinite(computed_YWNH).all():
        return None
    worst = 0.0
    for at, expected_NH in sample.values.items():
        off_N = np.linalg.norm(computed_YWNH[at] - expected_NH, axis=1)
        worst = max(worst, float((off_N / np.linalg.norm(expected_NH, axis=1)).max()))
    return worst


def is_right(case: Case, error: float) -> bool:
    """Whether rounding explains an error."""
    return error <= _BOUNDS[case.dtype]


def exact(
    q_NH: np.ndarray,
    k_SKH: np.ndarray,
    v_SKH: np.ndarray,
    visible_S: np.ndarray | None = None,
    cap: float | None = None,
    sinks_N: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention of one query, in float64.

    Args:
        q_NH: scaled queries.
        k_SKH, v_SKH: keys and values of its sequence.
        visible_S: bool, the positions that it sees; None for all.
        cap: soft limit of the scores.
        sinks_N: a logit a head that takes a share of the softmax and adds no value.

    Returns:
        [N, value width] twice: the output, and what it would be if no value were negative, to which
        errors of the weights are relative.
    """
    (N, H), K = q_NH.shape, k_SKH.shape[1]
    if visible_S is not None:
        k_SKH, v_SKH = k_SKH[visible_S], v_SKH[visible_S]
    k_KHS = k_SKH.astype(np.float64).transpose(1, 2, 0)
    v_KSH = v_SKH.astype(np.float64).swapaxes(0, 1)
    scores_KGS = q_NH.astype(np.float64).reshape(K, N // K, H) @ k_KHS
    scores_KGS = scores_KGS if cap is None else cap * np.tanh(scores_KGS / cap)
    sinks = -np.inf if sinks_N is None else sinks_N.astype(np.float64).reshape(K, N // K, 1)
    max_KG1 = np.maximum(scores_KGS.max(-1, keepdims=True), sinks)
    weights_KGS = np.exp(scores_KGS - max_KG1)
    weights_KGS /= weights_KGS.sum(-1, keepdims=True) + np.exp(sinks - max_KG1)
    out_KGH, size_KGH = weights_KGS @ v_KSH, weights_KGS @ np.abs(v_KSH)
    return out_KGH.reshape(N, -1), size_KGH.reshape(N, -1)
