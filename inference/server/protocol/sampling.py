"""Fields of a request become `SamplingParams`, checked against what the engine can do."""

import dataclasses

from configs.errors import InputError
from inference.request import SamplingParams
from inference.server.frames import Loaded
from inference.server.protocol import errors
from inference.server.protocol.errors import ApiError
from inference.server.protocol.fields import ChatRequest, CompletionRequest, Sampling, Side

_DEFAULT_COMPLETION_TOKENS = 16
_ANY_LENGTH = 2**31 - 1

# Where a field of ours has another name there.
_NAMES = {
    "max_new_tokens": "max_tokens",
    "presence": "presence_penalty",
    "frequency": "frequency_penalty",
    "repetition": "repetition_penalty",
    "stop_ids": "stop_token_ids",
    "allowed_ids": "allowed_token_ids",
}


def read(
    request: Sampling, facts: Loaded, grammar: str | None = None, client: str = ""
) -> SamplingParams:
    """How to sample; `max_new_tokens` is `limit`'s, `grammar` what `structure.read` made of it.
    Clients share cached prefixes with themselves alone.

    Raises:
        ApiError: 400, which names the field.
    """
    _check(request, facts)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    penalty = request.repetition_penalty
    try:
        return SamplingParams(
            max_new_tokens=_ANY_LENGTH,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_k=max(request.top_k or 0, 0),
            top_p=1.0 if request.top_p is None else request.top_p,
            min_p=request.min_p or 0.0,
            presence=request.presence_penalty or 0.0,
            frequency=request.frequency_penalty or 0.0,
            repetition=1.0 if penalty is None else penalty,
            logit_bias=tuple(_biases(request, facts.vocab_size)),
            allowed_ids=None
            if request.allowed_token_ids is None
            else (*request.allowed_token_ids,),
            min_tokens=request.min_tokens or 0,
            stop=tuple(stop or ()),
            stop_ids=tuple(request.stop_token_ids or ()),
            ignore_eos=bool(request.ignore_eos),
            seed=request.seed,
            priority=request.priority or 0,
            n=request.n or 1,
            best_of=request.best_of if isinstance(request, CompletionRequest) else None,
            speculate=request.speculate is not False,
            grammar=grammar,
            cache_salt=salt(client, request.cache_salt),
            skip_special_tokens=request.skip_special_tokens is not False,
        )
    except InputError as error:
        raise invalid(str(error)) from None


def limit(
    request: Sampling, params: SamplingParams, num_tokens: int, facts: Loaded
) -> SamplingParams:
    """The same for a prompt of so many tokens, with a limit of new ones: what was asked for, or
    what the context has room for.

    Raises:
        ApiError: 400, the context does not hold the prompt; says how many tokens each has.
    """
    room = facts.max_context - num_tokens
    most = _asked_tokens(request, room)
    where = "messages" if isinstance(request, ChatRequest) else "prompt"
    if room < (most > 0):
        raise ApiError(
            400,
            f"{where}: the context of this model is {facts.max_context} tokens, and {num_tokens} "
            "are given: at least one must be left to generate",
            where,
            "context_length_exceeded",
        )
    most = min(most, room)
    if params.min_tokens > most:
        raise ApiError(
            400, f"min_tokens is at most max_tokens, {most} here", "min_tokens", "invalid_value"
        )
    if not most:  # one score does for every answer
        return dataclasses.replace(params, max_new_tokens=0, n=1, best_of=None)
    try:
        return dataclasses.replace(params, max_new_tokens=most)
    except InputError as error:
        raise invalid(str(error)) from None


def truncate(request: Sampling, tokens: list[int], facts: Loaded) -> list[int]:
    """A prompt as `truncate_prompt_tokens` cuts it: -1 leaves room in the context for the tokens
    that are asked for, or for one where they fill it.
    """
    most = _explicit_tokens(request) or 1
    room = facts.max_context - (most if most < facts.max_context else 1)
    return cut(tokens, request.truncate_prompt_tokens, room, request.truncation_side or "left")


