"""Tests and measures the device at hand: python -m scripts.device (make device).

In this order: the device's rates, tests of kernels, products and whole steps in each format beside
PyTorch's, XLA's choices, kernels of attention beside baselines and their sizes, prompts, an engine
under load, other models, 500 random batches, and a real model's tokens. One command takes at most
9 minutes; --resume runs what is not done yet by the present sources, on any later day, for the same
kind of device. Every part is a subprocess with a limit of its own; after each the page and the JSON
are written again, so that nothing found is lost. Needs no network, and only the packages that
`docs/kernels.md` lists.
"""

from scripts import interrupts  # noqa: F401

# isort: split
import dataclasses
import datetime
import hashlib
import importlib.util
import json
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
_ARTIFACTS = flags.DEFINE_string(
    "artifacts", "build/device", "Folder of steps' HLO, XLA's choices and tuning.json."
)
_BUDGET_S = flags.DEFINE_float("budget_s", 540.0, "Seconds for all parts together.")
_PARTS = flags.DEFINE_list("parts", None, "Only these, by name, added to this device's page.")
_RESUME = flags.DEFINE_bool(
    "resume", False, "Only those that are not done on this device's page, by the present sources."
)

_READ = ("device", "results", "artifacts", "budget_s", "parts", "resume")
_ROOT = Path(__file__).resolve().parent.parent
_KERNELS = _ROOT / "layers" / "kernels"
# What programs come from, and what tests them. Parts write JSON and text there.
_PROGRAMS = ("configs", "inference/benchmark", "inference/runtime", "inference/sampling", "layers")
_CHECKS = ("tests/device", "tests/layers")
_CODE = (".py", ".cc", ".h")
_PROBE = """
import jax, json
device = jax.devices()[0]
print(json.dumps([device.platform, device.device_kind, jax.__version__]))
"""
_Steps = tuple[tuple[str, float, tuple[str, ...]], ...]  # names, limits in seconds, arguments
_PAGE_TOKENS = {"cpu": 16, "gpu": 64, "tpu": 128}
_MODEL = "smollm2-135m"
_PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time")


class _Machine(NamedTuple):
    """What is measured."""

    platform: str  # "cpu", "gpu" or "tpu"
    kind: str  # of device, as JAX names it
    jax: str  # version

    @property
    def slug(self) -> str:
        """The kind, as files are named."""
        return re.sub(r"[^a-z0-9]+", "-", self.kind.lower()).strip("-")


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
    machine = _probe(environment)
    if machine.platform == "cpu" and _DEVICE.value == "auto":
        print("no accelerator: JAX computes on this machine's cpu, so nothing is measured")
        return
    environment |= {"JAX_PLATFORMS": {"gpu": "cuda,cpu"}.get(machine.platform, machine.platform)}
    page_fields: dict[str, Any] = {
        "device": machine.kind, "jax": machine.jax, "python": platform.python_version(),
    }  # fmt: skip
    all_parts = list(_parts(machine, []))
    names, sources = [part.name for part in all_parts], _sources(all_parts)
    chosen = shared_flags.chosen(_PARTS, names)
    page, on_page = _page(folder, machine, page_fields)
    current = {name for name, part in on_page.items() if part.sources == sources.get(name)}
    page_fields |= {"date": page.name[-len("2026-01-31") :], "parts": []}
    if _RESUME.value:
        done = {name for name in current if on_page[name].status == "done"}
        chosen = [name for name in chosen if name not in done]
    outcomes = [on_page[name] for name in on_page if name in current and name not in chosen]
    order = {name: at for at, name in enumerate(names)}
    if machine.platform == "gpu":
        _choices_path(machine).parent.mkdir(exist_ok=True)
    parts = (part for part in _parts(machine, outcomes) if part.name in chosen)
    for outcome in subprocesses.run(parts, deadline - time.monotonic(), _ROOT, environment):
        outcome.sources = sources[outcome.name]
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
        _keep_files(machine)
        print(f"{outcome.name}: {outcome.status}, {outcome.seconds:.0f} s", flush=True)
    print(f"{page}.md")
    is_bad = any(outcome.status in ("failed", "out of time") for outcome in outcomes)
    if is_bad or not all(answer.agrees for answer in device_text.tokens(page_fields["parts"])):
        sys.exit(1)


