"""Tiny random checkpoints, written by transformers itself, and the logits that it computes.

Each directory is what `save_pretrained` writes, and `expected.npz` beside it holds, for prompts 0
and 1, `tokens_0` i32[T] and `logits_0` f32[T, V] at every position: float32 arithmetic on stored
weights, eager attention. Norm weights are far from their neutral value and biases from 0, so that a
wrong convention shows. One checkpoint a family also holds `greedy_prompts` i32[10, 40], padded with
-1, and `greedy_tokens` i32[10, 24]. One holds beam searches by `generate` of 4 beams, three prompts
in each of `beam_settings` f32[searches, 2] (length penalty, early stopping): `beam_prompts`
i32[searches, 20], and the hypotheses of each, best first, `beam_tokens` i32[searches, 4, 16] padded
with -1 and `beam_scores` f32[searches, 4]; they end with `beam_ends`. `tiny_cases` and
`tiny_recurrent` have the configurations.
"""

import contextlib
import itertools
import json
import pathlib
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tiny_hyper
import tiny_tokenizer
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_cases import CASES
from tiny_families import Case
from tiny_recurrent import spread

_PROMPT_LENGTHS = (75, 29)
_MATRIX_STD = 0.2
_VECTOR_STD = 0.3
_STREAM_STD = 0.25
# Far below the 1e-4 that an implementation may differ by: the reference's own rounding is no issue.
MAX_ROUNDING_ERROR = 2e-5
_NUM_GREEDY, _GREEDY_TOKENS, _LONGEST_GREEDY = 10, 24, 40
_BEAMS, _BEAM_PROMPT, _BEAM_TOKENS = 4, 20, 16
_BEAM_ENDS = list(range(0, 72, 6))
_BEAM_SETTINGS = ((1.0, False), (0.6, True), (1.5, False), (1.5, True), (0.6, False))
_MIN_GAP = 0.01  # between the best token and the next, so that rounding decides nothing
_SAME = 1e-4  # logits that differ by less


def write(
    root: pathlib.Path,
    chosen: Callable[[Case], bool] = lambda case: True,
    cases: Iterable[Case] = CASES,
) -> None:
    """Writes the chosen cases under `root`."""
    for case in filter(chosen, cases):
        directory = root / case.name
        _write_checkpoint(case, directory)
        expected, error = _expected(case, directory)
        np.savez_compressed(directory / "expected.npz", **expected)
        if case.rewritten is not None:
            case.rewritten(directory)
        spread = expected["logits_0"].std()
        print(f"{case.name}: logits' deviation {spread:.2f}, float32 error {error:.1e}", flush=True)
        if error > MAX_ROUNDING_ERROR:
            raise ValueError(
                f"{case.name}: weights too sharp, float32 differs from float64 by {error}"
            )


def _write_checkpoint(case: Case, directory: pathlib.Path) -> None:
    model = transformers.AutoModelForCausalLM.from_config(case.config())
    randomize(model, case, np.random.default_rng(case.seed))
    model.generation_config = transformers.GenerationConfig.from_model_config(model.config)
    model.to(case.dtype).save_pretrained(directory, max_shard_size=case.max_shard_size)
    if case.tokenizer:
        tiny_tokenizer.write(directory)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    if case.version_4_keys:
        config = _version_4(config)
    for key, value in case.rewrites.items():
        config[key] = value
        if value is None:
            del config[key]
    path.write_text(json.dumps(config, indent=2) + "\n")
    if case.bare:
        _make_bare(directory / "model.safetensors", case)
    if case.published is not None:
        path = directory / "model.safetensors"
        save_file(case.published(load_file(path)), path, metadata={"format": "pt"})


