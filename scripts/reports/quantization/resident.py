"""Resident bytes of a process that loads a model and generates, beyond those that it has before.

    python -m scripts.reports.quantization.resident MODEL WEIGHTS

Prints JSON: the peak while weights are loaded, and that of a second answer, once everything is
compiled.
"""

import gc
import json
import sys
from pathlib import Path

import jax

from inference.engine import Engine
from inference.request import SamplingParams


def main(model: str, weights: str) -> None:
    jax.numpy.zeros(1).block_until_ready()
    _forget_peak()
    before = _resident("VmRSS")
    engine = Engine.from_model(model, max_seqs=1, weights=weights, cache_bytes=50_000_000)
    loading = _resident("VmHWM") - before
    params = SamplingParams(max_new_tokens=16)
    engine.generate(["Once upon a time"], params)
    _forget_peak()
    engine.generate(["The ridge is where"], params)
    print(json.dumps({"loading": loading, "running": _resident("VmHWM") - before}))


def _resident(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def _forget_peak() -> None:
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main(*sys.argv[1:])
