"""Tests and measures the device at hand in 14 minutes: python -m scripts.device (make device).

First whether decoding is right, then every other test of kernels and 500 random batches, kernels
beside baselines and their sizes, whole steps beside predictions and beside PyTorch's, an engine
under load, and a real model's tokens. Every part is a subprocess with a limit of its own; after
each the page and the JSON are written again, so that nothing found is lost. --resume runs what is
not done yet, on any later day. Needs no network, and only the packages that `docs/kernels.md`
lists.
"""

from scripts import interrupts  # noqa: F401

# isort: split
import dataclasses
import datetime
import importlib.util
import json
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import flags

from configs import presets
from configs.errors import InputError
from configs.settings.kernels import ATTENTIONS
from inference.benchmark import subprocesses
from inference.benchmark.subprocesses import Outcome, Subprocess
from inference.checkpoints import sources
from inference.files import user_files
from scripts import common
from scripts.flags import shared_flags
from scripts.reports import device_text

_DEVICE = shared_flags.DEVICE
_RESULTS = flags.DEFINE_string("results", "docs/results", "Folder of the page and the JSON.")
_BUDGET_S = flags.DEFINE_float("budget_s", 840.0, "Seconds for all parts together.")
_PARTS = flags.DEFINE_list("parts", None, "Only these, by name, added to this device's page.")
_RESUME = flags.DEFINE_bool("resume", False, "Only those that are not done on this device's page.")

_READ = ("device", "results", "budget_s", "parts", "resume")
_ROOT = Path(__file__).resolve().parent.parent
_PROBE = """
import jax, json
device = jax.devices()[0]
print(json.dumps([device.platform, device.device_kind, jax.__version__]))
"""
_PAGE_TOKENS = {"cpu": 16, "gpu": 64, "tpu": 128}
_MODEL = "smollm2-135m"
_PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time")


def main(_: Sequence[str]) -> None:
    common.check_flags("device", {"device": _READ})
    if _DEVICE.value not in ("auto", "cpu"):
        raise InputError(f"--device is auto or cpu, not {_DEVICE.value!r}")
    folder = Path(_RESULTS.value)
    if not folder.is_dir():
        raise InputError(f"--results={_RESULTS.value} is no folder")
    deadline = time.monotonic() + _BUDGET_S.value
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92"}
    environment |= {"JAX_PLATFORMS": "cpu"} if _DEVICE.value == "cpu" else {}
    kind, device, version = _probe(environment)
    if kind == "cpu" and _DEVICE.value == "auto":
        print("no accelerator: JAX computes on this machine's cpu, so nothing is measured")
        return
    environment |= {"JAX_PLATFORMS": {"gpu": "cuda,cpu"}.get(kind, kind)}
    page_fields: dict[str, Any] = {
        "device": device, "jax": version, "python": platform.python_version(),
    }  # fmt: skip
    names = [part.name for part in _parts(kind, [])]
    chosen = shared_flags.chosen(_PARTS, names)
    page, on_page = _page(folder, page_fields)
    page_fields |= {"date": page.name[-len("2026-01-31") :], "parts": []}
    if _RESUME.value:
        chosen = [name for name in chosen if name not in on_page or on_page[name].status != "done"]
    outcomes = [outcome for name, outcome in on_page.items() if name not in chosen]
    order = {name: at for at, name in enumerate(names)}
    parts = (part for part in _parts(kind, outcomes) if part.name in chosen)
    for outcome in subprocesses.run(parts, deadline - time.monotonic(), _ROOT, environment):
        if outcome.status != "not run" or outcome.name not in on_page:
            on_page[outcome.name] = outcome
        outcomes.append(on_page[outcome.name])
        in_order = sorted(on_page.values(), key=lambda part: order.get(part.name, len(order)))
        page_fields["parts"] = [dataclasses.asdict(part) for part in in_order]
        texts = {
            ".json": json.dumps(page_fields, indent=1),
            ".md": device_text.page(page_fields).rstrip(),
        }
        user_files.write({page.with_suffix(k): f"{v}\n".encode() for k, v in texts.items()})
        print(f"{outcome.name}: {outcome.status}, {outcome.seconds:.0f} s", flush=True)
    print(f"{page}.md")
    is_bad = any(outcome.status in ("failed", "out of time") for outcome in outcomes)
    if is_bad or not all(answer.agrees for answer in device_text.tokens(page_fields["parts"])):
        sys.exit(1)


