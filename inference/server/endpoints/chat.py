"""POST /v1/chat/completions: the next message of a conversation."""

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec import UNSET
from starlette.responses import Response

from inference.server.endpoints import messages, reasoning
from inference.server.endpoints.answers import Answers, EncodedPrompt, Piece, read_params
from inference.server.endpoints.envelope import AnswerHeader, whole
from inference.server.endpoints.messages import MessageReader, News
from inference.server.endpoints.reasoning import AnswerStart, Reasoning
from inference.server.protocol import logprobs, parse, sampling, tools
from inference.server.protocol.caller import Caller
from inference.server.protocol.event_stream import DONE, Events
from inference.server.protocol.fields import ChatRequest
from inference.server.protocol.responses import (
    AnswerMessage,
    ChatChoice,
    ChatDelta,
    ChatLogprobs,
    CompletionTokensDetails,
    Delta,
    PromptLogprobs,
    Usage,
    WeightVersions,
)
from inference.server.service import Service
from inference.text import layouts
from inference.text.thoughts import Stage


async def encode(
    service: Service, request: ChatRequest, offer: tools.OfferedTools | None
) -> list[int]:
    """Token ids of a conversation with its tools, or those that the client has made of it; an
    `ApiError` names a wrong field.
    """
    if request.input_ids is not None:
        return parse.check_ids(request.input_ids, service.facts.vocab_size, "input_ids")
    begins, continues = tools.check_turn(request)
    offered = None if offer is None else offer.tools
    variables = tools.variables(request, service.texts.tokenizer.template_for(offered) or "")
    return await service.texts.encode_chat(
        request.messages, begins, offered, variables, continues, request.documents
    )


def _begun(request: ChatRequest) -> str:
    """The message that the answer continues; "": it is a message of its own."""
    if not request.continue_final_message:
        return ""
    content = request.messages[-1].content
    if isinstance(content, list):
        return "\n".join(part.text or "" for part in content)
    return content or ""


