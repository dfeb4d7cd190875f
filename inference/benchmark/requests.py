"""The requests of a workload: token ids, lengths and times of arrival, drawn from its seed."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from configs.errors import InputError
from configs.workload import MOST_TOKENS, Workload
from inference.files import json_lines

_WANTED = (
    '{"arrival_s": seconds, "output_tokens": count} and one of "prompt_tokens": count, '
    '"prompt": text, "token_ids": [id, ...]'
)
_PROMPTS = ("prompt_tokens", "prompt", "token_ids")
_MOST_SECONDS = 1e9


@dataclasses.dataclass(frozen=True)
class Turn:
    """What an agent sends `wait_s` seconds after an answer, behind all that came before."""

    wait_s: float
    tokens: tuple[int, ...]
    num_new_tokens: int


@dataclasses.dataclass(frozen=True)
class TimedRequest:
    """A prompt that arrives `arrival_s` seconds after the start and asks for `num_new_tokens`.

    Attributes:
        turn: of an agent's session, from 0.
        turns: that follow.
        num_earlier_tokens: of the prompt, which are the turn before and its answer.
    """

    arrival_s: float
    prompt: tuple[int, ...]
    num_new_tokens: int
    turn: int = 0
    turns: tuple[Turn, ...] = ()
    num_earlier_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Length at its end."""
        return len(self.prompt) + self.num_new_tokens

    def followed_by(self, answer: Sequence[int], ended_s: float) -> "TimedRequest":
        """The session's next turn, after an answer that ended then."""
        turn, *turns = self.turns
        earlier = (*self.prompt, *answer)
        return TimedRequest(
            ended_s + turn.wait_s, (*earlier, *turn.tokens), turn.num_new_tokens,
            self.turn + 1, tuple(turns), len(earlier),
        )  # fmt: skip


def generate(workload: Workload, vocab_size: int, max_context: int) -> list[TimedRequest]:
    """The requests of a closed or poisson workload, or the first turns of agents, as they arrive.

    Workloads that differ only in how requests arrive have the same requests. The first of a poisson
    workload arrives at 0.

    Raises:
        InputError: one does not fit into `max_context` tokens; no token has been drawn yet.
    """
    rng, count = random.Random(workload.seed), workload.num_requests
    assert count is not None and workload.kind != "trace"
    lengths = [(workload.prompt.draw(rng), workload.output.draw(rng)) for _ in range(count)]
    shares = set(rng.sample(range(count), round(workload.prefix_share * count)))
    shared = [workload.prefix_tokens if n in shares else 0 for n in range(count)]
    for (num_prompt, num_new), num_shared in zip(lengths, shared, strict=True):
        _check_fits(num_shared + num_prompt, num_new, max_context)
    prefixes = [
        random_tokens(workload.prefix_tokens, vocab_size, rng) for _ in range(workload.num_prefixes)
    ]
    requests, arrival_s = [], 0.0
    for n, (num_prompt, num_new) in enumerate(lengths):
        tokens = random_tokens(num_prompt, vocab_size, rng)
        prefix = prefixes[n % len(prefixes)] if n in shares else ()
        requests.append(TimedRequest(0.0, (*prefix, *tokens), num_new))
    if workload.rate is None:
        return requests
    for n, request in enumerate(requests):
        requests[n] = dataclasses.replace(request, arrival_s=arrival_s)
        arrival_s += _wait(workload, rng)
    return requests


def _wait(workload: Workload, rng: random.Random) -> float:
    """Seconds to the next request."""
    assert workload.rate is not None
    if workload.burstiness == 1:
        return rng.expovariate(workload.rate)
    return rng.gammavariate(workload.burstiness, 1 / (workload.rate * workload.burstiness))


@dataclasses.dataclass(frozen=True)
class TraceLine:
    """A request as a trace has it; `where` names it in errors."""

    where: str
    arrival_s: float
    prompt: int | str | tuple[int, ...]
    num_new_tokens: int


