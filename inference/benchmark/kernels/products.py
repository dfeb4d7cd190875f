"""Products of few rows with a matrix of weights, by the engine's back end and by XLA alone, timed.

A time is reported only of a product that was right: on fresh random numbers, against float64 on the
host, in some features of all rows. A run multiplies the same rows with as many matrices as a
device's caches cannot hold, one launch after another, as the layers of a step do.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.precision import FORMATS
from inference.planner.calibration import on_device
from layers.backends import backends
from layers.backends.backend import Backend
from layers.backends.gpu import Gpu
from layers.kernels.device import Device
from layers.kernels.linear import low_bit
from layers.kernels.linear.low_bit import Word
from layers.linear import linear, look_up
from layers.weights import Weight

_MATRICES = {  # of Llama 3 8B, [F, D]; what a step reads most of first
    "gate_up": (28672, 4096), "down": (4096, 14336), "qkv": (6144, 4096), "out": (4096, 4096),
    "head": (128256, 4096),
}  # fmt: skip
_FORMATS, _ROWS = ("bfloat16", "int4", "fp8", "int8"), (1, 16, 64)
_SMALL = "gate_up", 512, 256  # on a CPU
_DTYPE = "bfloat16"  # of activations
_CACHED_BYTES = 200 << 20  # four times an H200's second cache
_MOST_MATRICES, _MOST_ON_CPU = 24, 2  # of a run
_SAMPLED_FEATURES = 96
_MAX_ERROR = 2.0**-8  # of a product's norm: weights may be rounded to bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows [T, D] of bfloat16 times a matrix [F, D] of a format of `_FORMATS`."""

    matrix: str
    features: int
    depth: int
    format: str
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.features, self.depth

    @property
    def weight_bytes(self) -> float:
        return FORMATS[self.format].bytes_for(self.features * self.depth, self.depth)

    @property
    def bytes(self) -> float:
        """Bytes that are read, and of the float32 result."""
        return self.weight_bytes + self.rows * (2 * self.depth + 4 * self.features)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.features * self.depth

    @property
    def label(self) -> str:
        return f"{self.matrix} {self.features} x {self.depth}, {self.format}, rows {self.rows}"


def cases(platform: str) -> list[Case]:
    """Few rows first, because steps of few rows wait for weights alone."""
    if platform == "cpu":
        return [Case(*_SMALL, format, 1) for format in _FORMATS[:2]]
    return [
        Case(name, *shape, format, count)
        for count in _ROWS
        for format in _FORMATS
        for name, shape in _MATRICES.items()
    ]


def implementations(device: Device) -> dict[str, Backend]:
    """Back ends by name: the engine's, as its programs have it, and XLA alone."""
    engine = dataclasses.replace(backends.of(device, "reference"), prefetches_weights=True)
    return {"engine": engine, "xla": Gpu()}


