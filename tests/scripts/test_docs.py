"""Commands of the pages per task run as they stand, on a tiny model."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap

import pytest

from inference.text import sampling_fields, template_worker
from tests import compiling
from tests.scripts import apps

pytestmark = pytest.mark.quick_code

_DOCS = apps.ROOT / "docs"
_PAGES = {"generate": (), "chat": (), "evaluate": ("--window=64",)}  # and flags for a tiny model
_SETTINGS = (
    f"--model={apps.TINY}",
    "--set=engine.shapes.prefill_chunks=(1,)",
    "--set=engine.shapes.decode_rows=(4,)",
    "--set=engine.max_seqs=3",
)  # few programs to compile


def blocks(page: str) -> list[str]:
    """The indented blocks of a page."""
    text = (_DOCS / f"{page}.md").read_text(encoding="utf-8")
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, re.MULTILINE)
    return [textwrap.dedent(block).strip("\n") + "\n" for block in found]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "page", [pytest.param("generate", marks=pytest.mark.long), "chat", "evaluate"]
)
def test_commands(page, tmp_path, monkeypatch, capfd):
    """What is one command without a shell's signs needs no process of its own; chats read stdin."""
    found = blocks(page)
    assert all("python -m scripts." in block for block in found) and len(found) >= 2
    shim = tmp_path / "bin" / "python"
    shim.parent.mkdir()
    settings, of_page = (" ".join(map(shlex.quote, each)) for each in (_SETTINGS, _PAGES[page]))
    shim.write_text(
        f'#!/bin/sh\ncase "$*" in *--task_file=*) more= ;; *) more={shlex.quote(of_page)} ;; esac\n'
        f'exec {shlex.quote(sys.executable)} "$@" {settings} $more\n'
    )
    shim.chmod(0o755)
    folder = tmp_path / "folder"
    folder.mkdir()
    environment = compiling.environment(
        tmp_path / "cache", PYTHONPATH=str(apps.ROOT), PATH=f"{shim.parent}:{os.environ['PATH']}"
    )
    monkeypatch.chdir(folder)
    monkeypatch.setenv("RIDGELINE_CACHE", environment["RIDGELINE_CACHE"])
    for block in found:
        block = block.replace("--against=smollm2-135m", f"--against={apps.TINY}")
        if page != "chat" and block.count("\n") == 1 and not set(block) & set("|<>"):
            _, _, name, *words = shlex.split(block)
            module = importlib.import_module(name)
            done = apps.call(module, monkeypatch, capfd, *words, *_SETTINGS, *_PAGES[page])
            assert done.status == 0 and "error" not in done.err, f"{block}\n{done.err}"
            continue
        ran = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", block], cwd=folder, env=environment, timeout=240,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        assert ran.returncode == 0, f"{block}\n{ran.stderr}"
        assert "error" not in ran.stderr, ran.stderr
    assert not list(folder.glob("*.partial"))
    written = {path.name for path in folder.iterdir()}
    if page == "generate":
        assert json.loads((folder / "answer.json").read_text())["results"][0]["logprobs"]
        answers = (folder / "answers.jsonl").read_text().splitlines()
        assert [json.loads(line).get("id") for line in answers] == ["greedy", "drawn", None]
        assert "answers.jsonl.config.json" in written
    elif page == "evaluate":
        assert "acc" in json.loads((folder / "capitals.out").read_text())["met"]
        assert json.loads((folder / "score.json").read_text())["perplexity"] > 1
    else:
        assert {"talk.jsonl", "more.jsonl"} <= written


def test_the_pages_name_what_there_is():
    text = (_DOCS / "generate.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in sampling_fields.NAMES)
    seconds, megabytes = template_worker.SECONDS, template_worker.DATA_BYTES >> 20
    assert f"{seconds} s, {megabytes} MB and a million characters" in " ".join(text.split())
    assert template_worker.OUTPUT_CHARS == 1 << 20
