"""`python -m scripts.train --task=sft` and `--task=dpo`: what they write is served; bad input."""

import json
import shutil

import numpy as np
import pytest

from configs.settings.adapters import AdapterConfig
from inference.adapters import peft_directory
from inference.checkpoints import resolve
from scripts import interrupts, train
from tests.inference.training import test_answers
from tests.scripts import apps
from tests.scripts.apps import TINY

pytestmark = pytest.mark.quick_code

BRIEF = (
    "--set=training.steps=4", "--set=training.batch=4", "--set=training.accumulate=2",
    "--set=training.window=96", "--set=training.warmup_steps=1",
    "--set=training.learning_rate=1e-2", "--set=training.checkpoint_every=2",
)  # fmt: skip
SFT = [
    {"messages": [*test_answers.CHAT[:1], {"role": "assistant", "content": "Yes"}]},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "No " * 60}]},
    {"prompt": "The cache", "completion": " holds the keys"},
] * 3  # fmt: skip
DPO = [
    {"messages": SFT[0]["messages"][:1], "chosen": "Yes", "rejected": "No"},
    {"prompt": "The cache", "chosen": " holds the keys", "rejected": " is lazy"},
]


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))

    def call(task, lines, *args, settings=BRIEF, model=TINY):
        data = tmp_path / f"{task}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        common = f"--task={task}", f"--model={model}", f"--data={data}"
        return apps.call(train, monkeypatch, capfd, *common, *settings, *args)

    return call


def weights(path):
    source = resolve.resolve(str(path)).open(None).contents().source
    return {name: source.read(name, 0, shape[0]) for name, shape in source.shapes.items()}


def test_an_adapter_is_learned_resumed_and_served(run, tmp_path):
    rank = ("--set=training.lora_rank=2",)
    first, again = (
        run("sft", SFT, f"--output={tmp_path / name}", *rank, "--json") for name in ("a", "b")
    )
    assert first.status == again.status == 0, first
    result = json.loads(first.out)
    assert result["loss"] < result["first_loss"]
    names = ("adapter_config.json", "adapter_model.safetensors")
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    for step in sorted((tmp_path / "b.training").iterdir())[1:2]:  # the one at the end
        shutil.rmtree(step)
    shutil.rmtree(tmp_path / "b")
    assert run("sft", SFT, f"--output={tmp_path / 'b'}", *rank).status == 0
    weights_file = names[1]
    assert (tmp_path / "a" / weights_file).read_bytes() == (
        tmp_path / "b" / weights_file
    ).read_bytes()
    model = resolve.resolve(str(TINY)).config
    assert peft_directory.read(tmp_path / "a", model, AdapterConfig(rank=8)).rank == 2


