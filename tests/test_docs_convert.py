"""The commands of docs/convert.md, as they stand there, in a folder of their own."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import compiling
from tests.fake_hub import FakeHub

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "convert.md"
TINY = ROOT / "tests" / "golden" / "llama-tokenizer"


def commands() -> list[str]:
    return re.findall(r"^    (python -m scripts\..+)$", PAGE.read_text(), re.MULTILINE)


def test_the_page_has_commands():
    assert len(commands()) >= 5


@pytest.mark.timeout(600)
def test_every_command_of_the_page_works(tmp_path):
    """On a small checkpoint where the page names the preset."""
    hub = FakeHub()
    hub.publish(
        "owner/name", {p.name: p.read_bytes() for p in TINY.iterdir() if p.suffix != ".npz"}
    )
    environment = compiling.environment(
        tmp_path / "cache", PYTHONPATH=str(ROOT), HF_ENDPOINT=hub.endpoint,
        HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="0",
    )  # fmt: skip
    for command in commands():
        words = shlex.split(command.replace("--model=smollm2-135m", f"--model={TINY}"))
        done = subprocess.run(
            [sys.executable, *words[1:]], cwd=tmp_path, env=environment, capture_output=True,
            text=True, timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        assert done.stdout.strip(), command
        if "--json" in words:
            result = json.loads(done.stdout)
            assert result["bytes"] > 0 and (tmp_path / result["output"]).is_dir()
    hub.close()
    made = {path.name for path in tmp_path.iterdir()}
    assert {"smollm2-native", "smollm2-hf", "smollm2-again", "smollm2-f32", "from-the-hub"} <= made
    listed = subprocess.run(
        ["sha256sum", "--quiet", "-c", "ridgeline.sha256"], cwd=tmp_path / "smollm2-native"
    )
    assert listed.returncode == 0
