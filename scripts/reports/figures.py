"""Whether the code that a page's figures measure has changed since they were measured.

    python -m scripts.reports.figures                  # prints the age of each page
    python -m scripts.reports.figures --check          # fails if a stale page does not say so
    python -m scripts.reports.figures --mark           # writes the mark into stale pages
    python -m scripts.reports.figures --measured=PAGE  # records that a page was measured just now
    python -m scripts.reports.figures --regenerate     # measures stale pages again: `make pages`

`figures.json` has, for each page, the date of its figures and a digest of each input as it was
then. Comments, docstrings and blank lines do not count.
"""

import argparse
import datetime
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "docs" / "figures.json"
MARK = (
    "> **Stale:** the code that these figures measure has changed since "
    "(`python -m scripts.reports.figures` says where).\n"
)
_NO_CODE = re.compile(r'^[ \t]*(?:#.*|r?"""(?:.|\n)*?""")?[ \t]*\n', re.MULTILINE)
_MAX_MINUTES = 10  # of a command that `make pages` runs

_CPU = ("layers/kernels/cpu", "layers/kernels/linear", "layers/kernels/attention/ffi_cpu.py")
_STEP = ("layers/decoder.py", "layers/mixers", "inference/runtime", "inference/sampling")
_HOST = (
    *("inference/engine.py", "inference/request_state.py"),
    *("inference/scheduling", "inference/kv_pages"),
)
_PLAN = tuple(f"inference/planner/{name}" for name in ("cost.py", "roofline.py", "calibration"))
_HOPPER = (
    *("layers/kernels/attention/gpu.py", "layers/kernels/attention/gpu_prefill.py"),
    *("layers/kernels/linear", "layers/kernels/recurrence"),
)
_COMPILED = ("layers", "sharding", "inference/runtime/step.py", "inference/planner/compiled")


@dataclass(frozen=True)
class Page:
    """A page of figures.

    Attributes:
        path: of the page, from the repository's root.
        inputs: files and folders whose code the figures measure.
        command: arguments of Python that write the page again, with nothing but this repository
            and its environment; () where a page needs more than that.
        minutes: that the command takes on two cores.
    """

    path: str
    inputs: tuple[str, ...]
    command: tuple[str, ...] = ()
    minutes: int = 0


_VERIFIED = "docs/results/verify-xeon-2cores.md"
_VERIFY = (
    *("-m", "scripts.plan", "--verify", "--model=qwen2.5-0.5b", "--set=model.num_layers=8"),
    *("--set=model.vocab_size=32768", f"--output={_VERIFIED}"),
)
PAGES = (
    Page("docs/results/vllm-cpu.md", _CPU + _STEP + _HOST),
    Page("docs/results/adapters-vllm.md", (*_CPU, *_STEP, *_HOST, "inference/adapters")),
    Page("docs/results/llama-cpp.md", _CPU + _STEP + _HOST),
    Page("docs/results/server-epyc-2cores.md", (*_CPU, *_STEP, *_HOST, "inference/server")),
    Page("docs/results/server-xeon-amx-2cores.md", (*_CPU, *_STEP, *_HOST, "inference/server")),
    Page("docs/results/serving-epyc-2cores.md", _CPU + _STEP + _HOST + _PLAN),
    Page(_VERIFIED, _CPU + _STEP + _PLAN, _VERIFY, 4),
    Page("docs/results/nvidia-h200-2026-11-26.md", _HOPPER),
    Page("docs/results/nvidia-h100-80gb-hbm3-2026-11-27.md", _HOPPER),
    Page("docs/performance.md", _CPU + _STEP + _PLAN, ("-m", "scripts.reports.performance"), 5),
    Page("docs/mixtures.md", (*_CPU, *_STEP, "layers/feed_forwards", "layers/sparse")),
    Page("docs/caches.md", (*_CPU, *_STEP, "layers/kv_cache.py")),
    Page("docs/quantization.md", (*_CPU, "inference/quantize", "layers/quantized.py")),
    Page("docs/architectures.md", (*_CPU, *_STEP, "layers/recurrence", "inference/training")),
    Page("docs/speculation.md", (*_CPU, *_STEP, "inference/speculation")),
    Page(
        "docs/results/infill.md", ("inference/training", "inference/text/infill.py"),
        ("-m", "scripts.reports.gaps"), 30,
    ),
    Page(
        "docs/results/tuning.md",
        ("inference/training", "inference/adapters", "layers/kernels/linear"),
        ("-m", "scripts.reports.tuning"), 20,
    ),
    Page(
        "docs/results/reinforcement.md", (*_CPU, *_STEP, "inference/training"),
        ("-m", "scripts.reports.reinforcement"), 15,
    ),
    Page("docs/scaling.md", _COMPILED),
    Page("docs/compiled_mixtures.md", _COMPILED),
)  # fmt: skip


