"""Kernels by the clock, once they are right: each contender on each case of attention, beside what
the planner says of it.

A time is printed only of what was shown right: fresh random numbers, rows of different lengths and
full ones, outputs and free memory filled with NaN, a float64 softmax on the host.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from configs.hardware.spec import HardwareSpec
from inference.benchmark import attention_case
from inference.benchmark.attention_case import Arrays, Case, Sample
from inference.benchmark.contenders import Contender, Sizes
from inference.planner import on_device
from layers.kernels.device import target_device

# What matters most comes first: time may run out.
_DEVICE_CASES = (
    Case(32, 1, 4096),  # Llama 3 8B: 537 MB
    Case(32, 1, 4096, is_shuffled=False),
    Case(1, 4096, 4096),
    Case(64, 1, 1024, heads=40, kv_heads=40),  # Llama 2 13B of the lecture: 1.3 GB
    Case(1, 1, 8192),
    Case(8, 64, 1024),  # the tiles of an engine
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
_COPIES = 4  # of keys and values at the same time: contiguous, in pages, in a peer's, and room


def cases(platform: str, memory_bytes: float) -> list[Case]:
    """The benchmark's cases, with fewer rows where memory is short, and a TPU's size of pages."""
    if platform == "cpu":
        return list(_CPU_CASES)
    found: dict[Case, None] = {}
    for case in _DEVICE_CASES:
        case = dataclasses.replace(case, page_tokens=128) if platform == "tpu" else case
        while _COPIES * case.cache_bytes > memory_bytes and case.rows > 1:
            case = dataclasses.replace(case, rows=case.rows // 2)
        if _COPIES * case.cache_bytes <= memory_bytes:
            found[case] = None
    return list(found)


def measure(
    chosen: Sequence[Case],
    contenders: Sequence[Contender],
    hardware: HardwareSpec,
    *,
    repeats: int,
    budget_s: float,
    seed: int,
    tunes: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, label: None,
) -> list[dict[str, Any]]:
    """A row a case.

    Args:
        chosen: in order; those for which no time is left are named as such.
        contenders: compared on each.
        hardware: the device's measured rates.
        repeats: medians are reported.
        budget_s: after which no contender is begun.
        seed: of the random numbers.
        tunes: try all candidates for sizes of ours too.
        progress: told of (done, total, label).
    """
    seeds = np.random.default_rng(seed)
    deadline, rows = time.monotonic() + budget_s, []
    for done, case in enumerate(chosen):
        progress(done, len(chosen), "kernels")
        memory_s = case.operation.bytes / hardware.read_bandwidth
        compute_s = case.operation.flops / hardware.rate(case.dtype)
        row: dict[str, Any] = {"case": case.label, **dataclasses.asdict(case)}
        row |= {"bytes": case.operation.bytes, "flops": case.operation.flops}
        row |= {"bound": "compute" if compute_s > memory_s else "memory", "results": {}}
        row["predicted_s"] = max(memory_s, compute_s)
        samples: list[Sample] = []
        for contender in contenders:
            reason = contender.limit(case, target_device())
            if reason is None and time.monotonic() > deadline:
                reason = "has no time left"
            if reason is not None:
                row["results"][contender.name] = {"status": "not run", "reason": reason}
                continue
            samples = samples or _samples(case, *seeds.integers(1 << 31, size=2).tolist())
            found = _Run(case, contender, samples, repeats).best(
                row["predicted_s"], tunes, deadline
            )
            if "seconds" in found:
                found["share"] = row["predicted_s"] / found["seconds"]
            row["results"][contender.name] = found
        rows.append(row)
    return rows


def _samples(case: Case, seed: int, lengths_seed: int) -> list[Sample]:
    """Rows of different lengths, and then full ones."""
    arrays = attention_case.draw(case, seed)
    uneven = attention_case.ragged(case, arrays, lengths_seed)
    return [attention_case.sample(case, each) for each in (uneven, arrays)]


class _Run:
    """One contender on one case."""

    def __init__(
        self, case: Case, contender: Contender, samples: Sequence[Sample], repeats: int
    ) -> None:
        self._case, self._contender, self._repeats = case, contender, repeats
        self._samples = samples if contender.has_lengths else samples[-1:]
        self._arrays = samples[-1].arrays

    def best(self, expected_s: float, tunes: bool, deadline: float) -> dict[str, Any]:
        """The fastest of the right candidates, or what is wrong with the first that is not."""
        case, contender = self._case, self._contender
        candidates = contender.candidates(case, target_device())
        if not tunes and not candidates[0]:  # it chooses by itself
            candidates = candidates[:1]
        tried: list[dict[str, Any]] = []
        try:
            stored = contender.store(case, self._arrays)
            for sizes in candidates:
                if tried and time.monotonic() > deadline:
                    break
                found, one_s = self._check(stored, sizes)
                if found["status"] == "right":
                    found["seconds"] = self._time(stored, sizes, max(one_s, expected_s))
                tried.append(found | {"sizes": dict(sizes)})
        except Exception as failure:  # a library's own, whatever it is
            reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
            return {"status": "failed", "reason": reason}
        wrong = [found for found in tried if found["status"] != "right"]
        best = wrong[0] if wrong else min(tried, key=lambda found: found["seconds"])
        return best | ({"candidates": tried} if len(candidates) > 1 else {})

    def _attend(self, sizes: Sizes) -> Callable[..., jax.Array]:
        attend = self._contender.attend
        return lambda q_CWNH, arrays, stored: attend(q_CWNH, arrays, stored, **sizes)

    def _check(self, stored: Any, sizes: Sizes) -> tuple[dict[str, Any], float]:
        """Its largest error; and seconds of a run, dispatch included."""
        arrays, attend = self._arrays, self._attend(sizes)

        def poisoned(out_CWNH: jax.Array, arrays: Arrays, stored: Any) -> jax.Array:
            return attend(arrays.q_CWNH, arrays, stored).astype(out_CWNH.dtype)

        def nans() -> jax.Array:
            return jnp.full(arrays.q_CWNH.shape, jnp.nan, jnp.float32)

        lowered = jax.jit(poisoned, donate_argnums=0, keep_unused=True)
        program = lowered.lower(nans(), arrays, stored).compile()
        memory = program.memory_analysis()
        _poison(memory.temp_size_in_bytes if memory is not None else 0)
        errors, is_repeatable, one_s = [], True, 0.0
        for sample in self._samples:
            out_CWNH = program(nans(), sample.arrays, stored)
            errors.append(attention_case.error(sample, out_CWNH))
            again = jax.block_until_ready(nans())
            start = time.perf_counter()
            again = jax.block_until_ready(program(again, sample.arrays, stored))
            one_s = time.perf_counter() - start
            is_repeatable &= bool((out_CWNH == again).all())
        known = [error for error in errors if error is not None]
        worst = max(known) if len(known) == len(errors) else None
        is_right = worst is not None and attention_case.is_right(self._case, worst)
        status = "right" if is_right else "wrong"
        return {"status": status, "error": worst, "is_repeatable": is_repeatable}, one_s

    def _time(self, stored: Any, sizes: Sizes, expected_s: float) -> float:
        return on_device.seconds(
            chained(self._attend(sizes)), jnp.array(self._arrays.q_CWNH), self._arrays, stored,
            expected_s=expected_s, repeats=self._repeats,
        )  # fmt: skip


def chained(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Attention whose queries wait for its last output: one element of it, which costs next to
    nothing.
    """

    def step(q_CWNH: jax.Array, arrays: Arrays, stored: Any) -> jax.Array:
        out_CWNH = attend(q_CWNH, arrays, stored)
        return q_CWNH.at[0, 0, 0, 0].set(out_CWNH[0, 0, 0, 0].astype(q_CWNH.dtype))

    return step


def _poison(num_bytes: int) -> None:
    """Fills memory that the next program is likely to get with NaN."""
    for _ in range(2):
        jnp.full(num_bytes // 4 + 1, jnp.nan, jnp.float32).block_until_ready().delete()
