"""`python -m scripts.evaluate` beside the same sum over scores without a cache."""

import hashlib
import json
import math

import jax
import numpy as np
import pytest

from inference.checkpoints import resolve
from layers import decoder
from layers.ragged import contiguous
from scripts import evaluate
from tests.scripts import apps

_ARGS = (f"--model={apps.TINY}", "--window=24", "--set=engine.prefill_tiles=(1,)",
         "--set=engine.tile_tokens=24", "--set=model.dtype=float32")  # fmt: skip


@pytest.fixture
def run(monkeypatch, capfd):
    return lambda *args: apps.call(evaluate, monkeypatch, capfd, *_ARGS, *args)


def _perplexity(tokens: list[int]) -> tuple[float, int]:
    """Each window begins with the first token that the tokenizer adds, and 23 of the text."""
    checkpoint = resolve.resolve(str(apps.TINY)).open(None)
    params = checkpoint.load_params(decoder.param_infos(checkpoint.config), None)
    logprobs = []
    for start in range(0, len(tokens), 23):
        window = np.array([0, *tokens[start : start + 23]])
        hidden, _ = decoder.forward(params, checkpoint.config, window, contiguous(1, len(window)))
        logits = jax.nn.log_softmax(decoder.logits(params, checkpoint.config, hidden))
        logprobs += [float(logits[i, token]) for i, token in enumerate(window[1:])]
    return math.exp(-sum(logprobs) / len(logprobs)), len(logprobs)


def test_perplexity_of_a_file(run, tmp_path):
    text = "Where does the workload wait?\r\n" * 4  # bytes as they are, line ends included
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    ran = run(f"--text={path}", "--json")
    assert ran.status == 0 and ran.out.count("\n") == 1
    answer = json.loads(ran.out)
    assert set(answer) == {"perplexity", "tokens", "text_sha256", "config"}
    assert answer["text_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    tokenizer = resolve.resolve(str(apps.TINY)).open(None).load_tokenizer()
    expected, count = _perplexity(tokenizer.encode(text, add_special=False))
    assert answer["tokens"] == count
    assert answer["perplexity"] == pytest.approx(expected, rel=0.01)  # bfloat16 beside float32


def test_the_default_text_as_a_process(tmp_path):
    from pydoc_data.topics import topics

    ran = apps.start("evaluate", *_ARGS, "--max_tokens=46", cache=tmp_path)
    assert ran.status == 0, ran.err
    digest = hashlib.sha256("\n".join(topics[key] for key in sorted(topics)).encode()).hexdigest()
    assert (
        ran.out.startswith("perplexity ") and f"over 46 tokens (text SHA-256 {digest})" in ran.out
    )
    assert ran.out.count("\n") == 1
