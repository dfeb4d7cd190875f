"""`python -m scripts.train --task=grpo`: trained, resumed to the same bits, and bad input."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import pytest

from configs.engine import EngineConfig
from configs.recipes.training import PolicyRecipe, PolicyTraining
from inference.adapters import peft_directory
from inference.checkpoints import resolve
from scripts import interrupts, train
from tests import fakes
from tests.scripts import apps
from tests.scripts.apps import TINY
from tests.scripts.test_train_answers import Interrupted

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


def contents(output):
    return {path.name: path.read_bytes() for path in output.rglob("*") if path.is_file()}


def test_a_model_is_trained_and_its_reward_measured(run, tmp_path):
    data = tmp_path / "prompts.jsonl"
    ran = run(f"--output={tmp_path / 'model'}", f"--eval_data={data}", "--json")
    assert ran.status == 0, ran
    result, lines = json.loads(ran.out), iterations(tmp_path / "model")
    assert result["max_gap"] == 0 and "iteration 2: reward 0." in ran.err
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3]
    assert result["answer_tokens"] == sum(line["tokens"] for line in lines)
    assert {result["held_out_reward_before"], result["held_out_reward"]} <= {0, 1 / 3, 2 / 3, 1}
    assert resolve.resolve(str(tmp_path / "model")).config.vocab_size == 320


@pytest.mark.long
def test_where_only_the_output_is_missing_it_is_written_again(run, tmp_path):
    """As where a run was killed behind its last step."""
    output = tmp_path / "model"
    assert run(f"--output={output}").status == 0
    weights, log = contents(output), iterations(output)
    shutil.rmtree(output)
    ran = run(f"--output={output}", "--json")
    assert ran.status == 0, ran
    assert contents(output) == weights and iterations(output) == log
    assert json.loads(ran.out)["answer_tokens"] == sum(line["tokens"] for line in log)
    shutil.rmtree(output)
    (tmp_path / "model.training" / "iterations.jsonl").write_text("{")
    assert "iterations.jsonl cannot be read" in run(f"--output={output}").err


@pytest.mark.long
def test_an_adapter_whose_answers_are_drafted_is_resumed_to_the_same_bits(run, tmp_path):
    args = "--set=training.lora_rank=2", "--set=training.staleness=1", "--speculate=ngram"
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert run(f"--output={straight}", *args).status == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interrupts, "Deferred", Interrupted)
        ran = run(f"--output={broken}", *args)
    assert ran.status == 1 and "interrupted after step 2 of 4" in ran.err, ran
    error = run(f"--output={broken}", *args, "--set=training.clip_ratio=0.1").err
    assert "holds checkpoints of another run: its training.clip_ratio is 0.2, not 0.1" in error
    assert run(f"--output={broken}", *args).status == 0
    name = "adapter_model.safetensors"
    assert (straight / name).read_bytes() == (broken / name).read_bytes()
    assert peft_directory.read(straight, resolve.resolve(str(TINY)).config, 8).rank == 2
    assert all(line["max_gap"] == 0 for line in iterations(straight))
    same = "iteration", "reward", "tokens", "divergence", "max_gap"
    expected, found = (
        [[line[key] for key in same] for line in iterations(path)] for path in (straight, broken)
    )
    assert found == expected


@pytest.mark.parametrize("args, expected", [
    ((), "--task=grpo needs --data=FILE.jsonl, whose prompts it answers"),
    (("--data=no.jsonl",), "training.reward is missing: --set training.reward=exact"),
    (("--data=no.jsonl", "--set=training.reward=best"), "no reward has this name"),
    (("--data=no.jsonl", "--set=training.reward=exact"), "cannot read no.jsonl: No such"),
    (("--data=no.jsonl", "--set=training.group_size=1"), "training.group_size=1: an answer alone"),
    (("--data=no.jsonl", "--mesh=data=2"), "trains and samples on one chip; leave the mesh out"),
    (("--data=no.jsonl", "--set=engine.max_seqs=4"), "training.group_size=8: must be at most engi"),
    (("--data=no.jsonl", "--text=a"), "--task=grpo does not read --text: give --data=FILE"),
    (("--task=sft", "--data=a", "--eval_data=a"), "--task=sft does not read --eval_data"),
    (("--task=sft", "--data=a", "--speculate=ngram"), "--task=sft does not read --speculate"),
    (("--task=sft", "--data=a", "--set=training.staleness=1"), "'staleness' is not one of steps,"),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused(monkeypatch, capfd, args, expected):
    ran = apps.call(train, monkeypatch, capfd, "--task=grpo", f"--model={TINY}", *args)
    assert expected in ran.error


@pytest.mark.parametrize("line, settings, expected", [
    ({"regex": "a"}, (), "line 4 is not one of {"),
    ({"prompt": "", "regex": "a"}, (), "line 4: 'prompt' is a text of at least one character"),
    ({"prompt": "Hi"}, (), "line 4: 'regex' is a text, not None"),
    ({"prompt": "Hi " * 99, "regex": "a"}, (), "tokens, and training.window less "
     "training.max_new_tokens is 88: leave the line out"),
    ({"prompt": "Hi", "regex": "a"}, ("--set=training.max_new_tokens=97",),
     "training.max_new_tokens=97: must be at most training.window=96"),
])  # fmt: skip
def test_a_bad_line_is_named(run, tmp_path, line, settings, expected):
    error = run(f"--output={tmp_path / 'm'}", *settings, lines=[*PROMPTS, line]).error
    assert expected in error


def test_page_sizes_are_of_the_record_where_they_are_set(monkeypatch):
    monkeypatch.setattr(train, "_TASK", SimpleNamespace(value="grpo"))
    recipe = PolicyRecipe(fakes.llama(), PolicyTraining(2, 2, window=64, max_new_tokens=8))

    def engine_record(**settings):
        engine = EngineConfig.of(max_seqs=8, **settings)
        changed = dataclasses.replace(recipe, engine=engine)
        return train._record(
            SimpleNamespace(recipe=changed, starts_from=None, text="", teacher=None)
        )["engine"]

    assert engine_record(page_tokens=32) == engine_record() | {"page_tokens": 32}
    assert "page_tokens" not in engine_record()
