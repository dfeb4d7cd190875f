"""`python -m scripts.train`: what it writes is served; interrupted it goes on; bad input."""

import json

import numpy as np
import pytest

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.recurrent.linear_attention import LinearAttention
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.s4 import S4
from inference.checkpoints import convert, provenance, resolve
from inference.checkpoints.hf import config_export
from scripts import train
from tests.inference.quantize import models, test_walk
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


def test_a_model_that_fills_gaps(run, tmp_path):
    """Is trained with marks; the vocabulary of another has none."""
    gaps, plain = (str(tmp_path / name) for name in ("gaps", "plain"))
    rate = "--set=training.fim_rate=0.5"
    assert run(f"--output={gaps}", rate).status == run(f"--output={plain}").status == 0
    words = resolve.resolve(gaps).open(None).load_tokenizer()
    assert words.decode(words.encode_infill("a", "b"), skip_special=False) == (
        "<fim_prefix>a<fim_suffix>b<fim_middle>"
    )
    refused = run(f"--model={plain}", f"--output={tmp_path / 'no'}", rate, settings=BRIEF)
    assert "training.fim_rate=0.5: the tokenizer has no fill-in-the-middle" in refused.error


WITH_STATES = {
    "based": ("--set=model.pattern.mixer.key_width=4", "--set=model.pattern.mixer.value_width=6"),
    "s4": ("--set=model.pattern.mixer.channels=16", "--set=model.pattern.mixer.state_width=3"),
}


@pytest.mark.parametrize("task", WITH_STATES)
def test_models_that_keep_a_state(run, task, tmp_path):
    """Are served, and have a place in no format but ours."""
    settings = [each for each in TINY if "head_width" not in each] + [
        "--set=model.num_layers=2", *WITH_STATES[task],
    ]  # fmt: skip
    output = tmp_path / "model"
    ran = run(f"--task={task}", f"--output={output}", "--json", settings=settings)
    assert ran.status == 0, ran
    found = json.loads(ran.out)
    assert found["loss"] < found["first_loss"]
    written = resolve.resolve(str(output)).open(None)
    assert written.config.name == f"small-{task}" and written.config.family == task
    assert written.config.mixers(S4 if task == "s4" else LinearAttention)
    with pytest.raises(InputError, match=f"small-{task}: the family {task} has no config.json"):
        config_export.of_model(written.config)
    convert.convert(written, tmp_path / "again", "orbax")
    assert resolve.resolve(str(tmp_path / "again")).config == written.config


@pytest.mark.parametrize("task", ["mamba2", "hybrid"])
def test_state_spaces_alone_and_beside_attention(run, task, tmp_path):
    settings = [each for each in TINY if "head_width" not in each and "ffn" not in each] + [
        "--set=model.num_layers=3", "--set=model.pattern.mixer.num_heads=4",
        "--set=model.pattern.mixer.head_width=8", "--set=model.pattern.mixer.state_width=4",
        "--set=model.pattern.mixer.norm_width=32",
    ]  # fmt: skip
    ran = run(f"--task={task}", f"--output={tmp_path / 'model'}", "--json", settings=settings)
    assert ran.status == 0, ran
    found = json.loads(ran.out)
    assert found["loss"] < found["first_loss"]
    written = resolve.resolve(str(tmp_path / "model")).open(None)
    assert written.config.mixers(Mamba2) and written.config.name == f"small-{task}"
    assert len(written.config.mixers(Attention)) == (task == "hybrid")
    if task == "hybrid":
        convert.convert(written, tmp_path / "again", "hf")
        assert resolve.resolve(str(tmp_path / "again")).config.layers == written.config.layers


def test_few_bits_are_trained_on_as_numbers(run, tmp_path):
    source = models.written(models.llama(max_context=512), tmp_path / "model")
    few = test_walk.quantize(source, tmp_path / "few", "llm_int8", "llm_int8")
    ran = run(f"--model={few}", "--task=lm", f"--output={tmp_path / 'more'}", settings=BRIEF)
    assert ran.status == 0, ran
    assert resolve.resolve(str(tmp_path / "more")).config.formats == ()


BRIEF = ("--set=training.steps=2", "--set=training.warmup_steps=1", "--set=training.window=16")


def test_heads_for_what_was_trained(run, tmp_path):
    """They know their target, and refuse another."""
    target, other, heads = (str(tmp_path / name) for name in ("target", "other", "heads"))
    assert run(f"--output={target}").status == run(f"--output={other}", "--set=training.seed=1",
                                                   settings=TINY).status == 0  # fmt: skip
    ran = run(f"--model={target}", "--task=eagle", f"--output={heads}", "--json", settings=BRIEF)
    assert ran.status == 0, ran
    own = resolve.resolve(heads, drafts=True).config
    checkpoint = resolve.resolve(target).open(None)
    assert own.features and own.target == provenance.weights_digest(checkpoint)
    provenance.check_target(own, checkpoint)
    with pytest.raises(InputError, match="small-eagle was trained for other weights") as error:
        provenance.check_target(own, resolve.resolve(other).open(None))
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="holds heads, which draft for a model"):
        resolve.resolve(heads)


@pytest.mark.parametrize("args, expected", [
    (("--text=nowhere.txt",), "cannot read nowhere.txt: No such file"),
    (("--speculate=ngram",), "--task=lm does not read --speculate"),
    (("--task=eagle",), "--task=eagle needs --model=TARGET"),
    (("--task=draft",), "--task=draft needs --model=TARGET"),
    (("--task=medusa", f"--model={apps.TINY}", "--mesh=model=2"), "heads are trained on one chip"),
    (("--task=s4", "--set=model.width=16"), "s4 channels=256 are those of the model, model.width="),
    (("--set=training.window=4000",), "training.window=4000 is at most the context of 512"),
    (("--set=training.fim_rate=2",), "training.fim_rate is from 0 to 1, not 2"),
    (("--output=pyproject.toml",), "pyproject.toml: exists already"),
])  # fmt: skip
def test_what_cannot_be_trained_is_refused(run, args, expected):
    assert expected in run(*args, settings=()).error


def test_text_without_text(run, tmp_path):
    (tmp_path / "empty.txt").write_text(" \n")
    assert "no text to train on" in run(f"--text={tmp_path / 'empty.txt'}").error
