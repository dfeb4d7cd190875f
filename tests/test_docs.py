"""Pages that are written by programs are up to date, and their commands run."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_families_page_is_up_to_date(tmp_path):
    target = tmp_path / "families.md"
    subprocess.run([sys.executable, "docs/make_families.py", target], cwd=ROOT, check=True)
    committed = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    assert target.read_text("utf-8") == committed, "stale: python docs/make_families.py"


def test_adding_a_model_names_files_that_exist():
    text = (ROOT / "docs" / "add_a_model.md").read_text(encoding="utf-8")
    for name in re.findall(r"[\w/]+\.(?:py|md)", text.replace("configs/NAME.py", "")):
        assert (ROOT / name).exists() or (ROOT / "docs" / name).exists(), name


def test_our_paths_are_printed_as_the_page_says():
    text = (ROOT / "docs" / "add_a_model.md").read_text(encoding="utf-8")
    (command,) = re.findall(r'    python -c "(.*?)"\n', text, re.DOTALL)
    code = command.replace("\\\n", "")
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "layers/29/mixer/qkv" in run.stdout.split()
