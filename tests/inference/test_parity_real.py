"""SmolLM2 135M and Gemma 3 270M on their real weights, beside transformers.

The references are float32 arithmetic on the same bfloat16 weights. A greedy choice counts as the
model's own only while the reference's two best logits are further apart than rounding can move
them: behind the first closer pair a continuation may differ, and is compared no longer.
"""

import dataclasses
import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from inference.checkpoints import resolve
from inference.engine import Engine
from inference.request import SamplingParams

_GOLDEN = Path(__file__).resolve().parents[1] / "golden"
_PRESETS = {"smollm2": "smollm2-135m", "gemma3": "gemma3-270m"}
_NEW_TOKENS = 32
# Few executables: what a continuation is made of does not depend on how many sequences run.
_ENGINE = EngineConfig(max_seqs=16, decode_rows=(16,), prefill_tiles=(8,), max_context=1024)


@dataclasses.dataclass(frozen=True)
class _Limits:
    gap: float  # closer logits may come in another order
    median: float  # of the absolute errors of log-probabilities
    worst: float


_LIMITS = {"float32": _Limits(0.005, 1e-3, 1e-3), "bfloat16": _Limits(0.1, 0.01, 0.15)}
# Gemma's weights are a download of 240 MB, and its head alone is 168 M weights a token.
_MARKS = {"smollm2": (), "gemma3": (pytest.mark.long,)}
_NAMES = [pytest.param(name, marks=_MARKS[name]) for name in _PRESETS]
_CASES = [pytest.param(n, t, marks=_MARKS[n]) for n in _PRESETS for t in _LIMITS]


@functools.lru_cache(maxsize=1)  # one model's weights at a time
def _engine(name: str, dtype: str) -> Engine:
    resolved = resolve.resolve(_PRESETS[name])
    config = Config(dataclasses.replace(resolved.config, dtype=dtype), _ENGINE)
    return Engine.from_checkpoint(config, resolved.open(None))


@functools.cache
def _golden(filename: str) -> dict[str, np.ndarray]:
    with np.load(_GOLDEN / f"{filename}.npz") as arrays:
        return {name: arrays[name] for name in arrays.files}


def _prompts(golden: dict[str, np.ndarray]) -> list[list[int]]:
    lengths = golden["prompt_lengths"]
    return [ids[:n].tolist() for ids, n in zip(golden["prompt_ids"], lengths, strict=True)]


def _report(what: str, errors: np.ndarray) -> tuple[float, float, float]:
    """Prints and returns median, 99th percentile and largest of absolute errors."""
    median, most, worst = np.median(errors), np.quantile(errors, 0.99), errors.max()
    print(
        f"\n{what}: error median {median:.1e}, 99 % {most:.1e}, worst {worst:.1e} of {errors.size}"
    )
    return median, most, worst


@pytest.mark.parametrize(("name", "dtype"), _CASES)
def test_greedy_tokens_until_the_reference_hesitates(name, dtype):
    golden, limits, engine = _golden(_PRESETS[name]), _LIMITS[dtype], _engine(name, dtype)
    params = SamplingParams(max_new_tokens=_NEW_TOKENS, ignore_eos=True)
    completions = engine.generate(_prompts(golden), params)
    assert len(completions) >= 20
    errors, num_sure, num_equal = [], 0, 0
    for i, completion in enumerate(completions):
        expected = golden["tokens"][i]
        near = golden["gaps"][i] < limits.gap
        sure = int(near.argmax()) if near.any() else _NEW_TOKENS
        same = np.array(completion.token_ids) == expected
        equal = _NEW_TOKENS if same.all() else int(same.argmin())
        assert equal >= sure, f"{golden['prompts'][i]!r}: token {equal} differs, {sure} are certain"
        num_sure, num_equal = num_sure + sure, num_equal + equal
        errors.append(np.abs(np.array(completion.logprobs) - golden["logprobs"][i])[:equal])
    print(
        f"\n{name} {dtype}: {num_sure} tokens certain, {num_equal} of {golden['tokens'].size} equal"
    )
    assert num_sure >= golden["tokens"].size / 4  # the rule leaves enough to compare
    median, _, worst = _report(f"{name} {dtype} decoded", np.concatenate(errors))
    assert median <= limits.median and worst <= limits.worst


@pytest.mark.parametrize(("name", "dtype"), _CASES)
def test_scores_of_the_reference_continuations(name, dtype):
    """Every token of prompts and continuations, whatever this implementation would choose."""
    golden, engine = _golden(_PRESETS[name]), _engine(name, dtype)
    prompts = _prompts(golden)
    texts = [p + new for p, new in zip(prompts, golden["tokens"].tolist(), strict=True)]
    read, written, limits = [], [], _LIMITS[dtype]
    for i, score in enumerate(engine.score(texts)):
        num_read = len(prompts[i]) - 1
        logprobs = np.array(score.logprobs)
        read.append(np.abs(logprobs[:num_read] - golden["prompt_logprobs"][i, 1 : num_read + 1]))
        written.append(np.abs(logprobs[num_read:] - golden["logprobs"][i]))
    median, _, worst = _report(f"{name} {dtype} scored continuations", np.concatenate(written))
    assert median <= limits.median and worst <= limits.worst
    # A prompt holds tokens that no model expects: their log-probabilities are large and far apart.
    median, most, _ = _report(f"{name} {dtype} scored prompts", np.concatenate(read))
    assert median <= limits.median and most <= limits.worst


@pytest.mark.parametrize(("name", "dtype"), _CASES)
def test_perplexity_of_the_default_text(name, dtype):
    golden, engine = _golden("default_text_ids"), _engine(name, dtype)
    scores = engine.score(golden[f"{name}_windows"].tolist())
    logprobs = np.array([score.logprobs for score in scores])
    perplexity, expected = math.exp(-logprobs.mean()), float(golden[f"{name}_perplexity"])
    share = perplexity / expected - 1
    print(f"\n{name} {dtype}: perplexity {perplexity:.4f}, reference {expected:.4f}, {share:+.3%}")
    assert abs(share) <= 0.005
    if dtype == "float32":
        assert np.abs(logprobs - golden[f"{name}_logprobs"]).max() <= 1e-3


@pytest.mark.parametrize("name", _NAMES)
def test_prompts_are_encoded_alike(name):
    golden = _golden(_PRESETS[name])
    tokenizer = resolve.resolve(_PRESETS[name]).open(None).load_tokenizer()
    for prompt, ids in zip(golden["prompts"].tolist(), _prompts(golden), strict=True):
        # A chat is rendered with its special tokens written out.
        rendered = prompt == golden["prompts"][-1] and name == "smollm2"
        assert tokenizer.encode(prompt, add_special=not rendered) == ids, prompt
    if "chat_messages" in golden:
        messages = json.loads(str(golden["chat_messages"]))
        assert tokenizer.apply_chat_template(messages) == _prompts(golden)[-1]
