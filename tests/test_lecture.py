"""docs/lecture.md: the lecture's figures to four digits, and a page that is what its generator
writes. Loads no jax.
"""

import ast
import builtins
import dataclasses
import functools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from configs import presets
from configs.hardware import catalog
from inference.planner import cost, weights
from inference.planner.cost import Operation, Work
from inference.planner.deployment import Deployment, Row
from inference.planner.speculation import Speculation, expected_tokens
from scripts.reports.lecture import claims, names
from scripts.reports.lecture.drafts import acceptance_of, output_distribution

ROOT = Path(__file__).resolve().parents[1]
H100 = catalog.get("h100")
LLAMA_13B = presets.get("llama2-13b").config
LLAMA_70B = presets.get("llama2-70b").config
GQA_13B = LLAMA_13B.with_kinds(num_kv_heads=8)


def digits(value: float) -> str:
    """Four significant digits."""
    return f"{value:.4g}"


def lecture(config, batch: int) -> Row:
    return Deployment(config, H100, accounting="lecture").row(batch, 1024)


@functools.cache
def page() -> str:
    return (ROOT / "docs" / "lecture.md").read_text(encoding="utf-8")


# --- known truths ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "batch", "memory", "step", "rate"),
    [
        (LLAMA_13B, 1, "26.87", "8.021", "124.7"),
        (LLAMA_13B, 16, "39.45", "11.78", "1359"),
        (LLAMA_13B, 64, "79.72", "23.8", "2689"),
        (LLAMA_13B, 256, "240.8", "71.87", "3562"),
        (GQA_13B, 64, "33.41", "9.974", "6417"),
        (GQA_13B, 256, "65.63", "19.59", "1.307e+04"),
    ],
)
def test_latency_and_throughput_of_llama2_13b(config, batch, memory, step, rate):
    row = lecture(config, batch)
    found = (row.memory_bytes / 1e9, row.step_s * 1e3, row.output_tok_s)
    assert tuple(map(digits, found)) == (memory, step, rate)


def test_sizes():
    assert digits(weights.num_parameters(GQA_13B) / 1e9) == "11.34"
    assert cost.cache_bytes(LLAMA_70B, 4096) == 1_342_177_280
    assert digits(64 * cost.cache_bytes(LLAMA_70B, 32_768) / 1e9) == "687.2"
    latent = presets.get("deepseek-v2").config
    assert {spec.elements_per_token for spec in latent.cache_specs} == {576}
    assert digits(2 * 128 * 128 / 576) == "56.89"


def product(tokens: int) -> Operation:
    """The last product of a feed-forward of 4096 x 11008."""
    config = dataclasses.replace(LLAMA_13B.with_kinds(width=11_008), width=4096)
    operations = cost.step_operations(config, Work(tokens, (), tokens))
    return next(operation for operation in operations if operation.name == "ffn.down")


def test_intensity():
    assert digits(H100.ridge()) == "295.2"
    assert digits(product(4096).intensity) == "1727"
    assert digits(product(1).intensity) == "0.9997"
    operations = cost.step_operations(LLAMA_13B, Work(1, (), 1))
    flops = sum(operation.flops for operation in operations)
    assert flops == 2 * weights.num_active_parameters(LLAMA_13B)


def test_drafts():
    assert digits(expected_tokens(0.8, 4)) == "3.362"
    assert digits(expected_tokens(0.9, 4)) == "4.095"
    assert digits(Speculation(4, 0.8, 0.11).speedup) == "2.334"
    assert output_distribution((0.3, 0.7), (0.5, 0.5)) == pytest.approx((0.3, 0.7))
    assert acceptance_of((0.3, 0.7), (0.5, 0.5)) == pytest.approx(0.8)


# --- the page -------------------------------------------------------------------------------------


def test_the_page_is_what_its_generator_writes_without_jax(tmp_path):
    target = tmp_path / "lecture.md"
    code = (
        "import runpy, sys\n"
        "runpy.run_module('scripts.reports.lecture', run_name='__main__')\n"
        "assert not {'jax', 'flax', 'layers'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = target.read_text(encoding="utf-8")
    assert written == page(), "docs/lecture.md is stale: python -m scripts.reports.lecture"


@pytest.mark.parametrize(
    ("says", "ours", "expected"),
    [
        ("26.87", 26.8706, True),
        ("26.8", 26.8706, False),
        ("2,690", 2689.45, True),
        ("2689.4", 2689.453, False),
        ("140", 137.95, True),
        ("42", 41.18, False),
        ("0.5", 0.5129, True),
        ("1.0", 0.9997, True),
    ],
)
def test_figures_agree_when_ours_rounds_to_their_digits(says, ours, expected):
    assert claims.agrees(says, ours) is expected


def test_every_expression_on_the_page_can_be_typed():
    defined = {*dir(names), *dir(builtins)}
    blocks = re.findall(r"```python\n(.*?)```", page(), re.DOTALL)
    assert len(blocks) >= 8
    for line in "".join(blocks).splitlines():
        used = {node.id for node in ast.walk(ast.parse(line)) if isinstance(node, ast.Name)}
        assert used <= defined, line


def commands() -> list[str]:
    joined = page().replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if "python -m scripts.plan" in line]


def test_the_page_names_a_command_for_each_large_topic():
    assert len(commands()) == 8


@pytest.mark.parametrize("index", range(8))
def test_commands_on_the_page_work(index):
    command = [sys.executable, *shlex.split(commands()[index])[1:], "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"]


@pytest.mark.parametrize(
    ("note", "slip"),
    [
        ("A D", "6 FLOPs a parameter"),
        ("A", "4ST/(S+T)"),
        ("C", "172 GB"),
        ("C", "k a + 1"),
        ("C", "14x"),
        ("C", "2731"),
        ("A", "46.5 / 108.1 / 354.3 GB"),
        ("D", "16,584 tokens/s"),
        ("A", "outliers in weight matrices"),
        ("C D", "in fp16"),
        ("C", "single H100"),
    ],
)
def test_the_errata_name_the_slip(note, slip):
    errata = page().split("## Errata")[1].split("\n## ")[0]
    rows = [line.split(" | ") for line in errata.splitlines() if slip in line]
    assert any(row[1].startswith(note) and slip in row[2] for row in rows), rows
