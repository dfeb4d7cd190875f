"""What answers took, beside what was predicted."""

import dataclasses
from typing import Any

from configs.hardware.spec import HardwareSpec


def stats(
    engine: Any,
    prompt_tokens: int,
    output_tokens: int,
    first_token_s: float,
    seconds: float,
    compile_s: float,
    *,
    machine: HardwareSpec | None = None,
) -> dict[str, Any]:
    """Figures of a run: medians over steps that only decode, as the machine (None: the one at hand)
    predicts them; None where it cannot be measured beside the engine.

    The time to the first token is what the user waited for, compilation included; the rate leaves
    compilation out.
    """
    from inference.planner import report
    from inference.planner.calibration import lookup

    config = engine.config
    machine = machine or lookup.this_machine_or_none(
        model=config.model, implementations=engine.model_runner.implementations
    )
    steps = machine and report.decode_steps(config, engine.records, machine)
    return {
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "ttft_s": first_token_s,
        "output_tok_s": output_tokens / (seconds - compile_s),
        "compile_s": compile_s,
        **(dataclasses.asdict(steps) if steps else _no_steps()),
    }


def nothing() -> dict[str, Any]:
    """The same figures, of a run that had nothing left to do."""
    counts = {"prompt_tokens": 0, "output_tokens": 0, "compile_s": 0.0}
    return counts | dict.fromkeys(("ttft_s", "output_tok_s")) | _no_steps()


def _no_steps() -> dict[str, None]:
    from inference.planner import report

    return dict.fromkeys(field.name for field in dataclasses.fields(report.DecodeReport))


def summary(stats: dict[str, Any]) -> str:
    """The line of figures."""
    line = (
        f"{stats['prompt_tokens']} prompt tokens, first token after {stats['ttft_s']:.2f} s, "
        f"{stats['output_tok_s']:.1f} tokens/s beside {stats['compile_s']:.1f} s of compiling"
    )
    if stats["measured_step_s"] is None:
        return line
    return (
        f"{line}; a step reads {stats['step_bytes'] / 1e6:.0f} MB: "
        f"predicted {1e3 * stats['predicted_step_s']:.1f} ms ({stats['predicted_by']}), "
        f"measured {1e3 * stats['measured_step_s']:.1f} ms, "
        f"{100 * stats['bandwidth_share']:.0f} % of {stats['read_bandwidth'] / 1e9:.0f} GB/s"
    )
