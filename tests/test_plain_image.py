"""Engine, kernels and benches on a machine that has JAX and little else: what `docs/kernels.md`
says.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIRED = {re.split("[<>=]", name)[0] for name in PROJECT["dependencies"]}
(SENTENCE,) = re.findall(
    r"It takes (JAX.*?) from the\s+interpreter",
    (ROOT / "docs" / "kernels.md").read_text(),
    re.DOTALL,
)
LISTED = {"absl-py" if word == "absl" else word for word in re.findall(r"\w+", SENTENCE.lower())}
IMPORTED = {
    "huggingface-hub": "huggingface_hub",
    "orbax-checkpoint": "orbax",
    "pyyaml": "yaml",
}
MISSING = sorted(
    {IMPORTED.get(name, name) for name in REQUIRED - LISTED}
    | {"llguidance", "starlette", "msgspec"}
)
NEEDED = (
    *("inference.engine", "layers.kernels.attention.gpu", "layers.kernels.attention.reference"),
    *("scripts.bench", "scripts.modes.bench_steps", "scripts.kernelbench", "scripts.device"),
    *("inference.benchmark.kernels.timing", "inference.benchmark.kernels.baselines"),
)
CODE = f"""
import importlib, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {MISSING}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
for name in {NEEDED}:
    importlib.import_module(name)
from absl import flags
from scripts import bench, common
sys.argv = ["bench", "--random_weights", "--model=smollm2-135m", "--decode=1x32", "--repeats=1",
            "--set=model.num_layers=1", "--set=model.vocab_size=64"]
common.run(bench.main)
"""


def test_the_page_lists_some_packages():
    assert {"absl-py", "jax", "numpy", "rich"} == REQUIRED & LISTED
    assert {"gguf", "safetensors", "tokenizers"} <= {*MISSING}


def test_nothing_loads_what_a_plain_jax_image_lacks(tmp_path):
    """Text and files of weights need those packages; what runs on token ids does not."""
    environment = {"JAX_PLATFORMS": "cpu", "RIDGELINE_CACHE": str(tmp_path), "PATH": "/usr/bin"}
    environment["RIDGELINE_KERNELS"] = os.environ["RIDGELINE_KERNELS"]  # no test of building them
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=240,
        env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 x 32" in done.stdout
