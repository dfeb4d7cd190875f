"""What answers took, beside what was predicted."""

import dataclasses
import time
from typing import Any

from configs.errors import InputError
from configs.hardware.spec import HardwareSpec
from scripts.reports import tables

_LEAST_COMPILE_S = 0.05  # less is no news


class Stopwatch:
    """Times answers from here on, as their outputs come."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._start, self._compiled = time.perf_counter(), engine.compile_s
        self._first = self._last = (0, 0.0, 0.0)
        self._passes, self._accepted = self._counted

    def note(self, num_tokens: int) -> None:
        """An output of so many tokens has come."""
        if not num_tokens:
            return
        seconds = time.perf_counter() - self._start
        compile_s = self._engine.compile_s - self._compiled
        self._last = self._last[0] + num_tokens, seconds, compile_s
        if not self._first[0]:
            self._first = self._last

    def figures(self, is_one: bool) -> dict[str, Any]:
        """Seconds until the first token, compilation included, as the user waited; and tokens a
        second without compilation: of one answer those after its first output (None where there are
        none), of several all of them.
        With drafts also tokens that a pass through the model gives a sequence, which without are 1.
        """
        num_tokens, seconds, compile_s = self._last
        num_passes, num_accepted = self._counted
        num_passes, num_accepted = num_passes - self._passes, num_accepted - self._accepted
        speculates = num_passes and self._engine.config.engine.drafts.proposer
        first, first_s, first_compile_s = self._first if is_one else (0, 0.0, 0.0)
        decode_s = seconds - first_s - (compile_s - first_compile_s)
        return {
            "output_tokens": num_tokens,
            "ttft_s": self._first[1],
            "output_tok_s": (num_tokens - first) / decode_s if num_tokens > first else None,
            "compile_s": compile_s,
            "tokens_per_pass": 1 + num_accepted / num_passes if speculates else None,
        }

    @property
    def _counted(self) -> tuple[int, int]:
        """Passes and accepted drafts of the engine so far."""
        counters = self._engine.scheduler.counters
        return counters.num_passes, counters.num_accepted


def stats(
    engine: Any,
    prompt_tokens: int,
    timed: dict[str, Any],
    *,
    machine: HardwareSpec | None = None,
) -> dict[str, Any]:
    """Figures of a run: what a `Stopwatch` saw, and medians over steps that only decode, as the
    machine (None: the one at hand) predicts them; None where it cannot be measured beside the
    engine.
    """
    from inference.planner.calibration import lookup
    from scripts.reports import decode_report

    config = engine.config
    machine = machine or lookup.this_machine_or_none(
        model=config.model, implementations=engine.model_runner.implementations
    )
    steps = machine and decode_report.decode_steps(config, engine.records, machine)
    predicted = dataclasses.asdict(steps) if steps else _no_steps()
    return {
        "prompt_tokens": prompt_tokens, "busiest_expert": busiest_expert(engine), **timed,
        **predicted,
    }  # fmt: skip


def busiest_expert(engine: Any) -> float | None:
    """Visits of the busiest expert of a mixture over the mean of its experts, on average of all
    mixtures of the model: 1 where all are visited alike. None: nobody counts them, or nobody came.
    """
    try:
        visits_LE = engine.model_runner.expert_visits()
    except InputError:  # there are no experts, or each host has a part of the sums
        return None
    if not visits_LE.any():
        return None
    return float((visits_LE.max(1) / visits_LE.mean(1)).mean())


def nothing() -> dict[str, Any]:
    """The same figures, of a run that had nothing left to do."""
    counts = {"prompt_tokens": 0, "output_tokens": 0, "compile_s": 0.0}
    unknown = "ttft_s", "output_tok_s", "tokens_per_pass", "busiest_expert"
    return counts | dict.fromkeys(unknown) | _no_steps()


def _no_steps() -> dict[str, None]:
    from scripts.reports import decode_report

    return dict.fromkeys(field.name for field in dataclasses.fields(decode_report.DecodeReport))


def summary(stats: dict[str, Any]) -> str:
    """The line of figures, each group with its unit and its base."""
    groups = [f"prompt {stats['prompt_tokens']} tokens", f"TTFT {stats['ttft_s']:.2f} s"]
    if stats["compile_s"] >= _LEAST_COMPILE_S:
        groups.append(f"compiling {stats['compile_s']:.1f} s")
    if stats["output_tok_s"] is not None:
        groups.append(f"decode {stats['output_tok_s']:.1f} tok/s")
    if stats["tokens_per_pass"] is not None:
        groups.append(f"accepted {stats['tokens_per_pass']:.1f} tokens/pass")
    if stats["measured_step_s"] is not None:
        groups.append(
            f"step {1e3 * stats['measured_step_s']:.1f} ms "
            f"(predicted {1e3 * stats['predicted_step_s']:.1f} ms, {stats['predicted_by']})"
        )
        share = tables.bandwidth_share(stats["bandwidth_share"], stats["read_bandwidth"])
        groups.append(f"read {stats['step_bytes'] / 1e6:.0f} MB/step, {share}")
    return "  |  ".join(groups)
