"""`python -m scripts.evaluate` beside the same sum over scores without a cache."""

import dataclasses
import functools
import hashlib
import json
import math
import shutil

import jax
import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from inference.checkpoints import resolve
from inference.engine import Engine
from inference.outputs import Score
from inference.request import SamplingParams
from layers import decoder
from layers.ragged import contiguous
from scripts import evaluate
from tests import compiling
from tests.scripts import apps

pytestmark = pytest.mark.quick_code

_ARGS = (f"--model={apps.TINY}", "--set=engine.shapes.prefill_chunks=(1,)",
         "--set=engine.shapes.chunk_tokens=24", "--set=model.dtype=float32")  # fmt: skip


@pytest.fixture
def run(monkeypatch, capfd):
    return lambda *args: apps.call(evaluate, monkeypatch, capfd, "--window=24", *_ARGS, *args)


@pytest.fixture
def run_task(monkeypatch, capfd):
    return lambda *args: apps.call(evaluate, monkeypatch, capfd, *_ARGS, *args)


@functools.cache
def _log_law(config):
    """The model's log-probabilities after each token of a text, without an engine."""

    @compiling.jit
    def forward(params, tokens_T):
        hidden, _ = decoder.forward(params, config, tokens_T, contiguous(1, len(tokens_T)))
        return jax.nn.log_softmax(decoder.logits(params, config, hidden))

    return forward


def _perplexity(tokens: list[int]) -> tuple[float, int]:
    """Each window begins with the first token that the tokenizer adds, and 23 of the text."""
    checkpoint = resolve.resolve(str(apps.TINY)).open(None)
    config = checkpoint.config
    params = checkpoint.load_params(decoder.param_infos(config), None)

    logprobs = []
    for start in range(0, len(tokens), 23):
        window = np.array([0, *tokens[start : start + 23]])
        laws = np.asarray(_log_law(config)(params, window))
        logprobs += [float(laws[i, token]) for i, token in enumerate(window[1:])]
    return math.exp(-sum(logprobs) / len(logprobs)), len(logprobs)


def test_perplexity_of_a_file(run, tmp_path):
    text = "Where does the workload wait?\r\n" * 4  # bytes as they are, line ends included
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    ran = run(f"--text={path}", "--json")
    assert ran.status == 0 and ran.out.count("\n") == 1
    answer = json.loads(ran.out)
    assert set(answer) == {"perplexity", "tokens", "text_sha256", "weight_bytes", "config"}
    assert answer["text_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    tokenizer = resolve.resolve(str(apps.TINY)).open(None).load_tokenizer()
    expected, count = _perplexity(tokenizer.encode(text, add_special=False))
    assert answer["tokens"] == count
    assert answer["perplexity"] == pytest.approx(expected, rel=0.01)  # bfloat16 beside float32


def test_a_perplexity_beyond_numbers_is_refused(run, monkeypatch, tmp_path):
    path = tmp_path / "text"
    path.write_text("Where does the workload wait?")
    for logprob in (-1000.0, -math.inf):
        score = Score([], [logprob] * 5, [])
        monkeypatch.setattr(Engine, "score", lambda engine, texts, score=score: [score])
        ran = run(f"--text={path}", "--json")
        assert ran.status == 1 and ran.out == ""
        assert "nats a token: the perplexity is too large" in ran.err.splitlines()[-1]


def _with_post_processor(tmp_path, before, after):
    model = shutil.copytree(apps.TINY, tmp_path / "model")
    backend = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = dict.fromkeys([*before, *after])
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=[*before, "$A", *after],
        special_tokens=[(token, backend.token_to_id(token)) for token in ids],
    )
    backend.save(str(model / "tokenizer.json"))
    return model


