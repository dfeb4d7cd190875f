"""SmolLM2 135M and Gemma 3 270M on their real weights, beside transformers.

The references are float32 arithmetic on the same bfloat16 weights. A greedy choice counts as the
model's own only while the reference's two best logits are further apart than rounding can move
them: behind the first closer pair a continuation may differ, and is compared no longer.
"""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from configs.engine import Config, EngineConfig
from configs.mesh import ONE_CHIP, Mesh
from inference.checkpoints import resolve
from inference.engine import Engine
from inference.request import SamplingParams
from tests import fakes
from tests.layers import native

_GOLDEN = Path(__file__).resolve().parents[1] / "golden"
_PRESETS = {"smollm2": "smollm2-135m", "gemma3": "gemma3-270m"}
_NEW_TOKENS = 32
# One decode and one prefill rectangle: few programs to compile.
_ENGINE = EngineConfig.of(max_seqs=32, decode_rows=(32,), prefill_chunks=(8,), max_context=1024)


@dataclasses.dataclass(frozen=True)
class _Limits:
    gap: float  # closer logits may come in another order
    median: float  # of the absolute errors of log-probabilities
    worst: float


_LIMITS = {"float32": _Limits(0.005, 1e-3, 1e-3), "bfloat16": _Limits(0.1, 0.01, 0.15)}
# A download of 240 MB, and its head alone is 168 M weights a token.
_MARKS = {"smollm2": (), "gemma3": (pytest.mark.long,)}
# The suite takes the dtype that users run; float32 is another minute.
_CASES = [
    pytest.param((name, dtype, ONE_CHIP), id=f"{name}-{dtype}", marks=marks)
    for name in _PRESETS
    for dtype, marks in {"float32": pytest.mark.long, "bfloat16": _MARKS[name]}.items()
] + [
    pytest.param((name, "float32", Mesh(model=2)), id=f"{name}-model=2", marks=pytest.mark.long)
    for name in _PRESETS
]


@dataclasses.dataclass(frozen=True)
class _Loaded:
    name: str
    dtype: str
    engine: Engine

    @property
    def golden(self) -> dict[str, np.ndarray]:
        return _golden(_PRESETS[self.name])

    @property
    def limits(self) -> _Limits:
        return _LIMITS[self.dtype]


@pytest.fixture(scope="module", params=_CASES)
def loaded(request) -> Iterator[_Loaded]:
    name, dtype, mesh = request.param
    resolved = resolve.resolve(_PRESETS[name])
    config = Config(dataclasses.replace(resolved.config, dtype=dtype), _ENGINE, mesh)
    with fakes.no_draws():
        yield _Loaded(name, dtype, Engine.from_checkpoint(config, resolved.open(None)))


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
    print(f"{what}: error median {median:.1e}, 99 % {most:.1e}, worst {worst:.1e} of {errors.size}")
    return median, most, worst


def _check_given_text(what: str, errors: np.ndarray, loaded: _Loaded) -> None:
    """A text that was not generated holds tokens that no model expects.

    Their log-probabilities are large, and so is what bfloat16 rounds off them.
    """
    median, most, worst = _report(what, errors)
    assert median <= loaded.limits.median
    assert (worst if loaded.dtype == "float32" else most) <= loaded.limits.worst


def _check_greedy_tokens(loaded: _Loaded) -> None:
    """Equal until the reference hesitates, with its log-probabilities."""
    golden, limits = loaded.golden, loaded.limits
    params = SamplingParams(max_new_tokens=_NEW_TOKENS, ignore_eos=True)
    completions = loaded.engine.generate(_prompts(golden), params)
    assert len(completions) >= 20
    errors, num_sure, num_equal = [], 0, 0
    for i, completion in enumerate(completions):
        near = golden["gaps"][i] < limits.gap
        sure = int(near.argmax()) if near.any() else _NEW_TOKENS
        same = np.array(completion.token_ids) == golden["tokens"][i]
        equal = _NEW_TOKENS if same.all() else int(same.argmin())
        assert equal >= sure, f"{golden['prompts'][i]!r}: token {equal} differs, {sure} are certain"
        num_sure, num_equal = num_sure + sure, num_equal + equal
        errors.append(np.abs(np.array(completion.logprobs) - golden["logprobs"][i])[:equal])
    total = golden["tokens"].size
    print(
        f"\n{loaded.name} {loaded.dtype}: {num_sure} certain, {num_equal} equal of {total} tokens"
    )
    assert num_sure >= total / 4  # the rule leaves enough to compare
    median, _, worst = _report("generated", np.concatenate(errors))
    assert median <= limits.median and worst <= limits.worst


