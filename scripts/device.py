"""What the device at hand does, in nine minutes: python -m scripts.device (make device).

Whether its kernels are right comes first, then the sizes that are best, kernels beside their peers,
whole decode steps beside what they should take. Every part is a program with a limit of its own;
after each the page and the JSON are written anew, so that what was found is kept. Needs no network
and no package that an image with JAX lacks.
"""

import dataclasses
import datetime
import importlib.util
import json
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from configs import presets
from configs.engine import ATTENTIONS
from configs.errors import InputError
from inference import files
from inference.benchmark import programs
from inference.benchmark.programs import Outcome, Program
from inference.checkpoints import sources
from scripts import common, device_text, shared_flags

_DEVICE = shared_flags.DEVICE
_RESULTS = flags.DEFINE_string("results", "docs/results", "Folder of the page and the JSON.")
_BUDGET_S = flags.DEFINE_float("budget_s", 530.0, "Seconds for all parts together.")
_PARTS = flags.DEFINE_list("parts", None, "Only these, by name.")

_ROOT = Path(__file__).resolve().parent.parent
_PROBE = """
import jax, json
device = jax.devices()[0]
print(json.dumps([device.platform, device.device_kind, jax.__version__]))
"""
_PAGE_TOKENS = {"cpu": 16, "gpu": 64, "tpu": 128}
_MODEL = "smollm2-135m"
_PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time")


def main(argv: Sequence[str]) -> None:
    del argv
    if _DEVICE.value not in ("auto", "cpu"):
        raise InputError(f"--device is auto or cpu, not {_DEVICE.value!r}")
    folder = Path(_RESULTS.value)
    if not folder.is_dir():
        raise InputError(f"--results={_RESULTS.value} is no folder")
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
    environment |= {"JAX_PLATFORMS": "cpu"} if _DEVICE.value == "cpu" else {}
    kind, device, version = _probe(environment)
    if kind == "cpu" and _DEVICE.value == "auto":
        print("no accelerator: JAX computes on this machine's cpu, so nothing is measured")
        return
    environment |= {"JAX_PLATFORMS": {"gpu": "cuda,cpu"}.get(kind, kind)}
    found: dict[str, Any] = {
        "device": device, "date": str(datetime.date.today()), "jax": version,
        "python": platform.python_version(), "parts": [],
    }  # fmt: skip
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    place = folder / f"{name}-{found['date']}"
    outcomes: list[Outcome] = []
    chosen = _chosen(_parts(kind, outcomes))
    for outcome in programs.run(chosen, _BUDGET_S.value, _ROOT, environment):
        outcomes.append(outcome)
        found["parts"].append(dataclasses.asdict(outcome))
        for ending, text in (
            (".json", json.dumps(found, indent=1)),
            (".md", device_text.page(found)),
        ):
            with files.atomic_file(place.with_suffix(ending)) as file:
                file.write(f"{text.rstrip()}\n".encode())
        print(f"{outcome.name}: {outcome.status}, {outcome.seconds:.0f} s", flush=True)
    print(f"{place}.md")
    if any(outcome.status in ("failed", "out of time") for outcome in outcomes):
        sys.exit(1)


def _probe(environment: dict[str, str]) -> tuple[str, str, str]:
    """Platform and kind of the device, and the version of JAX: asked of another process, since
    whoever asks holds the device's memory.
    """
    (outcome,) = programs.run(
        [Program("probe", (sys.executable, "-c", _PROBE), 120.0, is_json=True)],
        120.0, _ROOT, environment,
    )  # fmt: skip
    if outcome.status != "done":
        last = outcome.tail.splitlines()[-1:] or ["no answer"]
        raise InputError(f"JAX finds no device: {last[0]}")
    kind, device, version = outcome.result
    return kind, device, version


# --- the parts ------------------------------------------------------------------------------------