def digest(source: str, root: Path = ROOT) -> str:
    """First 16 digits of the SHA-256 of a file's code, or of that of all files of a folder."""
    path = root / source
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    total = hashlib.sha256()
    for file in files:
        if file.is_file() and "__pycache__" not in file.parts:
            text = file.read_text("utf-8")
            code = _NO_CODE.sub("", text) if file.suffix == ".py" else text
            total.update(f"{file.relative_to(root).as_posix()}\n{code}\n".encode())
    return total.hexdigest()[:16]


def record(page: Page, date: str, root: Path = ROOT) -> None:
    """Keeps the date of a page's figures, and its inputs as they are in `root`."""
    records = json.loads(RECORDS.read_text("utf-8")) if RECORDS.exists() else {}
    inputs = {source: digest(source, root) for source in page.inputs}
    records[page.path] = {"measured": date, "inputs": inputs}
    RECORDS.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n", "utf-8")


def changed_inputs(page: Page, root: Path = ROOT) -> list[str]:
    """Inputs whose code is not what the page's figures were measured with."""
    inputs = json.loads(RECORDS.read_text("utf-8"))[page.path]["inputs"]
    return [source for source in page.inputs if inputs.get(source) != digest(source, root)]


def marked(text: str, is_stale: bool) -> str:
    """A page's text with the mark below its title if it is stale, and without it if not."""
    title, _, body = text.replace(f"{MARK}\n", "").partition("\n\n")
    return f"{title}\n\n{MARK}\n{body}" if is_stale else f"{title}\n\n{body}"


def regenerate(page: Page) -> None:
    """Runs a page's command and records what its figures were measured with."""
    print(f"{page.path}: {page.minutes} minutes", flush=True)
    subprocess.run([sys.executable, *page.command], cwd=ROOT, check=True)
    record(page, str(datetime.date.today()))


def main() -> None:
    """Prints, checks, marks, records or regenerates."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    action = parser.add_mutually_exclusive_group()
    for name in ("check", "mark", "regenerate"):
        action.add_argument(f"--{name}", action="store_true")
    action.add_argument("--measured", choices=[page.path for page in PAGES])
    flags = parser.parse_args()

    unmarked = []
    for page in PAGES:
        if flags.measured == page.path:
            record(page, str(datetime.date.today()))
        changed = changed_inputs(page)
        if flags.regenerate and changed and page.command and page.minutes <= _MAX_MINUTES:
            regenerate(page)
            changed = []
        path = ROOT / page.path
        text = path.read_text("utf-8")
        if text != marked(text, bool(changed)):
            unmarked.append(page.path)
            if flags.mark or flags.regenerate or flags.measured:
                path.write_text(marked(text, bool(changed)), "utf-8")
        if not flags.check:
            date = json.loads(RECORDS.read_text("utf-8"))[page.path]["measured"]
            print(
                f"{page.path}: {date}, {'stale: ' + ', '.join(changed) if changed else 'current'}"
            )
    if flags.check and unmarked:
        sys.exit(
            f"{', '.join(unmarked)}: the mark of stale figures is not as the code is; "
            "run: python -m scripts.reports.figures --mark"
        )


if __name__ == "__main__":
    main()
