"""POST /v1/completions: continues or scores texts, or token ids."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

from msgspec import UNSET
from starlette.responses import Response

from inference.server.endpoints import gaps
from inference.server.endpoints.answers import Answers, EncodedPrompt, Piece, read_params
from inference.server.endpoints.envelope import AnswerHeader, whole
from inference.server.protocol import logprobs, parse, sampling
from inference.server.protocol.caller import Caller
from inference.server.protocol.event_stream import DONE, Events
from inference.server.protocol.fields import CompletionRequest
from inference.server.protocol.logprobs import CompletionShape
from inference.server.protocol.responses import CompletionChoice, Usage
from inference.server.service import Service
from inference.text.infill import Gap


class _Echo(NamedTuple):
    """A prompt as it is repeated before its answers.

    Attributes:
        num_spelled: number of tokens that `text` spells, special ones included: all, or 0 where the
            tokenizer added tokens to the client's text.
    """

    text: str
    num_spelled: int


class Completions:
    """A completion."""

    def __init__(
        self,
        service: Service,
        request: CompletionRequest,
        caller: Caller,
        gap: Gap | None = None,
    ):
        """`gap`: that the answer fills, in place of the request's prompt and suffix."""
        self._service = service
        self._gap = gap
        self._request = request
        self._caller = caller
        self._header = AnswerHeader(service, request, "cmpl", "text_completion")

    async def prepare(self) -> None:
        """Reads the fields and encodes the prompts; an `ApiError` names a wrong field."""
        request, service = self._request, self._service
        service.adapter_of(request.model)
        gap = self._gap or gaps.read(request)
        inputs = [] if gap else parse.prompts(request.prompt)
        params = await read_params(service, request, self._caller)
        prompts = []
        self._echoes: list[_Echo] = []
        self._gap_ends: set[int] = set()
        if gap is not None:
            prompt, self._gap_ends = await gaps.encode(service, request, gap, params)
            prompts, self._echoes = [prompt], [_Echo("", 0)]
        facts, add_special = service.facts, request.add_special_tokens is not False
        for input in inputs:
            if isinstance(input, str):
                tokens = await service.texts.encode(input, "prompt", add_special)
            else:
                tokens = parse.check_ids(input, facts.vocab_size, "prompt")
            prompt = EncodedPrompt(*sampling.fit(request, params, tokens, facts))
            prompts.append(prompt)
            is_whole = isinstance(input, str) and len(prompt.tokens) == len(tokens)
            self._echoes.append(await self._echo(prompt.tokens, str(input) if is_whole else None))
        self._answers = Answers(service, request, prompts, self._caller)
        if request.logprobs is not None:
            skips_special = request.skip_special_tokens is not False
            as_ids = bool(request.return_tokens_as_token_ids)
            self._shapes = [
                CompletionShape(service.texts.tokenizer, skips_special, as_ids, echo.num_spelled)
                for echo in self._echoes
                for _ in range(self._num_each)
            ]

    async def answer(self) -> Response:
        """Returns the whole answer; an `ApiError` says that the engine cannot."""
        choices = [CompletionChoice(index, "") for index in range(self._num_answers)]
        tokens: list[list] = [[] for _ in choices]
        for choice in choices:
            choice.token_ids = choice.prompt_token_ids = choice.prompt_logprobs = None
            if self._request.return_token_ids:
                choice.token_ids, choice.prompt_token_ids = [], self._prompt_of(choice.index).tokens
                choice.weight_versions = []
        if self._request.prompt_logprobs is not None:
            scores = await self._answers.scores(self._request.prompt_logprobs)
            for choice in choices:
                prompt_scores, texts = scores[choice.index // self._num_each], self._service.texts
                choice.prompt_logprobs = logprobs.prompt_shape(texts.tokenizer, prompt_scores)
        async for piece in self.pieces():
            choice = choices[piece.index]
            choice.text += piece.text
            tokens[piece.index] += piece.tokens
            if isinstance(choice.token_ids, list):
                choice.token_ids += piece.token_ids
            if choice.weight_versions is not UNSET:
                piece.add_versions(choice.weight_versions)
            choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
        if self._request.logprobs is not None:
            for choice, shape, answer_tokens in zip(choices, self._shapes, tokens, strict=True):
                choice.logprobs = shape.of(answer_tokens)
        return whole(self._header.answer(choices, self._answers.usage))

    async def events(self) -> Events:
        """Yields the answer as it comes; errors as `answer`."""
        begun: set[int] = set()
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                if piece.is_visible or self._request.return_token_ids:
                    choice = self._choice(piece)
                    if self._request.return_token_ids and piece.index not in begun:
                        choice.prompt_token_ids = self._prompt_of(piece.index).tokens
                    begun.add(piece.index)
                    yield self._header.chunk([choice], self._answers.usage)
        yield self._header.last(self._answers.usage) + DONE

    def _choice(self, piece: Piece) -> CompletionChoice:
        choice = CompletionChoice(
            piece.index, piece.text, None, piece.finish_reason, piece.stop_reason
        )
        if self._request.logprobs is not None:
            choice.logprobs = self._shapes[piece.index].of(piece.tokens)
        if self._request.return_token_ids:
            choice.token_ids = list(piece.token_ids)
            choice.weight_versions = list(piece.weight_versions)
        return choice

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yields echoed prompts, once the engine has begun, then pieces of their answers."""
        request, answers = self._request, self._answers
        scores: list = [() for _ in answers.prompts]
        if request.echo and request.logprobs is not None:
            scores = await answers.scores(request.logprobs)
        is_over = not answers.prompts[0].params.max_new_tokens
        first: list[Piece] = []
        for index in range(self._num_answers if request.echo or is_over else 0):
            nth = index // self._num_each
            text, tokens = (self._echoes[nth].text, scores[nth]) if request.echo else ("", ())
            first.append(Piece(index, text, (), tokens, "length" if is_over else None))
        if is_over:
            for piece in first:
                yield piece
            return
        async with aclosing(answers.pieces()) as pieces:
            async for piece in pieces:
                while first:
                    yield first.pop(0)
                answers.count(piece)
                yield replace(piece, stop_reason=None) if self._is_end(piece) else piece

    def _is_end(self, piece: Piece) -> bool:
        """Whether a piece ends with an end token of gaps, which the request does not know."""
        return piece.stop_reason in self._gap_ends

    @property
    def usage(self) -> Usage:
        return self._answers.usage

    @property
    def _num_each(self) -> int:
        return self._request.n or 1

    @property
    def _num_answers(self) -> int:
        return len(self._answers.prompts) * self._num_each

    def _prompt_of(self, index: int) -> EncodedPrompt:
        return self._answers.prompts[index // self._num_each]

    async def _echo(self, tokens: list[int], sent: str | None) -> _Echo:
        """The echo of a prompt's tokens; `sent`: the client's text that they encode, if any."""
        if not self._request.echo:
            return _Echo("", 0)
        spelled = await self._service.texts.decode(tokens)
        text = spelled if sent is None else sent
        return _Echo(text, len(tokens) if text == spelled else 0)