def _keep_files(machine: _Machine) -> None:
    """Copies what parts wrote into the tree to the artifacts."""
    if machine.platform == "cpu":
        return
    folder = Path(_ARTIFACTS.value)
    folder.mkdir(parents=True, exist_ok=True)
    for path in (_KERNELS / "tuning.json", _choices_path(machine)):
        if path.is_file():
            shutil.copy(path, folder)


def _page(
    folder: Path, machine: _Machine, page_fields: Mapping[str, Any]
) -> tuple[Path, dict[str, Outcome]]:
    """The page to write, without a suffix, and its outcomes by name: the newest of this kind of
    device and versions where parts are added to it; else one of today.
    """
    is_added = _PARTS.value is not None or _RESUME.value
    for path in (
        sorted(folder.glob(f"{machine.slug}-????-??-??.json"), reverse=True) if is_added else ()
    ):
        try:
            earlier = json.loads(path.read_text(encoding="utf-8"))
            if all(earlier[name] == page_fields[name] for name in ("device", "jax", "python")):
                parts = ({"date": earlier["date"]} | part for part in earlier["parts"])
                return path.with_suffix(""), {part["name"]: Outcome(**part) for part in parts}
        except (ValueError, TypeError, KeyError):
            raise InputError(f"{path} is damaged: remove it") from None
    return folder / f"{machine.slug}-{datetime.date.today()}", {}


def _sources(parts: Sequence[Subprocess]) -> dict[str, str]:
    """Digests of what parts run, by name: with other code their results are old ones."""
    programs, checks = _digest(_PROGRAMS), _digest((*_PROGRAMS, *_CHECKS))
    return {part.name: checks if "pytest" in part.command else programs for part in parts}


def _digest(folders: Sequence[str]) -> str:
    contents = hashlib.sha256()
    for path in (path for folder in folders for path in sorted((_ROOT / folder).rglob("*"))):
        if path.suffix in _CODE:
            contents.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes())
    return contents.hexdigest()[:16]


def _probe(environment: dict[str, str]) -> _Machine:
    """The machine at hand, by a subprocess, which frees the device's memory."""
    (outcome,) = subprocesses.run(
        [Subprocess("probe", (sys.executable, "-c", _PROBE), 120.0, is_json=True)],
        120.0, _ROOT, environment,
    )  # fmt: skip
    if outcome.status != "done":
        last = outcome.tail.splitlines()[-1:] or ["no answer"]
        raise InputError(f"JAX finds no device: {last[0]}")
    return _Machine(*outcome.result)


# --- the parts ------------------------------------------------------------------------------------


def _parts(machine: _Machine, outcomes: Sequence[Outcome]) -> Iterator[Subprocess]:
    """Subprocesses for a machine, the most important first; some depend on earlier outcomes.

    First the device's rates, then whether kernels are right, what each format's products and steps
    take, and XLA's choices for these steps; then what takes longer or depends less on kernels.
    """
    kind = machine.platform
    yield _app("ceilings", 40, "kernelbench", "--ceilings")
    yield from _correctness(kind, outcomes)
    yield _app("products", 150, "kernelbench", "--products", "--seconds=130")
    if kind == "cpu":
        yield _app("kernels", 120, "kernelbench")
        yield from _steps(_SMALL_STEPS, kind, outcomes)
    else:
        yield from _steps(_FIRST_STEPS, kind, outcomes)
        if kind == "gpu":
            yield from _choices(machine, outcomes)
            yield _without_graphs(kind, outcomes)
        yield from _attention_kernels(_is_right(outcomes))
        yield from _steps(_STEPS, kind, outcomes)
    yield _if_right(_tested("batches", 150, kind, _ATTENTION, "-k", "500"), outcomes)
    yield from _tokens(_pages(kind), _kernel(kind, outcomes))


def _steps(steps: _Steps, kind: str, outcomes: Sequence[Outcome]) -> Iterator[Subprocess]:
    for name, limit_s, arguments in steps:
        if name in _PEERS:
            yield _peer(kind, name, limit_s, arguments)
        else:
            yield _app(name, limit_s, "bench", *_engine(kind, outcomes), *arguments)


