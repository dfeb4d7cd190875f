"""References of SmolLM2-135M-Instruct and Gemma 3 270M: what transformers does with real weights.

float32 arithmetic, eager attention, on the bfloat16 weights of `real_weights`. `write` makes two
files with these arrays, where n prompts are padded with -1 (ids) or NaN (log-probabilities):

    prompts            U[n]         the text; the last one is the chat, rendered
    prompt_ids         i32[n, P]    as the tokenizer encodes it: Gemma's begin with <bos>
    prompt_lengths     i32[n]
    prompt_logprobs    f32[n, P]    of token i given the tokens before it; NaN at 0
    tokens             i32[n, 32]   greedy continuation; end tokens do not stop it
    logprobs           f32[n, 32]   of each of these tokens
    gaps               f32[n, 32]   between the two largest logits where it was chosen
    chat_messages      U[]          JSON of the messages that a template renders (SmolLM2 only)

`write_default_text` makes one file about the default evaluation text for both models M:

    text_sha256        U[]          of the whole text's UTF-8 bytes
    M_ids              i32[4096]    the text's first tokens, without <bos>
    M_windows          i32[8, 512]  what is scored: each row alone, its positions 1..511 predicted
    M_logprobs         f32[8, 511]
    M_perplexity       f64[]        exp of the mean negative log-probability of all 8 x 511

SmolLM2's windows are its ids, reshaped: its tokenizer adds no <bos>. Gemma's tokenizer adds one,
and without it the model is far off, so each of its windows is <bos> and the text's next 511 tokens;
`gemma3_perplexity_without_bos` is the figure for its ids, reshaped.
"""

import hashlib
import json
import pathlib
import pydoc_data.topics
from typing import Any

import numpy as np
import torch
import transformers

_NEW_TOKENS = 32
_WINDOW, _NUM_WINDOWS = 512, 8
# The text of Python 3.11.7; other versions' differ.
_TEXT_SHA256 = "2a95af4ac93f5b719944030ce3769070ddf827d847cba42192afa8da989e5dc4"
# Rows of logits computed at once: Gemma's vocabulary makes a row a megabyte.
_HEAD_ROWS = 128
# Closer logits may come in another order on another CPU: prompts that meet such a tie are refused.
_TIE = 1e-3

_PROMPTS = (
    "The capital of France is",
    "The",
    "a",
    "Hello, world",
    "Water boils at a temperature of",
    "In 1969, Apollo 11",
    "Q: What is the capital of Japan?\nA:",
    "To make pancakes you need the following ingredients:\n-",
    "Once upon a time, in a small village by the sea,",
    'def fibonacci(n):\n    """Return the n-th Fibonacci number."""\n',
    "for (int i = 0; i < 10; i++) {\n\t",
    "SELECT name, COUNT(*) FROM users WHERE",
    "import numpy as np\n\nx = np.",
    '{"name": "Ada", "born": 1815, "known_for": [',
    "<html>\n  <body>\n    <h1>",
    "La capital de España es",
    "Die größte Stadt in Österreich ist",
    "日本の首都は",
    "Столица России —",
    "عاصمة فرنسا هي",
    "1, 2, 3, 4, 5, 6, 7,",
    "Total:\n\n  12 apples and\n\n 345 pears make",
    "😀🎉 naïve café — “quoted” …",
    "   leading spaces, and\ttabs",
    "ha " * 40 + "ha",
    "The quick brown fox jumps over the lazy dog. " * 6,
)
_LONG_PROMPT = slice(20_000, 22_600)  # characters of the default text: about 600 tokens
_CHAT = [{"role": "user", "content": "What is the capital of France?"}]
# The Gemma file is the base model's and has no template; this is the one of its chat models.
_GEMMA_CHAT = (
    "<start_of_turn>user\nWhat is the capital of France?<end_of_turn>\n<start_of_turn>model\n"
)


def default_text() -> str:
    """The default evaluation text, checked to be Python 3.11.7's."""
    topics = pydoc_data.topics.topics
    text = "\n".join(value for _, value in sorted(topics.items()))
    if hashlib.sha256(text.encode()).hexdigest() != _TEXT_SHA256:
        raise SystemExit("error: the default text is Python 3.11.7's; this Python has another")
    return text