def measure(
    chosen: Sequence[Case],
    products: Mapping[str, Backend],
    read_bandwidth: float,
    *,
    repeats: int,
    budget_s: float,
    seed: int,
    progress: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> Iterator[dict[str, object]]:
    """A row a case, as they end. Each back end reads the numbers as it lays them out.

    Args:
        chosen: in order; those for which no time is left say so.
        products: back ends by name.
        read_bandwidth: bytes a second, of which a product's bytes take a share.
        repeats: medians are reported.
        budget_s: after which no product is begun.
    """
    deadline = time.monotonic() + budget_s
    for done, case in enumerate(chosen):
        progress(done, len(chosen), "products")
        row: dict[str, Any] = {"case": case.label, **dataclasses.asdict(case)}
        row |= {"bytes": case.bytes, "flops": case.flops, "results": {}}
        for name, backend in products.items():
            if time.monotonic() > deadline:
                row["results"][name] = {"status": "out of time", "reason": "was not begun"}
                continue
            weights = _weights(case, seed + done, backend.word)
            row["results"][name] = result = _result(case, weights, backend, seed + done, repeats)
            if "seconds" in result:
                result["share"] = case.bytes / read_bandwidth / result["seconds"]
        yield row


def _weights(case: Case, seed: int, word: Word) -> list[Weight]:
    most = _MOST_ON_CPU if case.features == _SMALL[1] else _MOST_MATRICES
    count = min(most, math.ceil(_CACHED_BYTES / case.weight_bytes))
    return [matrix(case, key, word) for key in jax.random.split(jax.random.key(seed), count)]


def matrix(case: Case, key: jax.Array, word: Word) -> Weight:
    """Random weights of about D ** -0.5, with different scales, in a back end's words."""
    data_key, scale_key = jax.random.split(key)
    if case.format == _DTYPE:
        return jax.random.normal(data_key, case.shape, _DTYPE) * jnp.asarray(
            case.depth**-0.5, _DTYPE
        )
    w = low_bit.random(data_key, case.shape, case.format, _DTYPE, word)
    factor = jax.random.uniform(scale_key, w.scale.shape, minval=0.5, maxval=1.5)
    return dataclasses.replace(w, scale=w.scale * factor)


def _result(
    case: Case, weights: Sequence[Weight], backend: Backend, seed: int, repeats: int
) -> dict[str, Any]:
    """The time of a product that is right; else what is wrong with it."""
    x_TD = jax.random.normal(jax.random.key(seed), (case.rows, case.depth), _DTYPE)
    multiply = jax.jit(_traced_for(backend), compiler_options=dict(backend.compiler_options))
    try:
        error = _error(x_TD, weights[0], multiply(x_TD, weights[0]))
        if error is None or error > _MAX_ERROR:
            return {"status": "wrong", "error": error}
        start = time.perf_counter()
        jax.block_until_ready(multiply(x_TD, weights[0]))
        one_s = time.perf_counter() - start
        seconds = _seconds(case, weights, backend, x_TD, one_s, repeats)
    except Exception as failure:  # a library's own, whatever it is
        reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        return {"status": "failed", "reason": reason}
    return {"status": "right", "error": error, "seconds": seconds}


def _traced_for(backend: Backend) -> Callable[[jax.Array, Weight], jax.Array]:
    def multiply(x_TD: jax.Array, w: Weight) -> jax.Array:
        with backends.use(backend):
            return linear(x_TD, w)

    return multiply


def _error(x_TD: jax.Array, w: Weight, y_TF: jax.Array) -> float | None:
    """The error's norm as a share of the product's, over some features; None where any value is
    not finite.
    """
    if not bool(jnp.isfinite(y_TF).all()):
        return None
    ids = np.unique(np.linspace(0, y_TF.shape[1] - 1, _SAMPLED_FEATURES).astype(int))
    rows_SD = look_up(w, jnp.asarray(ids))
    expected_TS = np.asarray(x_TD, np.float64) @ np.asarray(rows_SD, np.float64).T
    off = np.linalg.norm(np.asarray(y_TF, np.float64)[:, ids] - expected_TS)
    return float(off / np.linalg.norm(expected_TS))


def _seconds(
    case: Case,
    weights: Sequence[Weight],
    backend: Backend,
    x_TD: jax.Array,
    one_s: float,
    repeats: int,
) -> float:
    """Seconds of one product, which took `one_s` alone."""
    multiply = _traced_for(backend)

    def step(
        carry: tuple[jax.Array, list[jax.Array]], weights: Sequence[Weight]
    ) -> tuple[jax.Array, list[jax.Array]]:
        x_TD, _ = carry
        products = [multiply(x_TD, w) for w in weights]
        # The next run's rows depend on this one's products, in an element that stays.
        x_TD = x_TD.at[0, 0].add((0 * products[-1][0, 0]).astype(x_TD.dtype))
        return x_TD, products

    zeros = [jnp.zeros((case.rows, case.features), jnp.float32) for _ in weights]
    run_s = on_device.seconds(
        step, (jnp.array(x_TD), zeros), list(weights), repeats=repeats,
        expected_s=len(weights) * one_s,
        options=dict(backend.compiler_options) | on_device.one_after_another(),
    )  # fmt: skip
    return run_s / len(weights)
