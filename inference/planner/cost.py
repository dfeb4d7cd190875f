"""What a step must cost, from shapes alone: bytes, FLOPs, seconds at the roofline.

A decode step reads every weight and every live cache entry once and computes little with each byte,
so it waits for memory; a prefill step reuses each weight for all its tokens, so it waits for
arithmetic.
"""

import dataclasses
import functools
import math
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from configs.cache import DTYPE_BYTES
from configs.model import ModelConfig


@dataclasses.dataclass(frozen=True)
class Cost:
    """Bytes moved to and from memory, and floating-point operations."""

    bytes: int
    flops: int


@dataclasses.dataclass(frozen=True)
class Machine:
    """Rates of the machine at hand: bytes read a second, FLOPs a second of a large matrix
    product.
    """

    read_bandwidth: float
    matmul_rate: float = math.inf

    def seconds(self, cost: Cost) -> float:
        """Roofline time (Williams et al. 2009): whichever of memory and arithmetic takes longer."""
        return max(cost.bytes / self.read_bandwidth, cost.flops / self.matmul_rate)


def matrix_elements(config: ModelConfig) -> int:
    """Weights that every token is multiplied with, the head apart: attention and feed-forward
    matrices.
    """
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    return config.num_layers * (
        heads * config.head_width * config.width + 3 * config.width * config.ffn_width
    )


def norm_elements(config: ModelConfig) -> int:
    """Weights of all norms."""
    per_layer = config.width * (4 if config.post_norms else 2)
    per_layer += 2 * config.head_width if config.qk_norm else 0
    return config.num_layers * per_layer + config.width


def num_parameters(config: ModelConfig) -> int:
    """All weights, a tied head counted once."""
    tables = config.vocab_size * config.width * (1 if config.tied else 2)
    return matrix_elements(config) + norm_elements(config) + tables


def step_cost(
    config: ModelConfig, num_tokens: int, contexts: Iterable[tuple[int, int]], num_logits: int
) -> Cost:
    """Cost of one step.

    Args:
        config: the model.
        num_tokens: T, packed tokens the matrices are applied to, padding included.
        contexts: (query tokens, context tokens) of each row: the last query sees that many
            positions, itself included.
        num_logits: Q, rows of logits.

    Returns:
        Bytes: each weight once (of an untied embedding only the rows looked up), each row's live
            cache once, new cache
        entries written, logits written and read. FLOPs: 2 a weight and token, 4 a query, head, head
        width and key.
    """
    width, head_elements = DTYPE_BYTES[config.dtype], config.vocab_size * config.width
    rows = list(contexts)
    cache_bytes = score_flops = 0
    for spec in config.cache_specs:
        per_token = spec.bytes_per_token(config.dtype)
        for queries, context in rows:
            live = context - spec.live_from(context - queries)
            cache_bytes += per_token * (live + queries) + 2 * spec.bytes_per_sequence()
            score_flops += (
                4 * config.num_heads * config.head_width * _pairs(queries, context, spec.window)
            )
    looked_up = 0 if config.tied else num_tokens * config.width
    weights = matrix_elements(config) + norm_elements(config) + head_elements + looked_up
    return Cost(
        weights * width + cache_bytes + 2 * 4 * num_logits * config.vocab_size,
        2 * num_tokens * matrix_elements(config) + 2 * num_logits * head_elements + score_flops,
    )


def _pairs(queries: int, context: int, window: int | None) -> int:
    """Pairs of query and visible key."""
    seen = range(context - queries + 1, context + 1)
    return sum(seen) if window is None else sum(min(n, window) for n in seen)


def measure_read_bandwidth(num_bytes: int = 256 << 20, repeats: int = 5) -> float:
    """Bytes a second that all cores together read from memory: the best of several passes of a dot
    product.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = cores or 1
    parts = np.array_split(np.ones(num_bytes // 4, np.float32), cores)

    def once(pool: ThreadPoolExecutor) -> float:
        start = time.perf_counter()
        list(pool.map(lambda part: float(np.dot(part, part)), parts))
        return time.perf_counter() - start

    with ThreadPoolExecutor(cores) as pool:
        return num_bytes / min(once(pool) for _ in range(repeats))


def measure_matmul_rate(dtype: str, repeats: int = 5) -> float:
    """FLOPs a second of a [512, 2048] x [2048, 2048] product with float32 sums, the best of
    several.
    """
    import jax
    import jax.numpy as jnp

    rows, width = 512, 2048
    dims = (((1,), (1,)), ((), ()))
    product = jax.jit(functools.partial(_product, jax.lax.dot_general, dims, jnp.float32))
    x, w = jnp.ones((rows, width), dtype), jnp.ones((width, width), dtype)
    product(x, w).block_until_ready()

    def once() -> float:
        start = time.perf_counter()
        product(x, w).block_until_ready()
        return time.perf_counter() - start

    return 2 * rows * width * width / min(once() for _ in range(repeats))


def _product(dot: Any, dims: Any, dtype: Any, x: Any, w: Any) -> Any:
    return dot(x, w, dims, preferred_element_type=dtype)