@pytest.mark.parametrize("count, room", [(1, 1), (2, 0)])
def test_a_window_begins_with_what_comes_first_and_holds_no_end(
    run, monkeypatch, tmp_path, count, room
):
    """A first token and an end token, and a window of two tokens."""
    backend = tokenizers.Tokenizer.from_file(str(apps.TINY / "tokenizer.json"))
    first, end = backend.id_to_token(0), backend.id_to_token(1)
    model = _with_post_processor(tmp_path, [first] * count, [end])
    windows, calls = [], []

    def score(engine, texts):
        calls.append(len(texts))
        windows.extend(texts)
        return [Score([], [-1.0], [])] * len(texts)

    monkeypatch.setattr(Engine, "score", score)
    path = tmp_path / "text"
    path.write_text("Where does it wait?")
    ran = run(f"--model={model}", f"--text={path}", "--window=2", "--json")
    if not room:
        assert "--window is above the 2 tokens before each text, not 2" in ran.error
        return
    tokens = backend.encode("Where does it wait?", add_special_tokens=False).ids
    assert windows == [[0, token] for token in tokens] and calls == [len(tokens)]
    assert json.loads(ran.out)["perplexity"] == pytest.approx(math.e)


def test_the_default_text_as_a_process(tmp_path):
    from pydoc_data.topics import topics

    ran = apps.start("evaluate", "--window=24", *_ARGS, "--max_tokens=46", cache=tmp_path)
    assert ran.status == 0, ran.err
    digest = hashlib.sha256("\n".join(topics[key] for key in sorted(topics)).encode()).hexdigest()
    assert (
        ran.out.startswith("perplexity ") and f"over 46 tokens (text SHA-256 {digest})" in ran.out
    )
    assert ran.out.count("\n") == 1


def test_a_model_beside_another(run, tmp_path):
    """Laws by numpy, of logits without an engine."""
    other = _doubled(tmp_path)
    path = tmp_path / "text"
    path.write_text("Where does the workload wait? " * 3)
    ran = run(f"--text={path}", f"--against={other}", "--json")
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    own, far = _log_laws(apps.TINY, path), _log_laws(other, path)
    kl = (np.exp(far) * (far - own)).sum(1).mean()
    assert found["kl"] == pytest.approx(float(kl), rel=1e-3) and kl > 0.01
    assert found["agreement"] == pytest.approx((own.argmax(1) == far.argmax(1)).mean())
    same = json.loads(run(f"--text={path}", f"--against={apps.TINY}", "--json").out)
    assert same["agreement"] == 1 and abs(same["kl"]) < 1e-6


@pytest.fixture
def tasks(tmp_path):
    """Of choices, with equal and unequal ends, and of exact matches, the last of which is met."""
    choices = [
        {"text": f"The {word} waits for", "choices": [" memory", " it", "ever"], "label": n % 3}
        for n, word in enumerate(("host", "step", "cache", "kernel", "prompt", "text", "model"))
    ]
    exact = [{"text": "Where does", "target": " it"}]
    for name, documents in (("choices", choices), ("exact", exact)):
        (tmp_path / name).write_text("".join(json.dumps(each) + "\n" for each in documents))
    return {"choices": tmp_path / "choices", "exact": tmp_path / "exact"}


def test_a_task_of_choices(run_task, tasks, tmp_path):
    """Beside laws of logits without an engine; all bits are the same in whatever batch."""
    found = {}
    for size in (1, 8):
        output = tmp_path / f"{size}.out"
        ran = run_task(f"--task_file={tasks['choices']}", f"--set=engine.max_seqs={size}", "--json",
                  f"--output={output}")  # fmt: skip
        assert ran.status == 0, ran.err
        found[size] = json.loads(ran.out), output.read_bytes()
    assert found[1][1] == found[8][1] and found[1][0]["sha256"] == found[8][0]["sha256"]
    report, lines = found[8][0], [json.loads(line) for line in found[8][1].splitlines()]
    tokenizer = resolve.resolve(str(apps.TINY)).open(None).load_tokenizer()
    laws_of = _laws_of(apps.TINY)
    met = {"acc": [], "acc_norm": []}
    for document, line in zip(_documents(tasks["choices"]), lines, strict=True):
        count = len(tokenizer.encode(document["text"], add_special=False))
        for end, logprob in zip(document["choices"], line["logprobs"], strict=True):
            tokens = tokenizer.encode(document["text"] + end, add_special=False)
            laws = laws_of([0, *tokens])
            expected = sum(float(laws[i, t]) for i, t in enumerate(tokens) if i >= count)
            assert logprob == pytest.approx(expected, rel=1e-4)
        best = np.argmax(line["logprobs"]) == document["label"]
        lengths = [len(end) for end in document["choices"]]
        normed = np.argmax(np.divide(line["logprobs"], lengths)) == document["label"]
        assert line["met"] == {"acc": [best], "acc_norm": [normed]}
        met["acc"].append(best), met["acc_norm"].append(normed)
    assert report["documents"] == 7 and report["left_out"] == 0
    for name, each in met.items():
        assert report["metrics"][name]["mean"] == np.mean(each)
        error = np.std(each, ddof=1) / np.sqrt(len(each))
        assert report["metrics"][name]["error"] == pytest.approx(error)


