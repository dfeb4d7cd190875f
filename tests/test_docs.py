"""Pages that are written by programs are up to date, and what pages show runs."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from scripts.reports import figures
from scripts.reports.pages import markdown, results

ROOT = Path(__file__).resolve().parents[1]

_FOR_A_SHORT_CONTEXT = {
    "evaluate": ["--window=64"],
    "bench": ["--prompt_tokens=32", "--new_tokens=16"],
    "--concurrency": ["--prefill_tokens=64"],
}
GOLDEN_PYTHON = ROOT / ".venv-golden" / "bin" / "python"


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> list[str]:
    """The indented blocks of a page; blank lines may stand within one."""
    found = re.findall(r"^ {4}.*\n(?:\n*^ {4}.*\n)*", read(page), re.MULTILINE)
    return [textwrap.dedent(block) for block in found]


def test_the_families_page_is_up_to_date(tmp_path):
    target = tmp_path / "families.md"
    subprocess.run([sys.executable, "-m", "scripts.reports.families", target], cwd=ROOT, check=True)
    committed = read("docs/families.md")
    assert target.read_text("utf-8") == committed, "stale: python -m scripts.reports.families"


MEASURED = ("architectures", "caches", "quantization")


def results_of(page: str) -> dict:
    return json.loads(read(f"docs/{page}.json"))


@pytest.mark.parametrize("page", MEASURED)
def test_a_pages_tables_show_what_was_measured(page):
    parts = importlib.import_module(f"scripts.reports.{page}.__main__").PARTS
    text = read(f"docs/{page}.md")
    filled = results.fill(text, parts, results_of(page))
    assert filled == text, f"stale: python -m scripts.reports.{page} --parts="
    assert all(f"\n<!-- {part} -->\n" in text for part in parts)


def test_rows_are_chosen_by_kind_and_model():
    rows = ["a: full", "a: int4, rtn", "b: full"]
    part = results.Part(lambda *_: None, lambda _: [], rows, has_models=True)
    assert part.chosen(None, None) == rows
    assert part.chosen(["full"], None) == ["a: full", "b: full"]
    assert part.chosen(["int4, rtn"], ["b"]) == []
    assert part._replace(has_models=False).chosen(["full"], ["b"]) == ["a: full", "b: full"]


def test_a_page_without_a_block_is_refused():
    text = "# A title\n\n<!-- a -->\n\nold\n\n<!-- end of a -->\n\nProse.\n"
    assert markdown.fill(text, {"a": ["", "new"]}) == text.replace("old", "new")
    with pytest.raises(ValueError, match="the page has no block of 'b'"):
        markdown.fill(text, {"b": ["new"]})


def test_no_page_is_written_of_bytes_that_were_not_allocated_as_predicted():
    parts = importlib.import_module("scripts.reports.caches.__main__").PARTS
    measured = results_of("caches")
    measured["bytes"]["MHA"]["allocated"] += 1
    with pytest.raises(SystemExit, match="MHA: 69120.0 bytes are predicted, 69121.0 allocated"):
        results.fill(read("docs/caches.md"), parts, measured)


def test_figures_are_stale_once_their_code_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RECORDS", tmp_path / "figures.json")
    code, page = tmp_path / "code", figures.Page("page.md", ("code",))
    code.mkdir()
    (code / "step.py").write_text("x = 1  # ms\n")
    figures.record(page, "2026-11-26", tmp_path)
    (code / "step.py").write_text('"""What.\n\nWhy.\n"""\n\n# why\nx = 1  # ms\n')
    assert figures.changed_inputs(page, tmp_path) == []
    (code / "step.py").write_text("x = 2  # ms\n")
    assert figures.changed_inputs(page, tmp_path) == ["code"]
    marked = figures.marked("# A title\n\nFigures.\n", True)
    assert marked == figures.marked(marked, True)
    assert figures.MARK in marked and figures.marked(marked, False) == "# A title\n\nFigures.\n"


def test_figures_have_records_and_pages():
    records = json.loads(figures.RECORDS.read_text("utf-8"))
    assert list(records) == sorted(page.path for page in figures.PAGES)
    for page in figures.PAGES:
        assert list(records[page.path]["inputs"]) == list(page.inputs)
        assert (ROOT / page.path).exists()
        assert all((ROOT / source).exists() for source in page.inputs), page.path


def test_install_hints_name_the_checkout():
    """`pip install 'ridgeline[serve]'` would fetch a stranger's package from PyPI."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    hint = re.compile(r"pip install '?ridgeline\[")
    for name in files.split():
        if name.endswith((".py", ".md", ".html", ".js", ".yaml")) and name != "tests/test_docs.py":
            assert not hint.search(read(name)), name


@pytest.mark.parametrize("page", ["add_a_model", "add_a_mixer"])
def test_adding_names_files_that_exist(page):
    text = read(f"docs/{page}.md")
    text = re.sub(r"[\w/]+/NAME\.py", "", text)
    for name in re.findall(r"[\w/]+\.(?:py|md)", text):
        assert (ROOT / name).exists() or (ROOT / "docs" / name).exists(), name


def test_our_paths_are_printed_as_the_page_says():
    (command,) = re.findall(r'    python -c "(.*?)"\n', read("docs/add_a_model.md"), re.DOTALL)
    code = command.replace("\\\n", "")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "layers/29/mixer/qkv" in run.stdout.split()


def test_the_page_on_mixers_shows_code_that_runs():
    shown, written = blocks("docs/add_a_mixer.md"), read("tests/test_newcomer.py")
    assert len(shown) == 4
    for block in shown:
        assert block in written, block


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_commands_of_adding_a_model(tmp_path):
    """In a copy of the repository, since they write; that of transformers where it is there."""
    ignored = shutil.ignore_patterns(".*", "__pycache__")
    copy = shutil.copytree(ROOT, tmp_path / "copy", ignore=ignored, symlinks=True)
    lines = (line for block in blocks("docs/add_a_model.md") for line in block.splitlines())
    commands = dict.fromkeys(
        line.replace("NAME", "gpt2")
        for line in lines
        if line.startswith(("python tests/", "python -m scripts.reports.", "python -m pytest"))
    )
    golden, *suites, table = (shlex.split(command)[1:] for command in commands)
    for words in (*([*suite, "-k", "gpt2"] for suite in suites), table):  # not all families
        subprocess.run([sys.executable, *words], cwd=copy, check=True, timeout=600)
    assert (copy / "docs" / "families.md").read_text() == read("docs/families.md")
    if not GOLDEN_PYTHON.exists():
        pytest.skip(f"{' '.join(golden)}: no {GOLDEN_PYTHON.parent.parent.name} (make golden)")
    subprocess.run([GOLDEN_PYTHON, *golden], cwd=copy, check=True, timeout=600)
    for path in sorted((ROOT / "tests" / "golden").glob("gpt2-*/config.json")):
        assert (copy / path.relative_to(ROOT)).read_bytes() == path.read_bytes()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_commands_of_the_readme(tmp_path):
    """Those of the quickstart, too: on a tiny model, where they run one."""
    tiny = ROOT / "tests" / "golden" / "llama-tokenizer"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "A"}\n')
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "RIDGELINE_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    pages = read("README.md") + read("docs/quickstart.md")
    commands = re.findall(r"python -m scripts\.(\w+)(.*?)(?:  +#|`|$)", pages, re.MULTILINE)
    assert len(commands) >= 25
    for app, flags in dict.fromkeys(commands):
        words = shlex.split(flags)
        if app != "plan":
            words = [word.replace("int4", "int8") for word in words]  # its rows are no whole groups
            words.append(f"--model={tiny}")
            for name in (app, *(flag.partition("=")[0] for flag in words)):
                words += _FOR_A_SHORT_CONTEXT.get(name, ())
        command = [sys.executable, "-m", f"scripts.{app}", *words]
        how = {"cwd": tmp_path, "env": environment, "stdin": subprocess.DEVNULL}
        hosts = re.search(r"--hosts=(\d+)", flags)
        others = [
            subprocess.Popen([*command, f"--host_index={host}"], **how)
            for host in range(1, int(hosts[1]) if hosts else 1)
        ]
        ran = subprocess.run(command, **how, capture_output=True, text=True, timeout=600)
        assert [other.wait(timeout=60) for other in others] == [0] * len(others)
        assert ran.returncode == 0, f"{app} {flags}\n{ran.stderr}"
    assert (tmp_path / "plan.html").exists() and (tmp_path / "answers.jsonl").exists()
    (code,) = (block for block in blocks("README.md") if "Engine.from_model" in block)
    for named in ("smollm2-135m", "path/to/other/weights"):
        code = code.replace(named, str(tiny))
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)
