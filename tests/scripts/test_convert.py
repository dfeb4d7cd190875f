"""`python -m scripts.convert`: what is refused before a checkpoint is opened."""

import subprocess
import sys

import pytest

from inference.checkpoints import resolve
from scripts import common, convert
from tests.scripts import apps


@pytest.fixture
def refuse(monkeypatch, capfd, tmp_path):
    def run(*args: str) -> str:
        def resolved(*args):
            raise AssertionError("a model was looked for")

        monkeypatch.setattr(resolve, "resolve", resolved)
        monkeypatch.chdir(tmp_path)
        ran = apps.call(convert, monkeypatch, capfd, f"--model={apps.TINY}", *args)
        assert ran.status == 1
        return ran.error

    return run


@pytest.mark.parametrize("size", ["nan", "inf", "1e300", "0", "-1"])
def test_sizes_of_files(refuse, size):
    message = refuse("--output=x", "--to=hf", f"--max_shard_gb={size}")
    assert "--max_shard_gb is from 0.0001 to 1000000, not " in message


@pytest.mark.parametrize("name", [".", "..", "/", "x/.."])
def test_what_names_no_new_directory(refuse, name):
    assert "the name of a new directory is needed" in refuse(f"--output={name}")


@pytest.mark.parametrize(
    "flag, cause",
    [
        ("--kv_heads=3", "2 key/value heads become 1, 2, not 3"),
        ("--kv_share=0", "a cache is shared by at least 1 layer, not 0"),
    ],
)
def test_what_no_cache_can_become_is_said_before_weights_are_read(
    flag, cause, monkeypatch, capfd, tmp_path
):
    monkeypatch.setattr(
        common, "open_checkpoint", lambda *args: pytest.fail("a checkpoint was opened")
    )
    arguments = f"--model={apps.TINY}", f"--output={tmp_path / 'made'}", flag
    ran = apps.call(convert, monkeypatch, capfd, *arguments)
    assert ran.status == 1 and cause in ran.error


def test_a_place_that_is_none_is_said_before_jax_is_loaded():
    code = (
        "import sys\nfrom scripts import common, convert\n"
        "sys.argv = ['convert', '--output=none/x']\n"
        "try: common.run(convert.main)\n"
        "finally: print('jax' in sys.modules)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=apps.ROOT, capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 1 and ran.stdout == "False\n"
    assert ran.stderr == "error: --output=none/x: none is no folder to write to\n"