def test_a_task_of_answers(run_task, tasks, tmp_path):
    engine = Engine.from_model(str(apps.TINY), dtype="float32", deterministic=True, max_seqs=1)
    (answer,) = engine.generate(["Where does"], SamplingParams(max_new_tokens=6))
    output = tmp_path / "out"
    ran = run_task(f"--task_file={tasks['exact']}", "--max_tokens=6", f"--output={output}")
    assert json.loads(output.read_text())["answer"] == answer.text
    assert ran.out.splitlines()[0] == "exact_match 0.0000"
    assert ran.out.splitlines()[1].startswith("1 documents (SHA-256 of all answers and scores ")


def test_flags_of_tasks_and_of_texts_do_not_mix(run_task, tasks, tmp_path):
    task = f"--task_file={tasks['exact']}"
    refused = {
        "evaluate --task_file does not read --text: it goes with evaluate": [task, "--text=a"],
        "evaluate does not read --chat: it goes with evaluate --task_file": ["--chat"],
        "is not a file in an existing folder": [task, f"--output={tmp_path / 'none' / 'a'}"],
        "--max_tokens is at least 2, not 1": [task, "--max_tokens=1"],
    }
    for message, args in refused.items():
        assert message in run_task(*args).error


def test_a_task_of_conversations(run_task, tasks, tmp_path):
    """The document is a user's message, and a thought is no part of the answer."""
    model = shutil.copytree(apps.TINY, tmp_path / "thinks")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ messages[0].content }}?<think>{# </think> #}"
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    output = tmp_path / "out"
    ran = run_task(f"--model={model}", f"--task_file={tasks['exact']}", "--chat", "--max_tokens=6",
                   f"--output={output}")  # fmt: skip
    assert ran.status == 0 and json.loads(output.read_text())["answer"] == ""
    del settings["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    ran = run_task(f"--model={model}", f"--task_file={tasks['exact']}", "--chat")
    assert ran.status == 1 and "has no chat template; leave it out" in ran.err.splitlines()[-1]


def _documents(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_model_of_other_tokens_is_refused(run):
    ran = run("--against=smollm2-135m")
    assert ran.status == 1 and "has 49152 tokens, not the 320 of" in ran.err.splitlines()[-1]


def _doubled(tmp_path):
    """The tiny model with another first layer."""
    model = shutil.copytree(apps.TINY, tmp_path / "other")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors[name] = tensors[name] * 2
    save_file(tensors, model / "model.safetensors", {"format": "pt"})
    return model


def _log_laws(model, path):
    checkpoint = resolve.resolve(str(model)).open(None)
    laws_of = _laws_of(model)
    tokens = checkpoint.load_tokenizer().encode(path.read_text(), add_special=False)
    windows = ([0, *tokens[start : start + 23]] for start in range(0, len(tokens), 23))
    return np.concatenate([laws_of(window)[:-1] for window in windows])


def _laws_of(model):
    checkpoint = resolve.resolve(str(model)).open(None)
    config = dataclasses.replace(checkpoint.config, dtype="float32")
    params = checkpoint.load_params(decoder.param_infos(config), None)
    return lambda tokens: _log_law(config)(params, np.array(tokens))
