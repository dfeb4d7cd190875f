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
from layers import decoder
from layers.ragged import contiguous
from scripts import evaluate
from tests import compiling
from tests.scripts import apps

pytestmark = pytest.mark.quick_code

_ARGS = (f"--model={apps.TINY}", "--window=24", "--set=engine.shapes.prefill_chunks=(1,)",
         "--set=engine.shapes.chunk_tokens=24", "--set=model.dtype=float32")  # fmt: skip


@pytest.fixture
def run(monkeypatch, capfd):
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

    ran = apps.start("evaluate", *_ARGS, "--max_tokens=46", cache=tmp_path)
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
    config = dataclasses.replace(checkpoint.config, dtype="float32")
    params = checkpoint.load_params(decoder.param_infos(config), None)
    tokens = checkpoint.load_tokenizer().encode(path.read_text(), add_special=False)
    found = []
    for start in range(0, len(tokens), 23):
        window = np.array([0, *tokens[start : start + 23]])
        found.append(_log_law(config)(params, window)[:-1])
    return np.concatenate(found)
