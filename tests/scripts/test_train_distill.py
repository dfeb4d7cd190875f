"""`python -m scripts.train --task=distill`: what it writes is served; resumed; bad input."""

import json
import shutil

import pytest

from inference.checkpoints import resolve
from scripts import train
from tests.scripts import apps
from tests.scripts.apps import TINY

pytestmark = pytest.mark.quick_code

SETTINGS = (
    "--set=training.steps=4", "--set=training.batch=2", "--set=training.window=24",
    "--set=training.warmup_steps=1", "--set=training.learning_rate=1e-2",
    "--set=training.checkpoint_every=2",
)  # fmt: skip
OTHER = "gemma-gqa-tied"


@pytest.fixture
def run(monkeypatch, capfd, tmp_path):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("the cache holds the keys of each layer\n" * 60)

    def call(*args, model=TINY, teacher=TINY, text=text):
        names = (f"--model={model}",) if model else ()
        names += (f"--teacher={teacher}",) if teacher else ()
        names += (f"--text={text}",) if text else ()
        return apps.call(train, monkeypatch, capfd, "--task=distill", *names, *SETTINGS, *args)

    return call


def weights(path):
    source = resolve.resolve(str(path)).open(None).contents().source
    return {name: source.read(name, 0, shape[0]).tobytes() for name, shape in source.shapes.items()}


@pytest.mark.parametrize("settings", [
    ("--set=training.on_policy=0.7",),
    ("--set=training.top_k=5", "--set=training.divergence=jensen_shannon"),
    ("--set=training.hidden_weight=0.5", "--set=training.divergence=reverse"),
], ids=["on-policy", "file", "states"])  # fmt: skip
def test_resumed_it_is_the_same_bit_for_bit(run, tmp_path, settings):
    ran = [run(f"--output={tmp_path / name}", "--json", *settings) for name in ("a", "b")]
    assert ran[0].status == ran[1].status == 0, ran
    result = json.loads(ran[0].out)
    assert result["steps"] == 4 and result["tokens"] == 4 * 2 * 24
    listed = json.loads((tmp_path / "a" / "provenance.json").read_text())["stages"]
    assert [stage["made_by"] for stage in listed] == ["train"]
    assert listed[0]["teacher"] == listed[0]["parent"] and listed[0]["training"]["steps"] == 4
    whole = weights(tmp_path / "a")
    assert weights(tmp_path / "b") == whole
    shutil.rmtree(sorted((tmp_path / "b.training").glob("0*"))[-1])
    shutil.rmtree(tmp_path / "b")
    assert run(f"--output={tmp_path / 'b'}", *settings).status == 0
    assert weights(tmp_path / "b") == whole


def test_without_a_text_the_teacher_writes_it(run, tmp_path, monkeypatch):
    monkeypatch.setattr("configs.recipes.distill.SAMPLES", 3)
    ran = run(f"--output={tmp_path / 'a'}", text=None)
    assert ran.status == 0, ran
    assert "72 tokens of text" in ran.err


@pytest.mark.parametrize(("args", "names", "cause"), [
    ((), {"model": None}, "--task=distill needs --model, which learns from --teacher"),
    ((), {"teacher": None}, "--task=distill needs --teacher, whose distributions --model learns"),
    ((), {"teacher": "nowhere"}, "nowhere"),
    (("--set=training.lora_rank=2",), {}, "training.lora_rank=2: is not of --task=distill"),
    (("--set=training.divergence=kl",), {}, "must be one of forward, reverse, jensen_shannon"),
    (("--set=training.on_policy=1", "--mesh=data=2"), {}, "a student writes and learns on one"),
    (("--set=training.top_k=99999",), {}, "training.top_k=99999: must be below the"),
    (("--data=answers.jsonl",), {}, "--task=distill does not read --data"),
])  # fmt: skip
def test_bad_input(run, args, names, cause):
    ran = run(*args, **names)
    assert ran.status and cause in ran.error and len(ran.error.splitlines()) == 1, ran


def test_a_teacher_with_other_tokens(run, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(TINY, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = list(vocab)[-2:]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert "the teacher has another tokenizer" in run(teacher=other).error


def test_other_tasks_have_no_teacher(monkeypatch, capfd):
    ran = apps.call(train, monkeypatch, capfd, f"--teacher={TINY}")
    assert "--teacher" in ran.error
