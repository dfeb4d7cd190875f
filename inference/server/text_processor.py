"""Encodes and decodes text without blocking the event loop."""

import asyncio
import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from configs.errors import InputError
from inference.server.frames import TextFacts
from inference.server.protocol import structure, tool_results
from inference.server.protocol.errors import ApiError, invalid, missing, unavailable, unusable
from inference.server.protocol.fields import ChatMessage, ChatRequest, Sampling
from inference.server.protocol.tool_fields import EarlierCall
from inference.server.protocol.tools import OfferedTools
from inference.server.workers.jobs import (
    Compile,
    Convert,
    Decode,
    Encode,
    EncodeChat,
    EncodeInfill,
    EncodePair,
    Job,
    JobFailed,
    WriteTag,
)
from inference.server.workers.pool import Pool, WorkerLost
from inference.text import channel_rules, grammar
from inference.text.channels import Channels
from inference.text.infill import Gap
from inference.text.layouts import Layout
from inference.text.tokenizer import Tokenizer
from inference.text.tool_calls import constrain, formats
from inference.text.tool_calls.formats import Format

# A prompt with more characters for each token of the context is rejected unread.
_CHARS_A_TOKEN = 16
_INLINE_CHARS, _INLINE_IDS = 1024, 1024  # encoded in less time than a worker takes to reply
_CALL_CHARS = 64  # so many characters take as long as the call itself
_MAX_COMPILED = 256  # grammars remembered as valid
_SEARCH_S = 10.0  # of wall time, to find the invalid schema: a worker may have to start