def cut(tokens: list[int], most: int | None, room: int, side: Side) -> list[int]:
    """At most so many tokens of a prompt (-1: `room`; 0 or None: all), without those at one side
    of it.
    """
    most = room if most == -1 else most or len(tokens)
    return tokens[-most:] if side == "left" else tokens[:most]


def num_top_logprobs(request: Sampling) -> int | None:
    """Alternatives of each token that are asked for; None: no log-probabilities."""
    if isinstance(request, CompletionRequest):
        return request.logprobs
    assert isinstance(request, ChatRequest)
    return (request.top_logprobs or 0) if request.logprobs else None


def invalid(message: str) -> ApiError:
    """What `SamplingParams` or the engine refuse: their messages begin with the field's name."""
    first, _, rest = message.partition(" ")
    known = _NAMES.get(first, first)
    is_field = known in Sampling.__struct_fields__ or known == "best_of"
    return ApiError(
        400,
        f"{known} {rest}" if is_field else message,
        known if is_field else None,
        "invalid_value",
    )


def salt(client: str, asked: str | None) -> str | None:
    """Of a client's cached prefixes; None where there are no keys and nothing is asked for."""
    return f"{client}/{asked or ''}" if client or asked else None


def _asked_tokens(request: Sampling, room: int) -> int:
    """To generate at most; where nothing is said, at least one."""
    if (most := _explicit_tokens(request)) is not None:
        return most
    return max(
        1, room if isinstance(request, ChatRequest) else min(_DEFAULT_COMPLETION_TOKENS, room)
    )


def _explicit_tokens(request: Sampling) -> int | None:
    """To generate at most, as the request says."""
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        return request.max_completion_tokens
    return request.max_tokens


def _biases(request: Sampling, vocab_size: int) -> list[tuple[int, float]]:
    found = []
    for name, bias in (request.logit_bias or {}).items():
        is_id = name.isascii() and name.isdigit() and len(name) < 11 and int(name) < vocab_size
        if not is_id:
            raise ApiError(
                400,
                f"logit_bias: its keys are token ids below {vocab_size}, as text",
                "logit_bias",
                "invalid_value",
            )
        found.append((int(name), bias))
    return found


def _check(request: Sampling, facts: Loaded) -> None:
    """What one field asks of another, or of the engine."""

    def refuse(param: str, why: str) -> None:
        raise errors.invalid(param, why)

    if request.stream_options is not None and not request.stream:
        refuse("stream_options", "goes with stream=true")
    if request.prompt_logprobs is not None and request.stream:
        refuse("prompt_logprobs", "cannot be streamed")
    if (request.prompt_logprobs or 0) > facts.max_top_logprobs:
        refuse("prompt_logprobs", f"is at most {facts.max_top_logprobs} on this server")
    for param in ("stop_token_ids", "allowed_token_ids"):
        if any(id >= facts.vocab_size for id in getattr(request, param) or ()):
            refuse(param, f"holds token ids below {facts.vocab_size}")
    if request.seed is not None and not facts.accepts_seeds:
        refuse("seed", "is not supported by a server whose drafts are accepted by rejection")
    if (request.n or 1) > facts.max_seqs:
        refuse("n", f"is at most {facts.max_seqs} on this server")
    if isinstance(request, CompletionRequest):
        if request.suffix:
            refuse("suffix", "is not supported by this server")
        if request.best_of is not None and request.stream:
            refuse("best_of", "cannot be streamed")
        if request.best_of is not None and request.best_of > facts.max_seqs:
            refuse("best_of", f"is at most {facts.max_seqs} on this server")
    elif isinstance(request, ChatRequest) and not request.logprobs:
        tops = request.top_logprobs
        if tops is not None:
            refuse("top_logprobs", "goes with logprobs=true")
    if (num_top_logprobs(request) or 0) > facts.max_top_logprobs:
        param = "logprobs" if isinstance(request, CompletionRequest) else "top_logprobs"
        refuse(param, f"is at most {facts.max_top_logprobs} on this server")
