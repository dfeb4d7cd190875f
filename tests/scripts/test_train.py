"""`python -m scripts.train`: what it writes is served; interrupted it goes on; bad input."""

import json

import numpy as np
import pytest

from inference.checkpoints import resolve
from scripts import train
from tests.scripts import apps

pytestmark = pytest.mark.quick_code

TINY = (
    "--set=model.vocab_size=300", "--set=model.width=16", "--set=model.num_layers=1",
    "--set=model.pattern.ffn.width=24", "--set=model.pattern.mixer.head_width=4",
    "--set=training.batch=2", "--set=training.window=16", "--set=training.steps=6",
    "--set=training.warmup_steps=1", "--set=training.checkpoint_every=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("def function(argument):\n    return argument + 1\n" * 40)
    return path


@pytest.fixture
def run(monkeypatch, capfd, tmp_path_factory, text):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))

    def call(*args: str, settings=TINY):
        return apps.call(train, monkeypatch, capfd, f"--text={text}", *settings, *args)

    return call


def test_what_is_trained_is_served(run, tmp_path):
    ran = run(f"--output={tmp_path / 'model'}", "--json")
    assert ran.status == 0, ran
    result = json.loads(ran.out)
    assert result["steps"] == 6 and result["tokens"] == 6 * 2 * 16
    assert result["first_loss"] == pytest.approx(np.log(300), abs=2)
    assert result["config"]["training"]["batch"] == 2
    written = resolve.resolve(str(tmp_path / "model")).open(None)
    assert written.config.name == "small" and written.eos_ids == (0,)
    tokenizer = written.load_tokenizer()
    assert tokenizer.decode(tokenizer.encode("return argument")) == "return argument"
    again = run(f"--output={tmp_path / 'model'}")
    assert again.error.endswith("model: exists already\n")