def randomize(model: torch.nn.Module, case: Case, generator: np.random.Generator) -> None:
    """Matrices from N(0, 0.2^2), biases wider; norm factors around 1, which some families
    store as w - 1; what governs a state by `tiny_recurrent.spread`.
    """
    for name, parameter in sorted(model.named_parameters()):
        values = generator.standard_normal(parameter.shape)
        governing = spread(name, values)
        if case.family == "deepseek_v4":
            governing = tiny_hyper.spread(name, values)
        is_norm = "norm" in name or ".ln_" in name
        neutral = 0.0 if stores_offset(case, name) else 1.0
        if governing is not None:
            values = governing
        elif name.endswith(".bias"):
            values = _VECTOR_STD * values
        else:
            is_factor = is_norm or name.endswith(("router.scale", "per_expert_scale"))
            values = neutral + _VECTOR_STD * values if is_factor else _MATRIX_STD * values
        if "per_layer_input_gate" in name:  # it reads the stream, and most gates would be closed
            values *= _STREAM_STD
        parameter.data = torch.from_numpy(values.astype(np.float32))
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith(
            ("e_score_correction_bias", "expert_bias")
        ):  # decides between experts of equal scores
            values = _MATRIX_STD * generator.standard_normal(buffer.shape)
            buffer.copy_(torch.from_numpy(values.astype(np.float32)))
        if name.endswith("tid2eid"):
            experts = tiny_hyper.token_experts(
                buffer.shape, case.fields["n_routed_experts"], generator
            )
            buffer.copy_(torch.from_numpy(experts))
        if name.endswith("layer_scalar"):
            values = 1.0 + _VECTOR_STD * generator.standard_normal(buffer.shape)
            buffer.copy_(torch.from_numpy(values.astype(np.float32)))


def stores_offset(case: Case, name: str) -> bool:
    """Whether a norm's factor is stored as w - 1."""
    if case.family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):
        return ".linear_attn.norm" not in name
    return case.family in ("gemma", "gemma2", "gemma3", "nemotron", "step3p5")


def _version_4(config: dict) -> dict:
    """The same config with the keys that transformers 4 wrote."""
    rope = config.pop("rope_parameters")
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "gemma3_text":
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
        del config["_sliding_window_pattern"]
        config["sliding_window_pattern"] = config.pop("layer_types").index("full_attention") + 1
    elif (config.get("head_dim") or 0) * config["num_attention_heads"] == config["hidden_size"]:
        del config["head_dim"]
    if config["model_type"] == "gpt_neox":
        config["rotary_emb_base"] = rope["rope_theta"]
        config["rotary_pct"] = rope.pop("partial_rotary_factor")
    config["rope_theta"] = rope.pop("rope_theta")
    shares = "phi", "phi3", "qwen3_next", "qwen3_5_moe_text", "stablelm", "glm", "glm4", "nemotron"
    if config["model_type"] in shares:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        rope.pop("original_max_position_embeddings", None)
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return config


def _make_bare(path: pathlib.Path, case: Case) -> None:
    """Names and masks as the first conversion of GPT-2 wrote them."""
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(path).items()}
    size = case.fields["n_positions"]
    mask = torch.ones(size, size).tril().to(case.dtype)[None, None]
    masks = {f"h.{i}.attn.bias": mask.clone() for i in range(case.fields["n_layer"])}
    save_file(tensors | masks, path, metadata={"format": "pt"})


def load(directory: pathlib.Path, dtype: torch.dtype) -> torch.nn.Module:
    """A checkpoint, without fused kernels."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )


def _expected(case: Case, directory: pathlib.Path) -> tuple[dict[str, Any], float]:
    """The reference's arrays, and how far its float32 logits are from float64 ones."""
    generator = np.random.default_rng(case.seed)
    model, exact = load(directory, torch.float32), load(directory, torch.float64)
    vocab_size = model.config.get_text_config().vocab_size
    prompts = [generator.integers(0, vocab_size, n) for n in _PROMPT_LENGTHS]
    expected: dict[str, Any] = {}
    if case.tokenizer:
        expected = tiny_tokenizer.expected(directory, model)
        prompts = [expected["ids_0"], expected["ids_1"]]
    error = 0.0
    for i, prompt in enumerate(prompts):
        logits, exact_logits = (_logits(m, prompt, case.stepwise) for m in (model, exact))
        error = max(error, (logits - exact_logits).abs().max().item())
        expected[f"tokens_{i}"] = prompt.astype(np.int32)
        expected[f"logits_{i}"] = logits.numpy()
    if case.greedy:
        expected |= _greedy(model, generator)
    if case.beams:
        expected |= _beams(model, generator)
    return expected, error


