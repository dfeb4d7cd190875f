"""`python -m scripts.train --task=grpo`: trained, resumed to the same bits, and bad input."""

import json

import pytest

from scripts import train
from tests.scripts import apps
from tests.scripts.apps import TINY

pytestmark = pytest.mark.quick_code

BRIEF = (
    "--set=training.steps=4", "--set=training.batch=2", "--set=training.accumulate=1",
    "--set=training.window=96", "--set=training.max_new_tokens=8", "--set=training.group_size=4",
    "--set=training.learning_rate=1e-2", "--set=training.checkpoint_every=2",
    "--set=training.reward=regex", "--set=engine.max_seqs=8",
)  # fmt: skip
PROMPTS = [{"prompt": prompt, "regex": "[aeiou]"} for prompt in ("The cache", "A page", "Hi")]


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))

    def call(*args, lines=PROMPTS, settings=BRIEF):
        data = tmp_path / "prompts.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        common = "--task=grpo", f"--model={TINY}", f"--data={data}"
        return apps.call(train, monkeypatch, capfd, *common, *settings, *args)

    return call


def iterations(path):
    text = (path.with_name(path.name + ".training") / "iterations.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_model_is_trained(run, tmp_path):
    data = tmp_path / "prompts.jsonl"
    ran = run(f"--output={tmp_path / 'model'}", f"--eval_data={data}", "--json")
    assert ran.status == 0, ran
    result = json.loads(ran.out)
    print(ran.err, result)
    assert result["max_gap"] == 0.0
    assert [line["iteration"] for line in iterations(tmp_path / "model")] == [0, 1, 2, 3]
