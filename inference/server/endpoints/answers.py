"""The answers to the prompts of one request, in pieces as they come."""

import dataclasses
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple

from inference.outputs import RequestOutput, version_ranges
from inference.request import SamplingParams
from inference.server import traces
from inference.server.client.generation import Generation
from inference.server.failures import as_api_error
from inference.server.protocol import logprobs, sampling, structure
from inference.server.protocol.caller import Caller
from inference.server.protocol.errors import ApiError
from inference.server.protocol.fields import Sampling
from inference.server.protocol.logprobs import Token
from inference.server.protocol.responses import PromptTokensDetails, Usage, WeightVersions
from inference.server.protocol.tools import OfferedTools
from inference.server.service import Service
from inference.text.grammar import relaxed
from inference.text.layouts import Layout
from inference.text.tool_calls import formats
from inference.text.tool_calls.formats import Format


class EncodedPrompt(NamedTuple):
    """Token ids of a prompt, and how to continue them."""

    tokens: list[int]
    params: SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """New tokens and text of one answer.

    Attributes:
        index: of the answer; the answers to the first prompt come first.
        text: of the tokens, as far as it is certain.
        token_ids: of the new tokens.
        tokens: the new tokens with log-probabilities, if the request has them.
        finish_reason: of the answer's last piece.
        stop_reason: the request's stop string or token that ended the answer.
        num_cached_tokens: of the prompt, in the last piece of the prompt's first answer.
        weight_versions: (first token, token behind the last, version) of the weights of the new
            tokens, counted from the answer's start.
    """

    index: int
    text: str
    token_ids: Sequence[int] = ()
    tokens: Sequence[Token] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    weight_versions: Sequence[tuple[int, int, int]] = ()

    def add_versions(self, ranges: WeightVersions) -> None:
        """Adds its `weight_versions` to those of the answer's earlier pieces."""
        for begin, end, version in self.weight_versions:
            if ranges and ranges[-1][2] == version:
                begin, _, _ = ranges.pop()
            ranges.append((begin, end, version))

    @property
    def is_visible(self) -> bool:
        """Whether a stream has an event for it."""
        return bool(self.text or self.tokens or self.finish_reason)


async def read_params(
    service: Service,
    request: Sampling,
    caller: Caller,
    offer: OfferedTools | None = None,
    format: Format = formats.JSON,
    layout: Layout | None = None,
) -> SamplingParams:
    """Reads how to sample, with a grammar that compiles; an `ApiError` names a wrong field. The
    text has the marks of calls and of structural tags even where they are special tokens. `layout`:
    of an answer from its beginning on.
    """
    facts = service.facts
    how = offer, format, layout
    grammar = await service.texts.read_structure(request, facts.accepts_grammars, *how)
    caller.relaxed.update(relaxed(grammar or ""))
    params = sampling.read(request, facts, grammar, caller.name)
    params = dataclasses.replace(params, adapter=service.adapter_of(request.model))
    tag, _ = structure.tag(request)
    marks = [*(format.marks if offer is not None else ()), *([] if tag is None else [tag])]
    if not marks:
        return params
    specials = service.texts.tokenizer.specials_in(marks)
    return dataclasses.replace(params, shown_special_ids=tuple(specials.values()))


