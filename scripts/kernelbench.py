"""Kernels by the clock, beside what they should take: python -m scripts.kernelbench.

Every implementation of attention that this device can run, cuDNN and flash-attn3-jax where they
are; who is wrong has no time. --tune tries sizes and writes layers/kernels/tuning.json.
"""

import dataclasses
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from configs.errors import InputError
from inference.benchmark.attention_case import Case
from scripts import common, shared_flags

_DEVICE = shared_flags.DEVICE
_REPEATS = shared_flags.REPEATS
_SECONDS = flags.DEFINE_float("seconds", 240.0, "Begin nothing more after this.")
_ONLY = flags.DEFINE_list("only", None, "Of all contenders these, by name.")
_TUNE = flags.DEFINE_bool("tune", False, "Try sizes, write layers/kernels/tuning.json.")


def main(argv: Sequence[str]) -> None:
    del argv
    if _REPEATS.value < 3:
        raise InputError(f"--repeats is at least 3, not {_REPEATS.value}")
    if not _SECONDS.value > 0:
        raise InputError(f"--seconds is above 0, not {_SECONDS.value}")
    import jax

    from inference import compilation_cache
    from inference.benchmark import contenders, kernels, tune
    from inference.planner import calibrate
    from layers.kernels.device import target_device

    if _DEVICE.value != "auto":
        jax.config.update("jax_platforms", {"gpu": "cuda"}.get(_DEVICE.value, _DEVICE.value))
    device = target_device()
    if _DEVICE.value not in ("auto", device.platform):
        raise InputError(f"--device={_DEVICE.value}: JAX computes on {device.platform} here")
    if _TUNE.value and device.platform == "cpu":
        raise InputError("--tune needs an accelerator: the CPU has one implementation")
    chosen = _chosen(contenders.everyone())
    compilation_cache.enable()
    seed = secrets.randbits(31)
    hardware = calibrate.this_machine("bfloat16")
    with common.bars() as progress:
        rows = kernels.measure(
            kernels.cases(device.platform, hardware.memory_bytes), chosen, hardware, seed=seed,
            repeats=_REPEATS.value, budget_s=_SECONDS.value, tunes=_TUNE.value, progress=progress,
        )  # fmt: skip
    found: dict[str, Any] = {
        "device": device.kind, "jax": jax.__version__, "hardware": dataclasses.asdict(hardware),
        "seed": seed, "rows": rows,
    }  # fmt: skip
    found["paged_over_contiguous"] = paged_over_contiguous(rows)
    if _TUNE.value:
        found["tuning"] = tune.entry(rows)
    if common.JSON.value:
        print(json.dumps(found), flush=True)
    else:
        print("\n".join(table(found)))
    if _TUNE.value:
        tune.write(device.kind, found["tuning"])  # last: what was measured is told in any case


def _chosen(known: Sequence[Any]) -> list[Any]:
    """The contenders that --only names."""
    names = [contender.name for contender in known]
    for name in _ONLY.value or ():
        if name not in names:
            raise InputError(f"--only lists some of {', '.join(names)}, not {name!r}")
    return [each for each in known if _ONLY.value is None or each.name in _ONLY.value]


def table(found: Mapping[str, Any]) -> list[str]:
    """The lines for people."""
    hardware = found["hardware"]
    rate = hardware["rates"]["bfloat16"]
    lines = [
        f"{found['device']}, jax {found['jax']}; measured: memory "
        f"{hardware['read_bandwidth'] / 1e9:.0f} GB/s, bfloat16 products {rate / 1e12:.1f} TFLOP/s",
        f"{'':18}{'us':>10}{'of the bound':>14}{'of the fastest':>16}{'error':>10}",
    ]
    for row in found["rows"]:
        lines += [
            "",
            f"{row['case']}: {row['bytes'] / 1e6:.1f} MB, {row['flops'] / 1e9:.2f} GFLOP, "
            f"{row['bound']}: {1e6 * row['predicted_s']:.1f} us",
        ]
        results = row["results"]
        fastest_s = min((r["seconds"] for r in results.values() if "seconds" in r), default=0.0)
        lines += [f"  {name:16}{_line(result, fastest_s)}" for name, result in results.items()]
    lines += [""] if found["paged_over_contiguous"] else []
    for name, ratio in found["paged_over_contiguous"].items():
        lines.append(f"{name}: pages in random order take {ratio:.2f} x the time of pages in order")
    if "tuning" in found:
        lines += ["", f"tuning.json: {found['tuning']}"]
    return lines


def paged_over_contiguous(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Times on pages in random order over those on pages one after another: of each implementation
    the largest ratio.
    """
    names = [field.name for field in dataclasses.fields(Case) if field.name != "is_shuffled"]

    def sizes(row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(row[name] for name in names)

    in_order = {sizes(row): row["results"] for row in rows if not row["is_shuffled"]}
    found: dict[str, float] = {}
    for row in rows:
        for name, result in row["results"].items() if row["is_shuffled"] else ():
            beside = in_order.get(sizes(row), {}).get(name, {})
            if "seconds" in result and "seconds" in beside:
                ratio = result["seconds"] / beside["seconds"]
                found[name] = max(ratio, found.get(name, 0.0))
    return found


def _line(result: Mapping[str, Any], fastest_s: float) -> str:
    if "reason" in result:
        return f"{result['status']}: {result['reason']}"
    if "seconds" not in result:
        off = "not finite" if result["error"] is None else f"error {result['error']:.1e}"
        return f"{result['status'].upper()}: {off}"
    sizes = ", ".join(f"{name} {value}" for name, value in result["sizes"].items())
    bits = "" if result["is_repeatable"] else "bits vary"
    notes = ", ".join(filter(None, (sizes, bits)))
    seconds = result["seconds"]
    return (
        f"{1e6 * seconds:10.1f}{result['share']:14.0%}{fastest_s / seconds:16.0%}"
        f"{result['error']:10.1e}   {notes}".rstrip()
    )


if __name__ == "__main__":
    common.run(main)