def _engine(kind: str, outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    """Flags of an engine with random weights, and the kernel that was shown right."""
    attention = _kernel(kind, outcomes) or "reference"
    return "--random_weights", _pages(kind), f"--set=engine.kernels.attention={attention}"


def _pages(kind: str) -> str:
    return f"--set=engine.cache.page_tokens={_PAGE_TOKENS[kind]}"


def _is_right(outcomes: Sequence[Outcome]) -> bool:
    decode = next((outcome for outcome in outcomes if outcome.name == "decode"), None)
    return decode is None or decode.status == "done"


def _correctness(kind: str, outcomes: Sequence[Outcome]) -> Iterator[Subprocess]:
    """Tests marked `device`: decoding alone, and then a part for each file."""
    yield _tested("decode", 40, kind, _ATTENTION, "-x", "-k", "test_decoding")
    others = [
        _tested("attention", 80, kind, _ATTENTION, "-k", "not test_decoding and not 500"),
        *(
            _tested(
                path.stem.removeprefix("test_").replace("_", "-"),
                100,
                kind,
                f"{_TESTS}/{path.name}",
            )
            for path in sorted((_ROOT / _TESTS).glob("test_*.py"))
            if path.stem not in ("test_attention", "test_batches")
        ),
    ]
    for part in others:
        yield _if_right(part, outcomes)


def _if_right(part: Subprocess, outcomes: Sequence[Outcome]) -> Subprocess:
    """A part that runs unless decoding was wrong."""
    return part if _is_right(outcomes) else dataclasses.replace(part, missing=_NOT_RIGHT)


def _tested(name: str, limit_s: float, kind: str, path: str, *arguments: str) -> Subprocess:
    plain = "-m", "device", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"
    part = _module(name, limit_s, "pytest", path, *plain, *_workers(kind), *arguments)
    return dataclasses.replace(part, command=("env", _ON_DEMAND, *part.command))


def _attention_kernels(is_right: bool) -> Iterator[Subprocess]:
    baselines = "cudnn,flash-attn3-jax,flash-attn3-contiguous"
    # A kernel of ours that hangs would take the time of all others.
    only = () if is_right else (f"--only=reference,{baselines}",)
    yield _app("kernels", 140, "kernelbench", "--seconds=120", *only)
    tune = _app("tune", 170, "kernelbench", "--tune", "--seconds=150")
    yield tune if is_right else dataclasses.replace(tune, missing=_NOT_RIGHT)


def _choices(machine: _Machine, outcomes: Sequence[Outcome]) -> Iterator[Subprocess]:
    """XLA's choices for steps of two layers, added to the file that engines load, and their HLO."""
    for format in _FORMATS:
        name = f"choices-{format}"
        xla_flags = {
            "dump_to": Path(_ARTIFACTS.value).absolute() / name, "dump_hlo_module_re": "jit_step",
            "dump_hlo_pass_re": "none", "gpu_dump_autotune_results_to": _choices_path(machine),
        }  # fmt: skip
        weights = () if format == "bfloat16" else (f"--weights={format}",)
        engine = _engine(machine.platform, outcomes)
        part = _app(name, 60, "bench", *engine, _8B, _TWO_LAYERS, _DECODE, *weights)
        variables = " ".join(f"--xla_{flag}={value}" for flag, value in xla_flags.items())
        environment = f"XLA_FLAGS={variables}", "JAX_ENABLE_COMPILATION_CACHE=false"
        yield dataclasses.replace(part, command=("env", *environment, *part.command))


def _without_graphs(kind: str, outcomes: Sequence[Outcome]) -> Subprocess:
    """Steps whose kernels are launched one by one, where programmatic launches have an effect."""
    part = _app("without-graphs", 45, "bench", *_engine(kind, outcomes), _8B, _DECODE)
    command = ("env", "XLA_FLAGS=--xla_gpu_enable_command_buffer=", *part.command)
    return dataclasses.replace(part, command=command)


def _choices_path(machine: _Machine) -> Path:
    """`layers.kernels.autotune.path`, without JAX."""
    return _KERNELS / "autotune" / f"{machine.slug}-jax-{machine.jax}.txt"


def _peer(kind: str, name: str, limit_s: float, arguments: Sequence[str]) -> Subprocess:
    command = (sys.executable, "-m", f"scripts.reports.peers.{_PEERS[name]}", *arguments)
    missing = "computes on GPUs" if kind == "tpu" else None
    if missing is None and importlib.util.find_spec("torch") is None:
        missing = "torch is not installed"
    return Subprocess(name, command, limit_s, is_json=True, missing=missing)


def _workers(kind: str) -> tuple[str, ...]:
    """Most of a test's time is compilation, on one core of the host. A TPU has one process."""
    return ("-n", "8") if kind == "gpu" and importlib.util.find_spec("xdist") else ()


_ON_DEMAND = "XLA_PYTHON_CLIENT_PREALLOCATE=false"  # processes share the device's memory
_TESTS, _NOT_RIGHT = "tests/device", "decoding is not right"
_ATTENTION = f"{_TESTS}/test_attention.py"
_PEERS = {"torch": "torch_steps", "torch-products": "torch_products"}
_OWN = {"gpu": "pallas_gpu", "tpu": "pallas_tpu"}
_FORMATS = "bfloat16", "int4", "fp8", "int8"
_8B, _13B = "--model=llama3-8b", "--model=llama2-13b"
_DECODE, _PREFILL = "--decode=1x1024,16x1024,64x1024", "--prefill=1x512,1x4096"
_TWO_LAYERS = "--set=model.num_layers=2"
_LOAD = (  # 64 prompts of 512 tokens at a time, then four of 4,096
    *("--concurrency=64", "--prompt_tokens=512", "--new_tokens=128", "--prefill_tokens=4096"),
    *("--set=engine.max_context=4224", "--set=engine.cache.overcommit=true"),
    *("--set=engine.cache.cache_bytes=8000000000", "--set=engine.shapes.decode_rows=(64,)"),
    *("--set=engine.shapes.chunk_tokens=512", "--set=engine.shapes.prefill_chunks=(4,)"),
)
_FIRST_STEPS: _Steps = (
    ("llama3-8b", 45, (_8B, _DECODE)),
    ("llama3-8b-int4", 45, (_8B, "--weights=int4", _DECODE)),
    ("llama3-8b-fp8", 45, (_8B, "--weights=fp8", _DECODE)),
    ("llama3-8b-int8", 45, (_8B, "--weights=int8", _DECODE)),
    ("torch-products", 70, ("--seconds=60",)),
    ("torch", 150, (_DECODE, _PREFILL)),
)
_STEPS: _Steps = (
    ("llama3-8b-prefill", 60, (_8B, _PREFILL)),
    ("mamba2-2.7b", 40, ("--model=mamba2-2.7b", "--decode=1x1024,64x1024")),
    ("engine", 40, (_8B, "--decode=64x256", "--gap")),
    ("load", 130, (_8B, *_LOAD)),
    ("llama2-13b", 50, (_13B, "--decode=1x1024,16x1024,32x1024,64x1024")),
    ("llama2-13b-gqa", 30, (_13B, "--set=model.pattern.mixer.num_kv_heads=8", "--decode=256x1024")),
    ("qwen3-30b-a3b", 75, ("--model=qwen3-30b-a3b", "--decode=1x1024,8x1024,64x1024")),
    ("deepseek-v2-lite", 110, ("--model=deepseek-v2-lite", "--decode=1x1024,64x1024")),
)
_SMALL_STEPS: _Steps = (
    (
        "smollm2-135m-layer", 60,
        ("--model=smollm2-135m", "--set=model.num_layers=1", "--decode=1x64,4x128", "--gap"),
    ),
    (
        "smollm2-135m-layer-prefill", 60,
        ("--model=smollm2-135m", "--set=model.num_layers=1", "--prefill=2x64"),
    ),
    (
        "torch", 60,
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


def _kernel(kind: str, outcomes: Sequence[Outcome]) -> str | None:
    """A kernel of ours that was right and repeatable wherever it was measured; before that the
    device's own, if decoding passed its tests.
    """
    measured = [outcome for outcome in outcomes if outcome.name in ("kernels", "tune")]
    rows = [row for outcome in measured if outcome.result for row in outcome.result["rows"]]
    was_measured = False
    for name in ATTENTIONS[1:]:
        results = [row["results"][name] for row in rows if name in row["results"]]
        began = [result for result in results if result["status"] not in ("not run", "out of time")]
        was_measured |= bool(began)
        if began and all(
            result["status"] == "right" and result["is_repeatable"] for result in began
        ):
            return name
    passed = any((outcome.name, outcome.status) == ("decode", "done") for outcome in outcomes)
    return _OWN.get(kind) if passed and not was_measured else None


def _app(name: str, limit_s: float, app: str, *arguments: str) -> Subprocess:
    module = _module(name, limit_s, f"scripts.{app}", "--json_lines", *arguments)
    return dataclasses.replace(module, is_json=True)


def _module(name: str, limit_s: float, module: str, *arguments: str) -> Subprocess:
    return Subprocess(name, (sys.executable, "-m", module, *arguments), limit_s)


if __name__ == "__main__":
    common.run(main)