class TextProcessor:
    """The tokenizer of the engine, and workers that encode long texts: they delay other texts, but
    no token of a stream. A text that takes too much time or memory ends its worker.

    Attributes:
        tokenizer: for short texts.
    """

    def __init__(self, max_context: int, tokenizer: Tokenizer | None, pool: Pool | None):
        self._tokenizer = tokenizer
        self._pool = pool
        self._max_chars = _CHARS_A_TOKEN * max_context
        self._num_inline = 0  # characters encoded since the event loop last ran other tasks
        self._compiled: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._starting: asyncio.Task[None] | None = None

    @classmethod
    async def load(
        cls, facts: TextFacts | None, max_context: int, num_workers: int
    ) -> "TextProcessor":
        """Builds the tokenizer in a thread; `facts`: None if the model takes token ids only."""
        if facts is None:
            return cls(max_context, None, None)
        tokenizer = await asyncio.to_thread(facts.tokenizer)
        pool = await asyncio.to_thread(Pool, facts, num_workers)
        return cls(max_context, tokenizer, pool)

    def warm_up(self) -> None:
        """Starts a worker, so that the first request does not wait for it."""
        if self._pool is not None:
            self._starting = asyncio.create_task(self._pool.start())

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises an `ApiError` if the model has none."""
        if self._tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: give token ids", code="unsupported")
        return self._tokenizer

    async def encode(self, text: str, param: str, add_special: bool = True) -> list[int]:
        """Token ids of a text; `param`: the request's field, for errors.

        Raises:
            ApiError: 400, the text cannot be encoded, or takes too long.
        """
        self._check_length(len(text), param)
        if len(text) > _INLINE_CHARS or self.tokenizer.may_panic:
            return await self._ask(Encode(text, add_special), param)
        self._num_inline += len(text) + _CALL_CHARS
        if self._num_inline > _INLINE_CHARS:  # many short ones take as long as a long one
            self._num_inline = 0
            await asyncio.sleep(0)
        try:
            return self.tokenizer.encode(text, add_special)
        except InputError as error:
            raise unusable(param, str(error)) from None

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool,
        tools: list[dict[str, object]] | None,
        variables: dict[str, Any],
        continues: bool,
        documents: list[dict[str, str]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            add_generation_prompt: ends with the start of the assistant's turn.
            continues: ends within the last message, which the model continues.
            documents: that the chat template shows to the model.

        Raises:
            ApiError: 400, the messages are not supported, the template rejects them, or they take
                too long.
        """
        tool_results.check(messages)
        plain = [_plain(message, index) for index, message in enumerate(messages)]
        self._check_length(_num_chars([plain, tools, variables, documents]), "messages")
        job = EncodeChat(
            plain, add_generation_prompt, tools, variables, continues, documents or None
        )
        return await self._ask(job, "messages")

    async def encode_infill(self, gap: Gap, add_special: bool, limit: int | None) -> list[int]:
        """Token ids of a prompt around a gap, of `limit` at most, for a model that fills gaps.

        Raises:
            ApiError: 400, the texts cannot be encoded, or take too long.
        """
        self._check_length(gap.num_chars, "prompt")
        return await self._ask(EncodeInfill(gap, add_special, limit), "prompt")

    async def encode_pair(
        self, query: str, document: str, variables: dict[str, object], param: str
    ) -> list[int]:
        """Token ids of a query and a document, as `pairs.encode`.

        Raises:
            ApiError: 400, the texts cannot be encoded, or take too long.
        """
        self._check_length(len(query) + len(document), param)
        return await self._ask(EncodePair(query, document, variables), param)

    async def read_structure(
        self,
        request: Sampling,
        accepts: bool,
        offer: OfferedTools | None = None,
        format: Format = formats.JSON,
        layout: Layout | None = None,
    ) -> str | None:
        """The grammar of a request's answer, or None. A worker compiles it first, unless it is
        known to be valid, so that a slow or invalid grammar delays no step of the engine.

        Args:
            layout: of an answer from its beginning on: the grammar has the headers of messages.

        Raises:
            ApiError: 400, the grammar is invalid or takes too long, or grammars are not supported.
        """
        spec = request.structured_outputs
        if spec is not None and spec.grammar is not None and grammar.is_gbnf(spec.grammar):
            spec.grammar = await self._ask(Convert(spec.grammar), "structured_outputs")
        grammar_text, param = structure.read(request, await self._written_tag(request, accepts))
        if offer is not None and offer.is_required:
            is_schema = param == "response_format" and not structure.is_free(request)
            if grammar_text is not None and not is_schema:
                why = f"and {param} exclude each other, where a tool has to be called"
                raise invalid("tool_choice", why)
            grammar_text, param = None, "tool_choice"  # calls alone: no text has the format
        elif grammar_text is None:
            return None
        if not accepts:
            raise invalid(param, "is not supported by this server", "unsupported")
        header = layout.answer_header if layout is not None else ""
        if offer is not None and not structure.is_free(request):  # whose texts may be calls
            specials = self.tokenizer.specials_in((*format.marks, header))
            write = functools.partial(
                constrain.of_calls, format, offer.schemas, offer.is_parallel, grammar_text,
                specials, header,
            )  # fmt: skip
            return await self._compile_calls(write, offer, grammar_text, param)
        assert grammar_text is not None
        if request.bad_words and isinstance(layout, Channels):
            specials = self.tokenizer.specials_in(layout.texts)
            is_chat = isinstance(request, ChatRequest)
            has_thoughts = not is_chat or request.thinking_token_budget is None
            text = channel_rules.without(layout, specials, request.bad_words, has_thoughts)
        else:
            text = grammar.behind(header, self.tokenizer.specials_in((header,)), grammar_text)
        return await self._compile(lambda: text, param)

    async def _written_tag(self, request: Sampling, accepts: bool) -> str | None:
        """The grammar of a request's structural tag, if it has one."""
        tag, param = structure.tag(request)
        if tag is None:
            return None
        if not accepts:
            raise invalid(param, "is not supported by this server", "unsupported")
        written: str = await self._ask(WriteTag(tag), param)
        return written

    async def _compile_calls(
        self, write: Callable[[], str], offer: OfferedTools, other: str | None, param: str
    ) -> str:
        """Compiles a grammar of calls and perhaps of texts of the grammar `other`, which `param`
        has. If it is invalid, compiles its parts one by one to name the invalid one in the error.
        """
        try:
            return await self._compile(write, "tools")
        except ApiError as error:
            if error.status != 400:
                raise
            clock = asyncio.get_running_loop().time
            until = clock() + _SEARCH_S
            parts: list[tuple[Callable[[], str], str]] = [
                (functools.partial(grammar.of_json_schema, schema), offer.places[name])
                for name, schema in offer.schemas.items()
            ]
            if other is not None:
                parts.append((functools.partial(str, other), param))
            for part, place in parts:
                if clock() < until:
                    await self._compile(part, place)
            raise

    async def _compile(self, write: Callable[[], str], param: str) -> str:
        """Writes a grammar and checks that it compiles."""
        try:
            text = write()
        except InputError as error:
            raise unusable(param, str(error)) from None
        except RecursionError:
            raise unusable(param, "it is nested too deeply") from None
        if text not in self._compiled:
            await self._ask(Compile(text), param)
        self._compiled[text] = None
        self._compiled.move_to_end(text)
        while len(self._compiled) > _MAX_COMPILED:
            self._compiled.popitem(last=False)
        return text

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of all token ids; raises an `ApiError` (400) if that takes too long."""
        if len(ids) <= _INLINE_IDS:
            return self.tokenizer.decode(ids, skip_special=False)
        text: str = await self._ask(Decode(list(ids)), "tokens")
        return text

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    async def _ask(self, job: Job, param: str) -> Any:
        assert self.tokenizer and self._pool is not None
        try:
            reply = await self._pool.ask(job)
        except UnicodeEncodeError as error:
            why = f"the text is not valid Unicode: {error.reason}"
            raise unusable(param, why) from None
        except RecursionError:
            raise unusable(param, "it is nested too deeply") from None
        except OverflowError:
            raise unusable(param, "it holds a whole number of more than 64 bits") from None
        except WorkerLost:
            raise unavailable("the text could not be processed: send it again") from None
        if isinstance(reply, JobFailed):
            raise unusable(param, reply.reason)
        return reply.value

    def _check_length(self, num_chars: int, param: str) -> None:
        if num_chars > self._max_chars:
            limit = f"{_CHARS_A_TOKEN} for each token of the context, {self._max_chars}"
            why = f"{num_chars} characters are more than {limit}"
            raise unusable(param, why, "context_length_exceeded")


def _num_chars(value: object) -> int:
    """Characters of all texts in JSON data, names of fields included: templates can write them."""
    num, pending = 0, [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            num += len(item)
        elif isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, list):
            pending += item
    return num


def _plain(message: ChatMessage, index: int) -> dict[str, object]:
    """A message in the form that chat templates read."""
    content, where = message.content, f"messages[{index}].content"
    if isinstance(content, list):
        if any(part.type != "text" or part.text is None for part in content):
            raise invalid(where, "has parts of type text alone", "unsupported")
        content = "\n".join(part.text or "" for part in content)
    if content is None and not message.tool_calls:
        raise missing(where)
    plain: dict[str, object] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content or "",
    }
    for name in ("name", "reasoning_content", "reasoning", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [_plain_call(call) for call in message.tool_calls]
    return plain


def _plain_call(call: EarlierCall) -> dict[str, object]:
    plain = {"type": "function", "function": msgspec.to_builtins(call.function)}
    return plain if call.id is None else {"id": call.id, **plain}