@torch.no_grad()
def _logits(model: torch.nn.Module, prompt: np.ndarray, stepwise: int | None) -> torch.Tensor:
    """Logits of all positions at once, or of those after `stepwise` as decoding computes them."""
    tokens = torch.from_numpy(prompt.astype(np.int64))[None]
    if stepwise is None:
        return model(tokens).logits[0]
    out = model(tokens[:, :stepwise], use_cache=True)
    parts = [out.logits]
    for t in range(stepwise, tokens.shape[1]):
        out = model(tokens[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
        parts.append(out.logits)
    return torch.cat(parts, dim=1)[0]


def _greedy(model: torch.nn.Module, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Ten prompts of 1 to 40 tokens whose greedy continuations no near tie decides."""
    prompts = np.full((_NUM_GREEDY, _LONGEST_GREEDY), -1, np.int32)
    continued = np.empty((_NUM_GREEDY, _GREEDY_TOKENS), np.int32)
    found = 0
    for _ in range(100 * _NUM_GREEDY):
        length = 1 + found * (_LONGEST_GREEDY - 1) // (_NUM_GREEDY - 1)
        tokens = generator.integers(0, model.config.get_text_config().vocab_size, length)
        for _ in range(_GREEDY_TOKENS):
            logits = _logits(model, tokens, None)[-1]
            with _equals_in_another_order():
                is_chance = (_logits(model, tokens, None)[-1] - logits).abs().max() > _SAME
            (first, second), ids = logits.topk(2)
            if first - second < _MIN_GAP or is_chance:
                break
            tokens = np.append(tokens, ids[0].item())
        else:
            prompts[found, :length], continued[found] = tokens[:length], tokens[length:]
            found += 1
        if found == _NUM_GREEDY:
            return {"greedy_prompts": prompts, "greedy_tokens": continued}
    raise ValueError("too many near ties among greedy continuations")


@contextlib.contextmanager
def _equals_in_another_order() -> Iterator[None]:
    """Makes `topk`, by which layers choose experts and earlier tokens, prefer the last of equals:
    it promises none.
    """
    topk = torch.topk

    def last(scores: torch.Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        values, ids = topk(scores.flip(dim), k, dim, **options)
        return torch.return_types.topk((values, scores.shape[dim] - 1 - ids))

    with (
        unittest.mock.patch.object(torch.Tensor, "topk", last),
        unittest.mock.patch.object(torch, "topk", last),
    ):
        yield


@torch.no_grad()
def _beams(model: torch.nn.Module, generator: np.random.Generator) -> dict[str, np.ndarray]:
    """Searches of every setting for three prompts."""
    prompts = generator.integers(0, model.config.vocab_size, (3, _BEAM_PROMPT))
    searches = list(itertools.product(_BEAM_SETTINGS, prompts))
    tokens = np.full((len(searches), _BEAMS, _BEAM_TOKENS), -1, np.int32)
    scores = np.empty((len(searches), _BEAMS), np.float32)
    for search, ((length_penalty, early_stopping), prompt) in enumerate(searches):
        given = torch.from_numpy(prompt)[None]
        out = model.generate(
            given, attention_mask=torch.ones_like(given), num_beams=_BEAMS,
            num_return_sequences=_BEAMS, max_new_tokens=_BEAM_TOKENS, do_sample=False,
            length_penalty=length_penalty, early_stopping=early_stopping,
            eos_token_id=_BEAM_ENDS, pad_token_id=_BEAM_ENDS[0],
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        scores[search] = out.sequences_scores.numpy()
        for row, generated in zip(tokens[search], out.sequences[:, _BEAM_PROMPT:], strict=True):
            is_end = np.isin(generated.numpy(), _BEAM_ENDS)
            length = is_end.argmax() + 1 if is_end.any() else _BEAM_TOKENS
            row[:length] = generated[:length]
    return {
        "beam_prompts": np.array([prompt for _, prompt in searches], np.int32),
        "beam_settings": np.array([settings for settings, _ in searches], np.float32),
        "beam_ends": np.array(_BEAM_ENDS, np.int32),
        "beam_tokens": tokens,
        "beam_scores": scores,
    }