def test_an_adapter_is_learned_above_few_bits(run, tmp_path):
    rank = ("--set=training.lora_rank=2",)
    ran = run("dpo", DPO, f"--output={tmp_path / 'a'}", *rank, "--json", "--weights=int8")
    assert ran.status == 0, ran
    result = json.loads(ran.out)
    assert result["loss"] < result["first_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert ["layers/0/mixer/out", ["int8"]] in result["config"]["model"]["formats"]
    shutil.rmtree(tmp_path / "a")
    other = run("dpo", DPO, f"--output={tmp_path / 'a'}", *rank)
    assert "holds checkpoints of another run: its model.formats" in other.error


def test_answers_are_learned_and_served(run, tmp_path):
    ran = run("sft", SFT, f"--output={tmp_path / 'model'}", "--json")
    assert ran.status == 0, ran
    result = json.loads(ran.out)
    assert result["loss"] < result["first_loss"] and result["tokens"] == 4 * 4 * 96
    assert "cut 3 of 9 sequences behind 96 tokens: --set training.window=N takes longer" in ran.err
    assert "9 lines, " in ran.err and "5 windows, " in ran.err
    written = resolve.resolve(str(tmp_path / "model")).open(None)
    assert written.load_tokenizer().template == resolve.resolve(
        str(TINY)
    ).open(None).load_tokenizer().template  # fmt: skip
    assert written.eos_ids == (1, 2) and written.config.dtype == "bfloat16"


def test_preferences_are_learned_and_measured(run, tmp_path):
    ran = run("dpo", DPO * 3, f"--output={tmp_path / 'model'}", "--json")
    assert ran.status == 0, ran
    result = json.loads(ran.out)
    assert result["first_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert result["loss"] < 0.6 and result["reward_margin"] > 0.1
    assert result["reward_accuracy"] == 1 and result["pairs"] == 6
    assert resolve.resolve(str(tmp_path / "model")).config.vocab_size == 320


class Interrupted(interrupts.Deferred):
    """Asks for an end after two steps."""

    num_asked = 0

    @property
    def requested(self):
        self.num_asked += 1
        return self.num_asked > 2

    @requested.setter
    def requested(self, value):
        pass


def test_a_run_goes_on_where_it_was_interrupted(run, tmp_path):
    """To the same bits; not as a run on other lines."""
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert run("sft", SFT, f"--output={straight}").status == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interrupts, "Deferred", Interrupted)
        ran = run("sft", SFT, f"--output={broken}")
    assert ran.status == 1 and "interrupted after step 2 of 4" in ran.err, ran
    assert "holds checkpoints of another run: its text is" in run(
        "sft", SFT[:-1], f"--output={broken}"
    ).err  # fmt: skip
    assert run("sft", SFT, f"--output={broken}").status == 0
    expected, found = weights(straight), weights(broken)
    assert expected.keys() == found.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("args, expected", [
    (("--task=sft", f"--model={TINY}"), "--task=sft needs --data=FILE.jsonl"),
    (("--task=dpo", "--data=a.jsonl"), "--task=dpo needs --model, whose answers it trains"),
    (("--task=sft", f"--model={TINY}", "--text=a", "--data=a"), "--task=sft does not read --text"),
    (("--task=lm", "--data=a"), "--task=lm does not read --data: give --text=FILE"),
    (("--task=sft", f"--model={TINY}", "--data=no.jsonl"), "cannot read no.jsonl: No such"),
    (("--task=dpo", f"--model={TINY}", "--data=a", "--set=training.dpo_beta=0"), "dpo_beta"),
    (("--task=sft", f"--model={TINY}", "--data=a", "--set=training.fim_rate=0.5"), "have no gaps"),
    (("--task=lm", "--weights=int8"), "--task=lm does not read --weights"),
    (("--task=sft", f"--model={TINY}", "--data=a", "--weights=int8"),
     "--weights=int8: all weights are trained in float32; give --set training.lora_rank=16"),
    (("--task=dpo", f"--model={TINY}", "--data=a", "--weights=w8a8", "--set=training.lora_rank=2"),
     "llama-tokenizer has weights in w8a8, through whose products no gradient goes; "),
    (("--task=sft", f"--model={TINY}", "--data=a", "--weights=int4", "--set=training.lora_rank=2"),
     "rows of 52, of which int4 has no whole groups"),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused(monkeypatch, capfd, args, expected):
    assert expected in apps.call(train, monkeypatch, capfd, *args).error


def test_a_bad_line_is_named(run, tmp_path):
    lines = [*SFT, {"messages": SFT[0]["messages"][:1]}]
    error = run("sft", lines, f"--output={tmp_path / 'model'}").error
    assert "sft.jsonl line 10: no message of the role assistant" in error


def test_a_model_without_a_template_learns_completions(run, tmp_path):
    model = tmp_path / "plain"
    shutil.copytree(TINY, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    error = run("sft", SFT, f"--output={tmp_path / 'no'}", model=model).error
    assert "sft.jsonl line 1: this checkpoint has no chat template" in error
    assert run("sft", SFT[2:3], f"--output={tmp_path / 'model'}", model=model).status == 0
