"""The commands of docs/convert.md, as they stand there, in a folder of their own."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import compiling
from tests.fake_hub import FakeHub
from tests.scripts import apps

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "convert.md"
TINY = ROOT / "tests" / "golden" / "llama-tokenizer"

pytestmark = pytest.mark.quick_code


def commands() -> list[str]:
    return re.findall(r"^    (python -m scripts\..+)$", PAGE.read_text(), re.MULTILINE)


def test_the_page_has_commands():
    assert len(commands()) >= 5


@pytest.mark.timeout(600)
def test_every_command_of_the_page_works(tmp_path, monkeypatch, capfd):
    """On a small checkpoint where the page names the preset. What asks a hub has a process of its
    own, in whose environment the hub is named.
    """
    hub = FakeHub()
    hub.publish(
        "owner/name", {p.name: p.read_bytes() for p in TINY.iterdir() if p.suffix != ".npz"}
    )
    environment = compiling.environment(
        tmp_path / "cache", PYTHONPATH=str(ROOT), HF_ENDPOINT=hub.endpoint,
        HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="0",
    )  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    for command in commands():
        _, _, name, *words = shlex.split(command.replace("--model=smollm2-135m", f"--model={TINY}"))
        if any("owner/name" in word for word in words):
            done = subprocess.run(
                [sys.executable, "-m", name, *words], env=environment, capture_output=True,
                text=True, timeout=240,
            )  # fmt: skip
            status, out, err = done.returncode, done.stdout, done.stderr
        else:
            status, out, err = apps.call(importlib.import_module(name), monkeypatch, capfd, *words)
        assert status == 0, f"{command}\n{err}"
        assert out.strip(), command
        if "--json" in words:
            result = json.loads(out)
            assert result["bytes"] > 0 and (tmp_path / result["output"]).is_dir()
    hub.close()
    made = {path.name for path in tmp_path.iterdir()}
    assert {"smollm2-native", "smollm2-hf", "smollm2-again", "smollm2-f32", "from-the-hub"} <= made
    listed = subprocess.run(
        ["sha256sum", "--quiet", "-c", "ridgeline.sha256"], cwd=tmp_path / "smollm2-native"
    )
    assert listed.returncode == 0