class Chat:
    """A chat completion."""

    def __init__(self, service: Service, request: ChatRequest, caller: Caller):
        self._service = service
        self._request = request
        self._caller = caller
        self._header = AnswerHeader(service, request, "chatcmpl", "chat.completion", ".chunk")

    async def prepare(self) -> None:
        """Reads the fields and encodes the conversation; an `ApiError` names a wrong field."""
        request, service = self._request, self._service
        service.adapter_of(request.model)
        self._offer = tools.read(request)
        tokenizer = service.texts.tokenizer
        layout = layouts.of_template(tokenizer.template)
        how = self._offer, service.tool_format
        headers = None if request.continue_final_message else layout
        params = await read_params(service, request, self._caller, *how, headers)
        tokens = await encode(service, request, self._offer)
        tokens, params = sampling.fit(request, params, tokens, service.facts)
        start = reasoning.of_prompt(tokenizer, tokens, _begun(request))
        if start is not None and start.stage is Stage.BEHIND and start.layout.answer_header:
            behind = await read_params(service, request, self._caller, *how)
            params = dataclasses.replace(params, grammar=behind.grammar)  # the prompt has a header
        holds_in_thoughts = bool(request.bad_words)
        params = reasoning.limited(params, start, service.facts, tokenizer, holds_in_thoughts)
        self._readers = [self._reader(start) for _ in range(request.n or 1)]
        self._token_ids: list[list[int]] = [[] for _ in self._readers]
        self._versions: list[WeightVersions] = [[] for _ in self._readers]
        prompt = EncodedPrompt(tokens, params)
        self._answers = Answers(service, request, [prompt], self._caller)

    def _reader(self, start: AnswerStart | None) -> MessageReader:
        """Returns what reads an answer."""
        how = self._offer, self._service.tool_format
        if start is None:
            return MessageReader(*how)
        divides = self._request.separate_reasoning is not False
        reasoning = Reasoning(start, self._service.texts.tokenizer, divides)
        thinks = start.stage is Stage.WITHIN and not divides
        return MessageReader(*how, reasoning, thinks, start.layout)

    async def answer(self) -> Response:
        """Returns the whole answer; an `ApiError` says that the engine cannot."""
        choices = [ChatChoice(index, AnswerMessage("")) for index, _ in enumerate(self._readers)]
        for choice in choices:
            choice.logprobs = ChatLogprobs([]) if self._request.logprobs else None
            if self._request.return_token_ids:
                choice.token_ids = self._token_ids[choice.index]
                choice.weight_versions = self._versions[choice.index]
        prompt_logprobs: PromptLogprobs | None = None
        if self._request.prompt_logprobs is not None:
            (scores,) = await self._answers.scores(self._request.prompt_logprobs)
            prompt_logprobs = logprobs.prompt_shape(self._service.texts.tokenizer, scores)
        async for piece, news in self.news():
            choice = choices[piece.index]
            messages.add(choice.message, news)
            if choice.logprobs and (chat_logprobs := self.logprobs_of(piece)):
                choice.logprobs.content += chat_logprobs.content
            choice.finish_reason, choice.stop_reason = news.finish_reason, piece.stop_reason
        answer = self._header.answer(choices, self._answers.usage)
        answer.prompt_logprobs = prompt_logprobs
        asks_ids = bool(self._request.return_token_ids)
        answer.prompt_token_ids = self._answers.prompts[0].tokens if asks_ids else None
        return whole(answer)

    async def events(self) -> Events:
        """Yields the answer as it comes, the role with its first token; errors as `answer`."""
        begun: set[int] = set()
        usage = self._answers.usage
        asks_ids = bool(self._request.return_token_ids)
        async with aclosing(self._answers.pieces()) as pieces:
            async for piece in pieces:
                event = b""
                if piece.index not in begun:
                    content = "" if self._offer is None else None  # it may have calls alone
                    role = ChatDelta(piece.index, Delta("assistant", content))
                    ids = self._answers.prompts[0].tokens if asks_ids and not begun else UNSET
                    event = self._header.chunk([role], usage, ids)
                    begun.add(piece.index)
                news = self._read(piece)
                if asks_ids or piece.tokens or piece.finish_reason or news.parts:
                    event += self._header.chunk([self._delta(piece, news)], usage)
                if event:
                    yield event
        yield self._header.last(usage) + DONE

    def _delta(self, piece: Piece, news: News) -> ChatDelta:
        has_text = news.content or (self._offer is None and not news.reasoning)
        thought = news.reasoning or UNSET
        delta = Delta(
            content=news.content if has_text else UNSET, tool_calls=news.calls or UNSET,
            reasoning=thought, reasoning_content=thought,
        )  # fmt: skip
        chat_delta = ChatDelta(piece.index, delta, self.logprobs_of(piece), news.finish_reason)
        if piece.finish_reason is not None:
            chat_delta.stop_reason = piece.stop_reason
        if self._request.return_token_ids:
            chat_delta.token_ids = list(piece.token_ids)
            chat_delta.weight_versions = list(piece.weight_versions)
        return chat_delta

    async def news(self) -> AsyncGenerator[tuple[Piece, News], None]:
        """Yields new parts of the message, for other encodings; errors as `answer`."""
        async with aclosing(self._answers.pieces()) as pieces:
            async for piece in pieces:
                yield piece, self._read(piece)

    def _read(self, piece: Piece) -> News:
        """Counts a piece and reads it."""
        self._answers.count(piece)
        news = self._readers[piece.index].read(piece)
        self._token_ids[piece.index] += piece.token_ids
        piece.add_versions(self._versions[piece.index])
        if news.finish_reason == "tool_calls":
            self._answers.retain(self._token_ids[piece.index])
        num_tokens = sum(reader.num_reasoning_tokens for reader in self._readers)
        self.usage.completion_tokens_details = CompletionTokensDetails(num_tokens)
        return news if self._request.include_reasoning is not False else news.without_reasoning

    @property
    def token_fields(self) -> dict[str, object]:
        """Token ids of the prompt and of the only answer so far, and versions of the weights, for
        other encodings; empty unless the request has `return_token_ids`.
        """
        if not self._request.return_token_ids:
            return {}
        [token_ids], [versions] = self._token_ids, self._versions
        prompt = self._answers.prompts[0].tokens
        return {"prompt_token_ids": prompt, "token_ids": token_ids, "weight_versions": versions}

    @property
    def usage(self) -> Usage:
        return self._answers.usage

    def logprobs_of(self, piece: Piece) -> ChatLogprobs | None:
        """Log-probabilities of a piece's tokens, if the request has them."""
        if not self._request.logprobs:
            return None
        as_ids = bool(self._request.return_tokens_as_token_ids)
        return logprobs.chat_shape(self._service.texts.tokenizer, piece.tokens, as_ids)