def _parts(kind: str, outcomes: Sequence[Outcome]) -> Iterator[Program]:
    """What is run on a platform, in order of worth; later parts look at the earlier ones' ends."""
    on_device = "tests/device", "-m", "device", "-q", "-p", "no:cacheprovider"
    yield _module("decode is right", 100, "pytest", *on_device, "-x", "-k", "test_decoding")
    is_right = all(outcome.status == "done" for outcome in outcomes)
    tests = _module("device tests", 90, "pytest", *on_device, "-k", "not test_decoding")
    yield tests if is_right else dataclasses.replace(tests, missing="decoding is not right")
    if kind == "cpu":
        yield _app("kernels", 120, "kernelbench")
    elif is_right:
        yield _app("kernels", 190, "kernelbench", "--tune", "--seconds=130")
    else:  # one that hangs would take all others along
        yield _app("kernels", 120, "kernelbench", "--only=reference,cudnn,flash-attn3-jax")
    kernel = _shown_right(outcomes)
    engine = [f"--set=engine.page_tokens={_PAGE_TOKENS[kind]}"]
    engine += [] if kernel is None else [f"--set=engine.attention={kernel}"]
    for name, limit_s, flags_of in _STEPS if kind != "cpu" else _SMALL_STEPS:
        yield _app(name, limit_s, "bench", "--random_weights", *engine, *flags_of)
    yield from _tokens(kind)


_13B = "--model=llama2-13b"
_STEPS: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    ("llama3-8b", 70, ("--model=llama3-8b", "--decode=1x1024")),
    ("llama2-13b", 100, (_13B, "--decode=1x1024,16x1024,64x1024")),
    ("llama2-13b, K=8", 70, (_13B, "--set=model.num_kv_heads=8", "--decode=256x1024")),
    ("llama3-8b, the engine's part", 100, ("--model=llama3-8b", "--decode=64x256", "--gap")),
)
_SMALL_STEPS: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    (
        "smollm2-135m, a layer", 60,
        ("--model=smollm2-135m", "--set=model.num_layers=1", "--decode=1x64,4x128", "--gap"),
    ),
)  # fmt: skip


def _tokens(kind: str) -> Iterator[Program]:
    """The real model's greedy tokens, here and on the CPU."""
    missing = None
    if sources.cached_path(presets.get(_MODEL).weights) is None:
        missing = f"the weights of {_MODEL} are not on this machine"
    for package in ("gguf", "tokenizers"):
        if missing is None and importlib.util.find_spec(package) is None:
            missing = f"{_MODEL} needs {package}, which is not installed"
    asked = [f"--prompt={prompt}" for prompt in _PROMPTS]
    asked += [f"--model={_MODEL}", "--set=model.dtype=float32", "--max_new_tokens=32"]
    command = _app("", 0, "generate", *asked).command
    yield Program(f"tokens on {kind}", command, 60, is_json=True, missing=missing)
    if kind != "cpu":
        command = ("env", "JAX_PLATFORMS=cpu", *command)
        yield Program("tokens on cpu", command, 60, is_json=True, missing=missing)


def _shown_right(outcomes: Sequence[Outcome]) -> str | None:
    """A kernel of ours that was right wherever it ran, and ran."""
    results = [outcome.result for outcome in outcomes if outcome.name == "kernels"]
    rows = (results[0] or {}).get("rows", []) if results else []
    for name in ATTENTIONS:
        statuses = [row["results"].get(name, {}).get("status") for row in rows]
        if name != "reference" and {*statuses} - {"not run"} == {"right"}:
            return name
    return None


def _chosen(parts: Iterator[Program]) -> Iterator[Program]:
    """Those that --parts names."""
    for part in parts:
        if _PARTS.value is None or part.name in _PARTS.value:
            yield part


def _app(name: str, limit_s: float, app: str, *arguments: str) -> Program:
    own = _module(name, limit_s, f"scripts.{app}", "--json", *arguments)
    return dataclasses.replace(own, is_json=True)


def _module(name: str, limit_s: float, module: str, *arguments: str) -> Program:
    return Program(name, (sys.executable, "-m", module, *arguments), limit_s)


if __name__ == "__main__":
    common.run(main)