def _page(folder: Path, page_fields: Mapping[str, Any]) -> tuple[Path, dict[str, Outcome]]:
    """The page to write, without a suffix, and its outcomes by name: the newest of this kind of
    device and versions where parts are added to it; else one of today.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", page_fields["device"].lower()).strip("-")
    is_added = _PARTS.value is not None or _RESUME.value
    for path in sorted(folder.glob(f"{slug}-????-??-??.json"), reverse=True) if is_added else ():
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
            if all(earlier[name] == page_fields[name] for name in ("device", "jax", "python")):
                parts = ({"date": earlier["date"]} | part for part in earlier["parts"])
                return path.with_suffix(""), {part["name"]: Outcome(**part) for part in parts}
        except (ValueError, TypeError, KeyError):
            raise InputError(f"{path} is damaged: remove it") from None
    return folder / f"{slug}-{datetime.date.today()}", {}


def _probe(environment: dict[str, str]) -> tuple[str, str, str]:
    """Platform, kind and JAX's version, by a subprocess, which frees the device's memory."""
    (outcome,) = subprocesses.run(
        [Subprocess("probe", (sys.executable, "-c", _PROBE), 120.0, is_json=True)],
        120.0, _ROOT, environment,
    )  # fmt: skip
    if outcome.status != "done":
        last = outcome.tail.splitlines()[-1:] or ["no answer"]
        raise InputError(f"JAX finds no device: {last[0]}")
    kind, device, version = outcome.result
    return kind, device, version


# --- the parts ------------------------------------------------------------------------------------


def _parts(kind: str, outcomes: Sequence[Outcome]) -> Iterator[Subprocess]:
    """Subprocesses for a platform, the most important first; some depend on earlier outcomes."""
    on_device = "tests/device", "-m", "device", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"
    yield _module("decode", 40, "pytest", *on_device, "-x", "-k", "test_decoding")
    decode = next((outcome for outcome in outcomes if outcome.name == "decode"), None)
    is_right = decode is None or decode.status == "done"
    tests = _module("tests", 240, "pytest", *on_device, "-k", "not test_decoding", *_workers(kind))
    tests = dataclasses.replace(tests, command=("env", _ON_DEMAND, *tests.command))
    yield tests if is_right else dataclasses.replace(tests, missing="decoding is not right")
    if kind == "cpu":
        yield _app("kernels", 120, "kernelbench")
    else:
        baselines = "cudnn,flash-attn3-jax,flash-attn3-contiguous"
        # A kernel of ours that hangs would take the time of all others.
        only = () if is_right else (f"--only=reference,{baselines}",)
        yield _app("kernels", 140, "kernelbench", "--seconds=120", *only)
        tune = _app("tune", 170, "kernelbench", "--tune", "--seconds=150")
        yield tune if is_right else dataclasses.replace(tune, missing="decoding is not right")
    kernel = _shown_right(outcomes)
    pages = f"--set=engine.cache.page_tokens={_PAGE_TOKENS[kind]}"
    for name, limit_s, flags_of in _STEPS if kind != "cpu" else _SMALL_STEPS:
        attention = f"--set=engine.kernels.attention={kernel or 'reference'}"
        if name == _PEER:
            yield _peer(kind, limit_s, flags_of)
        else:
            yield _app(name, limit_s, "bench", "--random_weights", pages, attention, *flags_of)
    yield from _tokens(pages, kernel)


def _peer(kind: str, limit_s: float, sizes: Sequence[str]) -> Subprocess:
    command = (sys.executable, "-m", "scripts.reports.peers.torch_steps", *sizes)
    missing = "computes on GPUs" if kind == "tpu" else None
    if missing is None and importlib.util.find_spec("torch") is None:
        missing = "torch is not installed"
    return Subprocess(_PEER, command, limit_s, is_json=True, missing=missing)


def _workers(kind: str) -> tuple[str, ...]:
    """Most of a test's time is compilation, on one core of the host. A TPU has one process."""
    return ("-n", "8") if kind == "gpu" and importlib.util.find_spec("xdist") else ()