def _check_perplexity(loaded: _Loaded, windows: slice) -> None:
    golden = _golden("default_text_ids")
    scores = loaded.engine.score(golden[f"{loaded.name}_windows"][windows].tolist())
    logprobs = np.array([score.logprobs for score in scores])
    references = golden[f"{loaded.name}_logprobs"][windows]
    perplexity, expected = np.exp(-logprobs.mean()), np.exp(-references.mean(dtype=np.float64))
    share = perplexity / expected - 1
    print(
        f"\n{loaded.name} {loaded.dtype}: perplexity {perplexity:.4f}, {expected:.4f} {share:+.3%}"
    )
    assert abs(share) <= 0.005
    errors = np.abs(logprobs - references)
    _check_given_text("default text", errors, loaded)


def test_greedy_tokens_and_perplexity(loaded):
    """One test, so that suites run in parallel load and compile each model once."""
    _check_greedy_tokens(loaded)
    _check_perplexity(loaded, slice(2))


@pytest.mark.long
def test_perplexity_of_the_whole_text(loaded):
    golden = _golden("default_text_ids")
    known = np.exp(-golden[f"{loaded.name}_logprobs"].mean(dtype=np.float64))
    assert known == pytest.approx(float(golden[f"{loaded.name}_perplexity"]), rel=1e-5)
    _check_perplexity(loaded, slice(None))


@pytest.mark.long
def test_scores_of_the_reference_continuations(loaded):
    """Every token of prompts and continuations, whatever this implementation would choose."""
    golden, prompts = loaded.golden, _prompts(loaded.golden)
    texts = [p + new for p, new in zip(prompts, golden["tokens"].tolist(), strict=True)]
    read, written = [], []
    for i, score in enumerate(loaded.engine.score(texts)):
        num_read = len(prompts[i]) - 1
        logprobs = np.array(score.logprobs)
        read.append(np.abs(logprobs[:num_read] - golden["prompt_logprobs"][i, 1 : num_read + 1]))
        written.append(np.abs(logprobs[num_read:] - golden["logprobs"][i]))
    print(f"\n{loaded.name} {loaded.dtype}")
    median, _, worst = _report("continuations", np.concatenate(written))
    assert median <= loaded.limits.median and worst <= loaded.limits.worst
    _check_given_text("prompts", np.concatenate(read), loaded)


@pytest.mark.parametrize("name", [pytest.param(name, marks=_MARKS[name]) for name in _PRESETS])
def test_prompts_are_encoded_alike(name):
    golden = _golden(_PRESETS[name])
    tokenizer = resolve.resolve(_PRESETS[name]).open(None).load_tokenizer()
    for prompt, ids in zip(golden["prompts"].tolist(), _prompts(golden), strict=True):
        assert tokenizer.encode(prompt) == ids, prompt
    if "chat_messages" in golden:
        messages = json.loads(str(golden["chat_messages"]))
        assert tokenizer.apply_chat_template(messages) == _prompts(golden)[-1]


@pytest.mark.long
@pytest.mark.parametrize("name", _PRESETS)
def test_a_file_as_it_is_beside_its_own_numbers(name):
    """What int8 activations cost: greedy tokens up to gaps of 0.5, and 0.3 % of perplexity (with
    bfloat16 beside them 0.5 %). The weights are the same numbers (`test_weight_formats.py`).
    """
    native.need()
    golden, windows = _golden(_PRESETS[name]), _golden("default_text_ids")[f"{name}_windows"]
    prompts, texts = _prompts(golden), windows.tolist()
    engines = {}
    for weights, dtype in (("float32", "float32"), ("file", "float32"), ("file", "bfloat16")):
        resolved = resolve.resolve(_PRESETS[name])
        sizes = _ENGINE.replace(weights=weights, top_logprobs=1)
        config = Config(dataclasses.replace(resolved.config, dtype=dtype), sizes)
        engines[weights, dtype] = Engine.from_checkpoint(config, resolved.open(None))
    exact = engines.pop(("float32", "float32"))
    expected = np.array([score.logprobs for score in exact.score(texts)])
    params = SamplingParams(max_new_tokens=_NEW_TOKENS, ignore_eos=True)
    for case, engine in engines.items():
        logprobs = np.array([score.logprobs for score in engine.score(texts)])
        share = np.exp(expected.mean() - logprobs.mean()) - 1
        answers = [answer.token_ids for answer in engine.generate(prompts, params)]
        given = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        gaps = [
            max(max(best.values()) - own for best, own in zip(*new, strict=True))
            for score, prompt in zip(exact.score(given), prompts, strict=True)
            for new in [(score.top_logprobs[len(prompt) - 1 :], score.logprobs[len(prompt) - 1 :])]
        ]
        print(f"\n{name} {case}: perplexity {share:+.3%}, largest gap {max(gaps):.2f}")
        assert abs(share) <= (0.003 if case[1] == "float32" else 0.005) and max(gaps) <= 0.5