def read_trace(name: str, limit: int | None = None) -> list[TraceLine]:
    """The lines of a JSONL trace, blank ones aside; at most `limit`.

    Raises:
        InputError: names the first line that is not valid.
    """
    read = json_lines.read(name, _PROMPTS, ("arrival_s", "output_tokens"), _WANTED)
    lines = [_parse(f"{name} line {number}", fields) for number, fields in islice(read, limit)]
    return sorted(lines, key=lambda line: line.arrival_s)


def from_trace(
    lines: list[TraceLine],
    vocab_size: int,
    max_context: int,
    encode: Callable[[str], list[int]],
    seed: int,
) -> list[TimedRequest]:
    """The requests of a trace; tokens are drawn where it gives only lengths.

    Raises:
        InputError: a line has no tokens, or one that is not in the vocabulary, or does not fit into
            `max_context` tokens.
    """
    rng, requests = random.Random(seed), []
    for line in lines:
        given_prompt = tuple(encode(line.prompt)) if isinstance(line.prompt, str) else line.prompt
        num_prompt = given_prompt if isinstance(given_prompt, int) else len(given_prompt)
        _check_fits(num_prompt, line.num_new_tokens, max_context, f"{line.where}: ")
        prompt = (
            random_tokens(given_prompt, vocab_size, rng)
            if isinstance(given_prompt, int)
            else given_prompt
        )
        wrong = next((token for token in prompt if not 0 <= token < vocab_size), None)
        if not prompt or wrong is not None:
            what = "no tokens" if wrong is None else f"token id {wrong}"
            raise InputError(
                f"{line.where}: {what}; a prompt has at least one id from 0 to {vocab_size - 1}"
            )
        requests.append(TimedRequest(line.arrival_s, prompt, line.num_new_tokens))
    return requests


def _check_fits(num_prompt: int, num_new: int, max_context: int, where: str = "") -> None:
    if num_prompt + num_new > max_context:
        raise InputError(
            f"{where}a prompt of {num_prompt} tokens and {num_new} new ones grow to "
            f"{num_prompt + num_new} tokens, the context holds {max_context}: ask for shorter "
            "prompts or outputs"
        )


def random_tokens(count: int, vocab_size: int, rng: random.Random) -> tuple[int, ...]:
    """Random ids, but for the lowest, where vocabularies keep their special tokens."""
    return tuple(rng.randrange(vocab_size // 500, vocab_size) for _ in range(count))


def _parse(where: str, fields: dict[str, object]) -> TraceLine:
    arrival_s: Any = fields.get("arrival_s")
    is_number = isinstance(arrival_s, int | float) and not isinstance(arrival_s, bool)
    if not is_number or not 0 <= arrival_s <= _MOST_SECONDS:  # or NaN
        raise InputError(
            f"{where}: 'arrival_s' is a number of seconds from 0 to {_MOST_SECONDS:g}, not "
            f"{arrival_s!r:.60}"
        )
    return TraceLine(
        where, float(arrival_s), _prompt(where, fields), _count(where, fields, "output")
    )


def _prompt(where: str, fields: dict[str, object]) -> int | str | tuple[int, ...]:
    if "prompt_tokens" in fields:
        return _count(where, fields, "prompt")
    if "prompt" in fields:
        text = fields["prompt"]
        if not isinstance(text, str) or not text or _is_torn(text):
            raise InputError(f"{where}: 'prompt' is a text, not {text!r:.60}")
        return text
    ids = fields["token_ids"]
    if not isinstance(ids, list) or not ids or any(type(token) is not int for token in ids):
        raise InputError(f"{where}: 'token_ids' is a list of whole numbers, not {ids!r:.60}")
    return tuple(ids)


def _count(where: str, fields: dict[str, object], of: str) -> int:
    value = fields.get(f"{of}_tokens")
    if type(value) is not int or not 1 <= value <= MOST_TOKENS:
        raise InputError(
            f"{where}: '{of}_tokens' is a whole number from 1 to {MOST_TOKENS}, not {value!r:.60}"
        )
    return value


def _is_torn(text: str) -> bool:
    """Whether it holds half of a surrogate pair, which UTF-8 cannot encode."""
    return any("\ud800" <= character <= "\udfff" for character in text)