def write(path: pathlib.Path, model: torch.nn.Module, tokenizer) -> None:
    """Writes one model's prompts, greedy continuations and log-probabilities."""
    arrays: dict[str, Any] = {}
    if tokenizer.chat_template:
        arrays["chat_messages"] = np.array(json.dumps(_CHAT))
        chat = tokenizer.apply_chat_template(_CHAT, tokenize=False, add_generation_prompt=True)
    else:
        chat = _GEMMA_CHAT
    prompts = [*_PROMPTS, default_text()[_LONG_PROMPT], chat]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    longest = max(map(len, ids))
    prompt_ids = np.full((len(ids), longest), -1, np.int32)
    prompt_logprobs = np.full((len(ids), longest), np.nan, np.float32)
    tokens, logprobs, gaps = [], [], []
    for i, prompt in enumerate(ids):
        new = _greedy(model, prompt)
        scores, lead = _score(model, prompt + new)
        n = len(prompt)
        prompt_ids[i, :n] = prompt
        prompt_logprobs[i, 1:n] = scores[: n - 1]
        tokens.append(new)
        logprobs.append(scores[n - 1 :])
        gaps.append(lead[n - 1 :])
        # Negative if the pass without a cache would have chosen another token.
        if gaps[-1].min() < _TIE:
            raise ValueError(f"{prompts[i]!r}: a token leads by {gaps[-1].min():.1e} only")
    arrays |= {
        "prompts": np.array(prompts),
        "prompt_ids": prompt_ids,
        "prompt_lengths": np.array([len(prompt) for prompt in ids], np.int32),
        "prompt_logprobs": prompt_logprobs,
        "tokens": np.array(tokens, np.int32),
        "logprobs": np.array(logprobs, np.float32),
        "gaps": np.array(gaps, np.float32),
    }
    np.savez_compressed(path, **arrays, **_versions())


def write_default_text(path: pathlib.Path, models: dict) -> None:
    """Writes ids, log-probabilities and perplexities; `models` is name -> (model, tokenizer)."""
    text = default_text()
    arrays: dict[str, Any] = {"text_sha256": np.array(_TEXT_SHA256)}
    for name, (model, tokenizer) in models.items():
        # Enough text: a token is less than 16 characters long on average.
        ids = tokenizer(text[: 16 * _WINDOW * _NUM_WINDOWS], add_special_tokens=False)["input_ids"]
        ids = np.array(ids[: _WINDOW * _NUM_WINDOWS], np.int32)
        windows = ids.reshape(_NUM_WINDOWS, _WINDOW)
        if tokenizer("")["input_ids"]:
            rest = ids[: _NUM_WINDOWS * (_WINDOW - 1)].reshape(_NUM_WINDOWS, _WINDOW - 1)
            _, arrays[f"{name}_perplexity_without_bos"] = _perplexity(model, windows)
            windows = np.insert(rest, 0, tokenizer.bos_token_id, axis=1)
        arrays[f"{name}_ids"] = ids
        arrays[f"{name}_windows"] = windows
        arrays[f"{name}_logprobs"], arrays[f"{name}_perplexity"] = _perplexity(model, windows)
        print(f"{name}: perplexity {arrays[f'{name}_perplexity']:.4f}", flush=True)
    np.savez_compressed(path, **arrays, **_versions())


def _versions() -> dict[str, Any]:
    return {
        "torch_version": np.array(torch.__version__),
        "transformers_version": np.array(transformers.__version__),
    }


def _perplexity(model: torch.nn.Module, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    logprobs = np.stack([_score(model, row.tolist())[0] for row in windows])
    return logprobs, np.exp(-logprobs.astype(np.float64).mean())


@torch.no_grad()
def _greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """The most probable continuation, token by token with a cache, past any end token."""
    tokens, cache = [], None
    step = torch.tensor([prompt])
    for _ in range(_NEW_TOKENS):
        output = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        step = output.logits[:, -1].argmax(-1, keepdim=True)
        tokens.append(step.item())
    return tokens


@torch.no_grad()
def _score(model: torch.nn.Module, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Of each token but the first: its log-probability, and its lead over the best other token."""
    hidden = model.model(torch.tensor([tokens])).last_hidden_state[0, :-1]
    targets = torch.tensor(tokens[1:])[:, None]
    logprobs, leads = [], []
    for start in range(0, len(targets), _HEAD_ROWS):
        rows = slice(start, start + _HEAD_ROWS)
        logits = model.lm_head(hidden[rows])
        logprobs.append(torch.log_softmax(logits, -1).gather(1, targets[rows])[:, 0])
        chosen = logits.gather(1, targets[rows])[:, 0]
        others = logits.scatter(1, targets[rows], -torch.inf)
        leads.append(chosen - others.max(-1).values)
    return torch.cat(logprobs).numpy(), torch.cat(leads).numpy()
