"""Times kernels that compute the right values: each kernel on each case of attention, beside the
planner's prediction.

A time is printed only of a kernel that was shown right: on fresh random numbers, on rows of
different lengths and full ones, with outputs and free memory filled with NaN, against a float64
softmax on the host.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.hardware.spec import HardwareSpec
from inference.benchmark.kernels import attention_case
from inference.benchmark.kernels.attention_case import Arrays, Case, Sample
from inference.benchmark.kernels.baselines import Kernel, Sizes
from inference.planner.calibration import on_device
from layers.kernels.device import target_device

# What matters most comes first: time may run out.
_DEVICE_CASES = (
    Case(32, 1, 4096),  # Llama 3 8B: 537 MB
    Case(32, 1, 4096, is_shuffled=False),
    Case(1, 4096, 4096),
    Case(64, 1, 1024, heads=40, kv_heads=40),  # Llama 2 13B of the lecture: 1.3 GB
    Case(1, 1, 8192),
    Case(8, 64, 1024),  # the prefill chunks of an engine
    Case(256, 1, 1024, heads=40, kv_heads=8),
    Case(4, 512, 4096),
    Case(32, 1, 4096, page_tokens=128),
    Case(1, 1, 32768),
    Case(32, 1, 2048, heads=9, kv_heads=3, head_width=64),  # SmolLM2
)
_CPU_CASES = (
    Case(3, 1, 200, 4, 2, 64),
    Case(3, 1, 200, 4, 2, 64, is_shuffled=False),
    Case(2, 128, 128, 4, 2, 64),
)
_COPIES = 4  # of keys and values at the same time: as drawn, as stored, and room
_OUT_OF_TIME = {"status": "out of time", "reason": "was not begun"}


def cases(platform: str, memory_bytes: float) -> list[Case]:
    """The benchmark's cases, with fewer rows where memory is short, and a TPU's size of pages."""
    if platform == "cpu":
        return list(_CPU_CASES)
    unique: dict[Case, None] = {}
    for case in _DEVICE_CASES:
        case = dataclasses.replace(case, page_tokens=128) if platform == "tpu" else case
        while _COPIES * case.cache_bytes > memory_bytes and case.rows > 1:
            case = dataclasses.replace(case, rows=case.rows // 2)
        if _COPIES * case.cache_bytes <= memory_bytes:
            unique[case] = None
    return list(unique)


def measure(
    chosen: Sequence[Case],
    kernels: Sequence[Kernel],
    hardware: HardwareSpec,
    *,
    repeats: int,
    budget_s: float,
    seed: int,
    tunes: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> Iterator[dict[str, object]]:
    """A row a case, as they end.

    Args:
        chosen: in order; those for which no time is left say so.
        repeats: medians are reported.
        budget_s: after which no kernel is begun.
        tunes: also try all candidate sizes of our kernels.
    """
    seeds = np.random.default_rng(seed)
    deadline = time.monotonic() + budget_s
    for done, case in enumerate(chosen):
        progress(done, len(chosen), "kernels")
        memory_s = case.operation.bytes / hardware.read_bandwidth
        compute_s = case.operation.flops / hardware.rate(case.dtype)
        row: dict[str, Any] = {"case": case.label, **dataclasses.asdict(case)}
        row |= {"bytes": case.operation.bytes, "flops": case.operation.flops}
        row |= {"bound": "compute" if compute_s > memory_s else "memory", "results": {}}
        row["predicted_s"] = max(memory_s, compute_s)
        samples: list[Sample] = []
        for kernel in kernels:
            if (reason := kernel.limit(case, target_device())) is not None:
                row["results"][kernel.name] = {"status": "not run", "reason": reason}
                continue
            if time.monotonic() > deadline:
                row["results"][kernel.name] = _OUT_OF_TIME
                continue
            samples = samples or _samples(case, *seeds.integers(1 << 31, size=2).tolist())
            best = _Run(case, kernel, samples, repeats).best(row["predicted_s"], tunes, deadline)
            if "seconds" in best:
                best["share"] = row["predicted_s"] / best["seconds"]
                best["is_paged"] = kernel.is_paged
            row["results"][kernel.name] = best
        yield row


def _samples(case: Case, seed: int, lengths_seed: int) -> list[Sample]:
    """Rows of different lengths, and then full ones."""
    arrays = attention_case.draw(case, seed)
    uneven = attention_case.ragged(case, arrays, lengths_seed)
    return [attention_case.sample(case, uneven_arrays) for uneven_arrays in (uneven, arrays)]


class _Run:
    """One kernel on one case."""

    def __init__(self, case: Case, kernel: Kernel, samples: Sequence[Sample], repeats: int) -> None:
        self._case, self._kernel, self._repeats = case, kernel, repeats
        self._samples = samples if kernel.has_lengths else samples[-1:]
        self._arrays = samples[-1].arrays

    def best(self, expected_s: float, tunes: bool, deadline: float) -> dict[str, object]:
        """The fastest candidate, or what is wrong with the first wrong one."""
        case, kernel = self._case, self._kernel
        candidates = kernel.candidates(case, target_device(), tunes)
        tried: list[dict[str, Any]] = []
        try:
            for sizes in candidates:
                if tried and time.monotonic() > deadline:
                    break
                attempt, one_s = self._check(sizes)
                if attempt["status"] == "right":
                    attempt["seconds"] = self._time(sizes, max(one_s, expected_s))
                tried.append(attempt | {"sizes": dict(sizes)})
        except Exception as failure:  # a library's own, whatever it is
            reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
            return {"status": "failed", "reason": reason}
        wrong = [attempt for attempt in tried if attempt["status"] != "right"]
        best = dict(wrong[0] if wrong else min(tried, key=lambda attempt: attempt["seconds"]))
        best["is_repeatable"] = all(attempt["is_repeatable"] for attempt in tried)
        return best | ({"candidates": tried} if len(candidates) > 1 else {})

    def _store(self, arrays: Arrays) -> object:
        return self._kernel.store(self._case, arrays)

    def _attend(self, sizes: Sizes) -> Callable[..., tuple[jax.Array, object]]:
        return functools.partial(self._kernel.attend, **sizes)

    def _check(self, sizes: Sizes) -> tuple[dict[str, object], float]:
        """Its largest error, and the seconds of a run, dispatch included."""
        arrays, attend = self._arrays, self._attend(sizes)

        def poisoned(
            out_YWNH: jax.Array, stored: object, arrays: Arrays
        ) -> tuple[jax.Array, object]:
            computed_YWNH, stored = attend(arrays.q_YWNH, arrays, stored)
            return computed_YWNH.astype(out_YWNH.dtype), stored

        def nans() -> jax.Array:
            return jnp.full(arrays.q_YWNH.shape, jnp.nan, jnp.float32)

        lowered = jax.jit(poisoned, donate_argnums=(0, 1), keep_unused=True)
        executable = lowered.lower(nans(), self._store(arrays), arrays).compile()
        memory = executable.memory_analysis()
        num_bytes = memory.temp_size_in_bytes if memory is not None else 0
        errors, is_repeatable, one_s = [], True, 0.0
        for sample in self._samples:
            out_YWNH, stored = nans(), self._store(sample.arrays)
            _poison(num_bytes)
            out_YWNH, stored = executable(out_YWNH, stored, sample.arrays)
            errors.append(attention_case.error(sample, out_YWNH))
            again, stored = jax.block_until_ready((nans(), stored))
            start = time.perf_counter()
            again, _ = jax.block_until_ready(executable(again, stored, sample.arrays))
            one_s = time.perf_counter() - start
            is_repeatable &= bool((out_YWNH == again).all())
        finite = [error for error in errors if error is not None]
        worst = max(finite) if len(finite) == len(errors) else None
        is_right = worst is not None and attention_case.is_right(self._case, worst)
        status = "right" if is_right else "wrong"
        return {"status": status, "error": worst, "is_repeatable": is_repeatable}, one_s

    def _time(self, sizes: Sizes, expected_s: float) -> float:
        attend, q_YWNH = self._attend(sizes), jnp.array(self._arrays.q_YWNH)
        stored = self._store(self._arrays)
        out_YWNH, _ = jax.eval_shape(attend, q_YWNH, self._arrays, stored)
        carry = q_YWNH, jnp.zeros(out_YWNH.shape, out_YWNH.dtype), stored
        return on_device.seconds(
            chained(attend), carry, self._arrays, expected_s=expected_s, repeats=self._repeats
        )


def chained(attend: Callable[..., tuple[jax.Array, object]]) -> Callable[..., object]:
    """Attention whose queries depend on the output before: on one element, which costs next to
    nothing. The whole output is carried along, or XLA would compute only that element.
    """

    def step(carry: tuple[jax.Array, jax.Array, object], arrays: Arrays) -> object:
        q_YWNH, _, stored = carry
        out_YWNH, stored = attend(q_YWNH, arrays, stored)
        q_YWNH = q_YWNH.at[0, 0, 0, 0].set(out_YWNH[0, 0, 0, 0].astype(q_YWNH.dtype))
        return q_YWNH, out_YWNH, stored

    return step


def _poison(num_bytes: int) -> None:
    """Fills memory that the next executable is likely to get with NaN."""
    for _ in range(2):
        jnp.full(num_bytes // 4 + 1, jnp.nan, jnp.float32).block_until_ready().delete()