_ON_DEMAND = "XLA_PYTHON_CLIENT_PREALLOCATE=false"  # processes share the device's memory
_PEER = "torch"
_8B, _13B = "--model=llama3-8b", "--model=llama2-13b"
_DECODE, _PREFILL = "--decode=1x1024,16x1024,64x1024", "--prefill=1x512,1x4096"
_LOAD = (  # 64 prompts of 512 tokens at a time, then four of 4,096
    *("--concurrency=64", "--prompt_tokens=512", "--new_tokens=128", "--prefill_tokens=4096"),
    *("--set=engine.max_context=4224", "--set=engine.cache.overcommit=true"),
    *("--set=engine.cache.cache_bytes=8000000000", "--set=engine.shapes.decode_rows=(64,)"),
    *("--set=engine.shapes.chunk_tokens=512", "--set=engine.shapes.prefill_chunks=(4,)"),
)
_STEPS: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    ("llama3-8b", 45, (_8B, _DECODE)),
    ("llama3-8b-prefill", 60, (_8B, _PREFILL)),
    (_PEER, 150, (_DECODE, _PREFILL)),
    ("load", 130, (_8B, *_LOAD)),
    ("llama2-13b", 50, (_13B, "--decode=1x1024,16x1024,32x1024,64x1024")),
    ("llama2-13b-gqa", 30, (_13B, "--set=model.pattern.mixer.num_kv_heads=8", "--decode=256x1024")),
    ("llama3-8b-int8", 30, (_8B, "--weights=int8", "--decode=1x1024,16x1024")),
    ("llama3-8b-fp8", 30, (_8B, "--weights=fp8", "--decode=1x1024,16x1024")),
    ("llama3-8b-int4", 35, (_8B, "--weights=int4", "--decode=1x1024,16x1024")),
    ("qwen3-30b-a3b", 75, ("--model=qwen3-30b-a3b", "--decode=1x1024,8x1024,64x1024")),
    ("deepseek-v2-lite", 110, ("--model=deepseek-v2-lite", "--decode=1x1024,64x1024")),
    ("mamba2-2.7b", 40, ("--model=mamba2-2.7b", "--decode=1x1024,64x1024")),
    ("engine", 40, (_8B, "--decode=64x256", "--gap")),
)
_SMALL_STEPS: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    (
        "smollm2-135m-layer", 60,
        ("--model=smollm2-135m", "--set=model.num_layers=1", "--decode=1x64,4x128", "--gap"),
    ),
    (
        "smollm2-135m-layer-prefill", 60,
        ("--model=smollm2-135m", "--set=model.num_layers=1", "--prefill=2x64"),
    ),
    (
        _PEER, 60,
        (
            *("--decode=1x64", "--prefill=2x64"),
            *("--layers=1", "--width=512", "--hidden=256", "--vocab_size=1000"),
        ),
    ),
)  # fmt: skip


def _tokens(pages: str, kernel: str | None) -> Iterator[Subprocess]:
    """The real model's greedy tokens on the CPU, and by the device's reference and kernel."""
    missing = None
    if sources.cached_path(presets.get(_MODEL).weights) is None:
        missing = f"the weights of {_MODEL} are not on this machine"
    for package in ("gguf", "tokenizers"):
        if missing is None and importlib.util.find_spec(package) is None:
            missing = f"{_MODEL} needs {package}, which is not installed"
    prompts = [f"--prompt={prompt}" for prompt in _PROMPTS] + [pages, "--max_new_tokens=32"]
    prompts += [f"--model={_MODEL}", "--ignore_eos", "--logprobs=5", "--json"]
    for name, attention, limit_s in (
        ("tokens-cpu", "reference", 25), ("tokens-reference", "reference", 25),
        ("tokens-kernel", kernel, 25),
    ):  # fmt: skip
        part = _module(name, limit_s, "scripts.generate", *prompts)
        command = (*part.command, f"--set=engine.kernels.attention={attention}")
        if name == "tokens-cpu":
            command = ("env", "JAX_PLATFORMS=cpu", *command)
        reason = missing or (None if attention else "no kernel was shown right")
        yield dataclasses.replace(part, command=command, is_json=True, missing=reason)


def _shown_right(outcomes: Sequence[Outcome]) -> str | None:
    """A kernel of ours that ran, and was right and repeatable wherever it ran."""
    measured = [outcome for outcome in outcomes if outcome.name in ("kernels", "tune")]
    rows = [row for outcome in measured if outcome.result for row in outcome.result["rows"]]
    for name in ATTENTIONS[1:]:
        results = [row["results"][name] for row in rows if name in row["results"]]
        began = [result for result in results if result["status"] not in ("not run", "out of time")]
        if began and all(
            result["status"] == "right" and result["is_repeatable"] for result in began
        ):
            return name
    return None


def _app(name: str, limit_s: float, app: str, *arguments: str) -> Subprocess:
    module = _module(name, limit_s, f"scripts.{app}", "--json_lines", *arguments)
    return dataclasses.replace(module, is_json=True)


def _module(name: str, limit_s: float, module: str, *arguments: str) -> Subprocess:
    return Subprocess(name, (sys.executable, "-m", module, *arguments), limit_s)


if __name__ == "__main__":
    common.run(main)
