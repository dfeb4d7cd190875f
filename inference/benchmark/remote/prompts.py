"""What a server is asked: prompts that are drawn, or read from a file, and when each is sent."""

import dataclasses
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from configs.errors import InputError
from configs.workload import MOST_TOKENS, Workload
from inference.benchmark import requests
from inference.files import json_lines, user_files
from inference.http_client.connections import Connections, Unanswered

_MAX_BYTES = 2 << 30
_CHARS_A_TOKEN = 4  # of English, where no server counts
# Which conversations of ShareGPT vLLM's and SGLang's benchmarks leave out, in tokens.
_MIN_TOKENS, _MOST_PROMPT, _MOST_TOGETHER = 4, 1024, 2048
# Short and frequent, so that most tokenizers have a token for each, with the space before it.
_TEXT = (
    "time people way water word day part number sound work place year back thing name sentence man "
    "line boy farm house point world school father tree city earth eye head story life paper group "
    "river car book side foot children mile night sea war ground summer list north body family "
    "music color map pattern table space moment voice power town fire state class wind rock order"
)
_WORDS = _TEXT.split()

Count = Callable[[str], Awaitable[int]]


@dataclasses.dataclass(frozen=True)
class RemoteRequest:
    """A prompt, as token ids or text, that is sent `arrival_s` seconds after the start and asks for
    `num_new_tokens`.
    """

    arrival_s: float
    prompt: str | Sequence[int]
    num_new_tokens: int

    @property
    def num_prompt_tokens(self) -> int:
        """As far as can be told without a tokenizer."""
        if isinstance(self.prompt, str):
            return round(len(self.prompt) / _CHARS_A_TOKEN)
        return len(self.prompt)


def drawn(workload: Workload, vocab_size: int, as_text: bool) -> list[RemoteRequest]:
    """Random prompts.

    Args:
        workload: closed or poisson.
        vocab_size: ids are below it.
        as_text: words instead, about as many as there would be ids.

    Raises:
        InputError: no vocabulary is as small.
    """
    if vocab_size < 256:
        raise InputError(f"a vocabulary has at least 256 tokens, not {vocab_size}")
    drawn_requests = requests.generate(workload, vocab_size, 2 * MOST_TOKENS)
    return [
        RemoteRequest(
            request.arrival_s,
            _words(request.prompt) if as_text else request.prompt,
            request.num_new_tokens,
        )
        for request in drawn_requests
    ]


def from_trace(name: str, limit: int | None, seed: int, vocab_size: int) -> list[RemoteRequest]:
    """Those of a JSONL trace; ids are drawn where it gives only a length.

    Raises:
        InputError: a line is not valid.
    """
    rng, remote_requests = random.Random(seed), []
    for line in requests.read_trace(name, limit):
        prompt: Any = line.prompt
        if isinstance(prompt, int):
            prompt = requests.random_tokens(prompt, vocab_size, rng)
        remote_requests.append(RemoteRequest(line.arrival_s, prompt, line.num_new_tokens))
    return remote_requests


def read_custom(name: str) -> list[tuple[str | tuple[int, ...], int | None]]:
    """Prompts of a JSONL file, each with the tokens to generate where it says so.

    Raises:
        InputError: names the first line that is not valid.
    """
    description = (
        '{"prompt": text} or {"token_ids": [id, ...]}, with "output_tokens" where it says so'
    )
    prompts: list[tuple[str | tuple[int, ...], int | None]] = []
    for number, fields in json_lines.read(
        name, ("prompt", "token_ids"), ("output_tokens",), description
    ):
        prompt = fields.get("prompt", fields.get("token_ids"))
        is_ids = isinstance(prompt, list) and all(type(id) is int and id >= 0 for id in prompt)
        tokens = fields.get("output_tokens")
        is_count = type(tokens) is int and 1 <= tokens <= MOST_TOKENS
        fits = isinstance(prompt, str) if "prompt" in fields else is_ids
        if not prompt or not fits or not (tokens is None or is_count):
            raise InputError(f"{name} line {number} is not {description}")
        prompts.append((tuple(prompt) if is_ids else prompt, tokens))
    return prompts


async def read_sharegpt(name: str, count: Count, limit: int, seed: int) -> list[tuple[str, int]]:
    """First prompts of so many of ShareGPT's conversations, drawn, each with the tokens of its
    answer; those that are very short or long are left out, as elsewhere.

    Raises:
        InputError: it is no such file, or nothing is left of it.
    """
    text = user_files.read_text(name, _MAX_BYTES)
    try:
        conversations = json.loads(text)
        turns: list[Any] = [entry.get("conversations") or () for entry in conversations]
        pairs = [(turn[0]["value"], turn[1]["value"]) for turn in turns if len(turn) >= 2]
        if not all(isinstance(part, str) for pair in pairs for part in pair):
            raise TypeError
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise InputError(
            f'{name} is not JSON like ShareGPT\'s: [{{"conversations": [{{"value": text}}, '
            "...]}, ...]"
        ) from None
    chosen: list[tuple[str, int]] = []
    for prompt, answer in random.Random(seed).sample(pairs, len(pairs)):
        if len(chosen) == limit:
            break
        if len(prompt) > 16 * _MOST_PROMPT:
            continue
        num_prompt, num_new = await count(prompt), await count(answer)
        is_short = min(num_prompt, num_new) < _MIN_TOKENS
        if not is_short and num_prompt <= _MOST_PROMPT and num_prompt + num_new <= _MOST_TOGETHER:
            chosen.append((prompt, num_new))
    if not chosen:
        raise InputError(f"{name}: none of {len(pairs)} conversations is of a usual length")
    return chosen


def counting(connections: Connections, model: str) -> Count:
    """Counts tokens by the server's /tokenize where there is one, else by characters."""

    async def count(text: str) -> int:
        data = msgspec.json.encode({"model": model, "prompt": text, "content": text})
        try:
            answer = await connections.post("/tokenize", data)
            tokens = msgspec.json.decode(answer.body)["tokens"] if answer.status == 200 else None
        except (Unanswered, msgspec.MsgspecError, LookupError, TypeError):
            tokens = None
        return len(tokens) if isinstance(tokens, list) else round(len(text) / _CHARS_A_TOKEN)

    return count


def at_times_of(
    workload: Workload, pairs: Sequence[tuple[str | Sequence[int], int | None]]
) -> list[RemoteRequest]:
    """Prompts that were read, at the times of a workload, which says how many: they begin again
    where there are fewer. Tokens to generate are the workload's where a prompt has none.
    """
    times = requests.generate(workload, 1 << 16, 2 * MOST_TOKENS)
    return [
        RemoteRequest(timed.arrival_s, prompt, num_new or timed.num_new_tokens)
        for timed, (prompt, num_new) in zip(times, itertools.cycle(pairs), strict=False)
    ]


def _words(tokens: Sequence[int]) -> str:
    return " ".join(_WORDS[token % len(_WORDS)] for token in tokens)