class Answers:
    """All answers of one request.

    Attributes:
        prompts: each of them.
        usage: tokens of the pieces that were counted.
    """

    def __init__(
        self,
        service: Service,
        request: Sampling,
        prompts: Sequence[EncodedPrompt],
        caller: Caller,
    ):
        self.prompts = prompts
        num_prompt = sum(len(prompt.tokens) for prompt in prompts)
        self.usage = Usage(num_prompt, 0, num_prompt, PromptTokensDetails())
        self._service = service
        self._num_top_logprobs = sampling.num_top_logprobs(request)
        self._shows_stop = bool(request.include_stop_str_in_output)
        self._caller = caller
        self._num_tokens: Counter[int] = Counter()  # of each answer

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yields pieces of all answers; closing the generator aborts the requests.

        Raises:
            ApiError: the engine rejects a request, or could not finish.
        """
        service, params, trace = self._service, self.prompts[0].params, traces.current()
        self._check_room(params.num_running)
        trace.begin(service.model_name, params, self.usage)
        num_answers, spent_s = len(self.prompts) * params.n, self._caller.deadline.spent_s
        with (
            service.metrics.watching(num_answers, spent_s) as watches,
            Generation(service.client, self._caller) as generation,
        ):
            for key, prompt in enumerate(self.prompts):
                await generation.add(key, *prompt, self._num_top_logprobs)
                service.metrics.count_prompt(len(prompt.tokens), prompt.params)
            while generation.is_open:
                key, output = await generation.next()
                piece = self._piece(key * params.n + output.index, output)
                watches[piece.index].note(len(piece.token_ids), output.queued_s)
                trace.note(piece.finish_reason, output.queued_s)
                if piece.finish_reason is not None:
                    watches[piece.index].end(piece.finish_reason, output.num_preemptions)
                yield piece

    async def scores(self, num_top_logprobs: int) -> list[list[Token]]:
        """Scores each prompt's tokens, with `num_top_logprobs` alternatives; the first has none.

        Raises:
            ApiError: as `pieces`.
        """
        scored: list[list[Token]] = [
            [(id, None, ((), ())) for id in prompt.tokens] for prompt in self.prompts
        ]
        self._check_room(1)
        with Generation(self._service.client, self._caller) as generation:
            for key, prompt in enumerate(self.prompts):
                if len(prompt.tokens) > 1:
                    salt = prompt.params.cache_salt
                    params = SamplingParams(max_new_tokens=0, cache_salt=salt)
                    await generation.add(key, prompt.tokens, params, num_top_logprobs)
            while generation.is_open:
                key, output = await generation.next()
                self._check_generated(output)
                if output.finish_reason is not None:
                    scored[key][1:] = logprobs.tokens(
                        self.prompts[key].tokens[1:], output.logprobs, output.top_logprobs
                    )
        return scored

    def retain(self, answer: Sequence[int]) -> None:
        """Lets the cached pages of the only prompt and an answer outlive others: a call's result
        comes next. Not of a batch, which sends no result.
        """
        if self._caller.is_background:
            return
        [prompt] = self.prompts
        tokens = [*prompt.tokens, *answer]
        self._service.client.retain(tokens, prompt.params)

    def _check_room(self, num_each: int) -> None:
        """Raises an `ApiError` unless there is room for `num_each` sequences of each prompt."""
        priority = self.prompts[0].params.priority
        self._service.check_room(self._caller, len(self.prompts), num_each, priority)

    def _piece(self, index: int, output: RequestOutput) -> Piece:
        self._check_generated(output)
        text = output.text
        if self._shows_stop and isinstance(output.stopped_by, str):
            text += output.stopped_by
        tokens: Sequence[Token] = ()
        if self._num_top_logprobs is not None:
            tokens = logprobs.tokens(output.token_ids, output.logprobs, output.top_logprobs)
        is_last = output.finish_reason is not None and not output.index
        begin = self._num_tokens[index]
        end = self._num_tokens[index] = begin + len(output.token_ids)
        return Piece(
            index, text, output.token_ids, tokens, output.finish_reason, output.stopped_by,
            output.num_cached_tokens if is_last else 0,
            version_ranges(output.version_starts, begin, end),
        )  # fmt: skip

    def count(self, piece: Piece) -> None:
        """Adds a piece to `usage`, whose value before does not include the piece's tokens."""
        self.usage.completion_tokens += len(piece.token_ids)
        self.usage.total_tokens += len(piece.token_ids)
        assert self.usage.prompt_tokens_details is not None
        self.usage.prompt_tokens_details.cached_tokens += piece.num_cached_tokens

    def _check_generated(self, output: RequestOutput) -> None:
        if output.failure:
            why = f"the answer cannot go on: {output.failure}"
            raise ApiError(400, why, code="grammar_failed", may_retry=False)
        if output.finish_reason == "error":
            self._service.metrics.corrupted()
            why = "the answer could not be generated"
            raise ApiError(500, why, code="model_error", may_retry=False)


def stream_failed(service: Service, error: Exception) -> ApiError:
    """Counts and logs a stream that ends with an error; returns the client's error."""
    service.metrics.stream_failed()
    traces.current().failed("stream_error")
    return as_api_error(error)
