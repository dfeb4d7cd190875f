"""Fields of a request become `SamplingParams`, checked against what the engine can do."""

import dataclasses
from typing import Any

from configs.errors import InputError, shown
from inference.request import FIELDS, WIRE_NAMES, SamplingParams
from inference.server.frames import Loaded
from inference.server.protocol import errors
from inference.server.protocol.errors import ApiError
from inference.server.protocol.fields import ChatRequest, CompletionRequest, Sampling, Side

_DEFAULT_COMPLETION_TOKENS = 16
_ANY_LENGTH = 2**31 - 1
_MAX_SHOWN = 3  # wrong names in a message


def read(
    request: Sampling, facts: Loaded, grammar: str | None = None, client: str = ""
) -> SamplingParams:
    """Returns how to sample, with any number of new tokens (`fit` limits it) and the grammar that
    `structure.read` wrote. Each client shares cached prefixes with itself alone.

    Raises:
        ApiError: 400, which names the field.
    """
    _check(request, facts)
    values = {name: _value(request, name, facts.vocab_size) for name in FIELDS}
    values |= {"max_new_tokens": _ANY_LENGTH, "grammar": grammar}
    values["thinks"] = values["thinking_budget"] is not None  # until the prompt is known
    values["cache_salt"] = salt(client, request.cache_salt)
    try:
        return SamplingParams(**values)
    except InputError as error:
        raise invalid(str(error)) from None


def fit(
    request: Sampling, params: SamplingParams, tokens: list[int], facts: Loaded
) -> tuple[list[int], SamplingParams]:
    """Cuts a prompt to `truncate_prompt_tokens` (-1 leaves room in the context for `max_tokens`, or
    for one token where those fill it), and limits the new tokens to what the context has room for.

    Raises:
        ApiError: 400, the context does not hold the prompt; says how many tokens each has.
    """
    is_chat, max_tokens = isinstance(request, ChatRequest), _max_tokens(request)
    limit, side = prompt_limit(request, facts), request.truncation_side or "left"
    tokens = cut(tokens, limit, facts.max_context, side)
    room = facts.max_context - len(tokens)
    if max_tokens is None:
        max_tokens = max(1, room if is_chat else min(_DEFAULT_COMPLETION_TOKENS, room))
    if room < (max_tokens > 0):
        why = (
            f"the context of this model is {facts.max_context} tokens, and {len(tokens)} are "
            "given: at least one must be left to generate"
        )
        where = "messages" if is_chat else "prompt"
        raise errors.unusable(where, why, "context_length_exceeded")
    max_tokens = min(max_tokens, room)
    if params.min_tokens > max_tokens:
        raise errors.invalid("min_tokens", f"is at most max_tokens, {max_tokens} here")
    if not max_tokens:  # one score does for every answer
        return tokens, dataclasses.replace(params, max_new_tokens=0, n=1, best_of=None)
    try:
        return tokens, dataclasses.replace(params, max_new_tokens=max_tokens)
    except InputError as error:
        raise invalid(str(error)) from None


def cut(tokens: list[int], limit: int | None, room: int, side: Side) -> list[int]:
    """Cuts tokens from one side of a prompt until `limit` are left (-1: `room`; 0 or None: all)."""
    limit = room if limit == -1 else limit or len(tokens)
    return tokens[-limit:] if side == "left" else tokens[:limit]


def prompt_limit(request: Sampling, facts: Loaded) -> int | None:
    """The number of tokens to which `truncate_prompt_tokens` cuts a prompt; None: it does not."""
    if request.truncate_prompt_tokens != -1:
        return request.truncate_prompt_tokens or None
    max_tokens = _max_tokens(request)
    return facts.max_context - (max_tokens if max_tokens and max_tokens < facts.max_context else 1)


def num_top_logprobs(request: Sampling) -> int | None:
    """Alternatives of each token in the answer; None: no log-probabilities."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    assert isinstance(request, ChatRequest)
    return (request.top_logprobs or 0) if request.logprobs else None


def invalid(message: str) -> ApiError:
    """Returns an error of `SamplingParams` or the engine, whose text begins with a field's name, as
    one of HTTP.
    """
    name, _, why = message.partition(" ")
    param = WIRE_NAMES.get(name, name)
    if param not in CompletionRequest.__struct_fields__:
        return ApiError(400, message, None, "invalid_value")
    return errors.invalid(param, why)


def salt(client: str, salt: str | None) -> str | None:
    """Returns the salt of a client's cached prefixes; None without an API key and without one."""
    return f"{client}/{salt or ''}" if client or salt else None


def _max_tokens(request: Sampling) -> int | None:
    limit = request.max_completion_tokens if isinstance(request, ChatRequest) else None
    max_tokens: int | None = request.max_tokens if limit is None else limit
    return max_tokens


def _value(request: Sampling, name: str, vocab_size: int) -> Any:
    """A field of `SamplingParams` as a body gives it, or its default."""
    field = FIELDS[name]
    value = getattr(request, WIRE_NAMES[name], None) if field.bodies else None
    if value is None:
        return field.default if field.wire_default is None else field.wire_default
    if name == "logit_bias":
        return _biases(value, vocab_size)
    if name == "stop" and isinstance(value, str):
        return [value]
    return max(value, 0) if name == "top_k" else value


def _biases(biases: dict[str, float], vocab_size: int) -> dict[int, float]:
    def is_id(name: str) -> bool:
        is_number = name.isascii() and name.isdigit() and len(name) < 11
        return is_number and int(name) < vocab_size

    if wrong := [shown(name) for name in biases if not is_id(name)]:
        names = ", ".join(wrong[:_MAX_SHOWN])
        why = f"has token ids below {vocab_size} as names, not {names}"
        raise errors.invalid("logit_bias", why)
    return {int(name): bias for name, bias in biases.items()}


def _check(request: Sampling, facts: Loaded) -> None:
    """Checks what one field requires of another, or of the engine."""

    def refuse(param: str, why: str) -> None:
        raise errors.invalid(param, why)

    def check_at_most(param: str, value: int | None, most: int) -> None:
        if (value or 0) > most:
            refuse(param, f"is at most {most} on this server")

    if request.stream_options is not None and not request.stream:
        refuse("stream_options", "goes with stream=true")
    if request.prompt_logprobs is not None and request.stream:
        refuse("prompt_logprobs", "cannot be streamed")
    check_at_most("prompt_logprobs", request.prompt_logprobs, facts.max_top_logprobs)
    for param in ("stop_token_ids", "allowed_token_ids"):
        if any(id >= facts.vocab_size for id in getattr(request, param) or ()):
            refuse(param, f"holds token ids below {facts.vocab_size}")
    if request.seed is not None and not facts.accepts_seeds:
        refuse("seed", "is not supported by a server whose drafts are accepted by rejection")
    check_at_most("n", request.n or 1, facts.max_seqs)
    if request.best_of is not None and request.stream:
        refuse("best_of", "cannot be streamed")
    check_at_most("best_of", request.best_of, facts.max_seqs)
    if isinstance(request, CompletionRequest):
        check_at_most("logprobs", request.logprobs, facts.max_top_logprobs)
    elif isinstance(request, ChatRequest):
        if request.top_logprobs is not None and not request.logprobs:
            refuse("top_logprobs", "goes with logprobs=true")
        check_at_most("top_logprobs", request.top_logprobs, facts.max_top_logprobs)
