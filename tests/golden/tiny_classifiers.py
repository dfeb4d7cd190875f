"""Tiny sequence classifiers as transformers writes them, and their logits.

`classifiers/NAME/` has the checkpoint and `expected.npz`: for prompt i `tokens_i` i32[T] and
`logits_i` f32[L] in float32. Where there is a padding token, the last prompts end with some. The
one with a tokenizer also has `pair`, two texts, `pair_ids` and `pair_logits` of both together.
"""

import pathlib

import numpy as np
import tiny_checkpoints
import tiny_tokenizer
import torch
import transformers
from tiny_families import Case, widths

_LENGTHS = 40, 7, 1
_PAIR = "What holds the keys?", "A cache holds the keys and the values."
_PAD = 3
_GPT2 = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 64, "n_inner": 28}
CASES = (
    Case(
        "llama-reward-tokenizer",
        widths(16, 2, 2, 1, 8)
        | {"vocab_size": tiny_tokenizer.VOCAB_SIZE, "bos_token_id": 0, "num_labels": 1},
        seed=1200,
        tokenizer=True,
    ),
    Case(
        "qwen3-multi-label",
        widths(24, 2, 3, 1, 8)
        | {
            "pad_token_id": _PAD,
            "problem_type": "multi_label_classification",
            "id2label": dict(enumerate(("calm", "glad", "sad", "angry", "other"))),
        },
        seed=1201,
    ),
    Case("gemma2-two-labels", widths(24, 2, 2, 2, 8) | {"pad_token_id": _PAD}, seed=1202),
    Case(
        "gemma3-two-labels",
        widths(24, 3, 2, 1, 8) | {"pad_token_id": _PAD, "sliding_window_pattern": 2},
        seed=1203,
    ),
    Case(
        "mistral-regression",
        widths(24, 2, 3, 1, 8) | {"num_labels": 5, "problem_type": "regression"},
        seed=1204,
        dtype=torch.float32,
    ),
    Case("gpt2-five-labels", _GPT2 | {"num_labels": 5}, seed=1205),
)


def write(root: pathlib.Path) -> None:
    """Writes all cases under `root`."""
    for case in CASES:
        directory = root / "classifiers" / case.name
        _write_checkpoint(case, directory)
        generator = np.random.default_rng(case.seed)
        expected: dict[str, np.ndarray] = {}
        model, exact = (_load(directory, dtype) for dtype in (torch.float32, torch.float64))
        vocab_size, error = model.config.vocab_size, 0.0
        prompts = [generator.integers(_PAD + 1, vocab_size, n) for n in _LENGTHS]
        if model.config.pad_token_id is not None:
            prompts += [np.append(prompt, [_PAD] * n) for n, prompt in enumerate(prompts, 1)]
            prompts.append(np.full(4, _PAD))
        for i, prompt in enumerate(prompts):
            logits, precise = (_logits(m, prompt) for m in (model, exact))
            error = max(error, float(np.abs(logits - precise).max()))
            expected |= {f"tokens_{i}": prompt.astype(np.int32), f"logits_{i}": logits}
        if case.tokenizer:
            tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
            ids = np.asarray(tokenizer(*_PAIR)["input_ids"], np.int32)
            expected |= {"pair": np.array(_PAIR), "pair_ids": ids}
            expected["pair_logits"] = _logits(model, ids)
        np.savez_compressed(directory / "expected.npz", **expected)
        print(f"classifiers/{case.name}: float32 error {error:.1e}", flush=True)
        if error > tiny_checkpoints.MAX_ROUNDING_ERROR:
            raise ValueError(f"{case.name}: float32 differs from float64 by {error}")


def _write_checkpoint(case: Case, directory: pathlib.Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_config(case.config())
    tiny_checkpoints.randomize(model, case, np.random.default_rng(case.seed))
    model.to(case.dtype).save_pretrained(directory)
    if case.tokenizer:
        tiny_tokenizer.write(directory)


def _load(directory: pathlib.Path, dtype: torch.dtype) -> torch.nn.Module:
    return transformers.AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    )


def _logits(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].numpy()
