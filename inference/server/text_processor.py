"""Text to token ids and back, beside the event loop."""

import asyncio
import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from configs.errors import InputError
from inference.server.frames import TextFacts
from inference.server.protocol import structure
from inference.server.protocol.errors import ApiError, unavailable
from inference.server.protocol.fields import ChatMessage, Sampling
from inference.server.protocol.tools import OfferedTools
from inference.server.workers.jobs import (
    Compile,
    Convert,
    Decode,
    Encode,
    EncodeChat,
    Job,
    JobFailed,
)
from inference.server.workers.pool import Pool, WorkerLost
from inference.text import grammar
from inference.text.tokenizer import Tokenizer
from inference.text.tool_calls import constrain, formats
from inference.text.tool_calls.formats import Format

_CHARS_A_TOKEN = 16  # a prompt with more characters for each token of the context is refused unread
_INLINE_CHARS, _INLINE_IDS = 1024, 1024  # a fraction of a millisecond: less than a worker's answer
_CALL_CHARS = 64  # as many take as long as the call itself
_KNOWN_GRAMMARS = 256
_SEARCH_S = 10.0  # on the clock, for the schema that cannot be compiled: a worker may have to start


class TextProcessor:
    """The tokenizer of the engine, and workers that encode: what takes long delays others of its
    kind, and no token of a stream; what takes too long or too much memory ends its worker.

    Attributes:
        tokenizer: for what takes no time.
    """

    def __init__(self, max_context: int, tokenizer: Tokenizer | None, pool: Pool | None):
        """Without a tokenizer there is no pool, either."""
        self._tokenizer = tokenizer
        self._pool = pool
        self._max_chars = _CHARS_A_TOKEN * max_context
        self._num_inline = 0  # characters since others had their turn
        self._known: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._starting: asyncio.Task[None] | None = None

    @classmethod
    async def load(
        cls, facts: TextFacts | None, max_context: int, num_workers: int
    ) -> "TextProcessor":
        """Makes the tokenizer in a thread; `facts` are None where the engine serves token ids
        alone.
        """
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
        """It.

        Raises:
            ApiError: there is none.
        """
        if self._tokenizer is None:
            raise ApiError(400, "this model has no tokenizer: give token ids", code="unsupported")
        return self._tokenizer

    async def encode(self, text: str, param: str, add_special: bool = True) -> list[int]:
        """Token ids of a text that a field of this name holds.

        Raises:
            ApiError: 400, it cannot be encoded, or takes too long.
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
            raise _invalid(param, str(error)) from None

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        continues: bool = False,
        documents: Sequence[dict[str, str]] | None = None,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            messages: of it.
            add_generation_prompt: it ends with the start of the assistant's turn.
            tools: that the model may call.
            variables: further ones of the chat template.
            continues: it ends where the last message does, which goes on.
            documents: that the chat template shows to the model.

        Raises:
            ApiError: 400, the messages hold what is not supported, the template refuses them, or
                they take too long.
        """
        given = [_plain(message, index) for index, message in enumerate(messages)]
        told_documents = list(documents or ()) or None
        whole = [given, tools, dict(variables), told_documents]
        self._check_length(_num_chars(whole), "messages")
        told = None if tools is None else list(tools)
        job = EncodeChat(
            given, add_generation_prompt, told, dict(variables), continues, told_documents
        )
        return await self._ask(job, "messages")

    async def read_structure(
        self,
        request: Sampling,
        accepts: bool,
        offer: OfferedTools | None = None,
        format: Format = formats.JSON,
    ) -> str | None:
        """The grammar that a request's answer has to follow, if it asks for one, which was compiled
        before, or is by a worker: what takes long delays other prompts, and no step of the engine.

        Raises:
            ApiError: 400, it cannot be compiled, takes too long, or grammars are not accepted.
        """
        asked = request.structured_outputs
        if asked is not None and asked.grammar is not None and grammar.is_gbnf(asked.grammar):
            asked.grammar = await self._ask(Convert(asked.grammar), "structured_outputs")
        found, param = structure.read(request)
        if offer is not None and offer.is_required:
            if found is not None:
                why = f"and {param} exclude each other, where a tool has to be called"
                raise ApiError(400, f"tool_choice {why}", "tool_choice", "invalid_value")
            param = "tool_choice"
        elif found is None:
            return None
        if not accepts:
            raise ApiError(400, f"{param} is not supported by this server", param, "unsupported")
        if offer is not None and param != "bad_words":  # which calls may hold no more than texts
            return await self._compile_calls(offer, format, found, param)
        assert found is not None
        return await self._compile(lambda: found, param)

    async def _compile_calls(
        self, offer: OfferedTools, format: Format, other: str | None, param: str
    ) -> str:
        """A grammar of calls, or also of what another one describes, which `param` asks for. Only
        where it cannot be compiled are its parts, one by one, for a while: to tell which it is.
        """
        how = format, offer.schemas, offer.is_parallel

        def write() -> str:
            return constrain.of_calls(*how) if other is None else constrain.of_calls_or(*how, other)

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
        """What is written, which can be compiled."""
        try:
            text = write()
        except InputError as error:
            raise _invalid(param, str(error)) from None
        except RecursionError:
            raise _invalid(param, "it is nested too deeply") from None
        if text not in self._known:
            await self._ask(Compile(text), param)
        self._known[text] = None
        self._known.move_to_end(text)
        while len(self._known) > _KNOWN_GRAMMARS:
            self._known.popitem(last=False)
        return text

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones included: they are somebody's prompt.

        Raises:
            ApiError: 400, it takes too long.
        """
        if len(ids) <= _INLINE_IDS:
            return self.tokenizer.decode(ids, skip_special=False)
        found: str = await self._ask(Decode(list(ids)), "tokens")
        return found

    def close(self) -> None:
        """Ends the workers."""
        if self._pool is not None:
            self._pool.close()

    async def _ask(self, job: Job, param: str) -> Any:
        assert self.tokenizer and self._pool is not None
        try:
            reply = await self._pool.ask(job)
        except UnicodeEncodeError as error:
            why = f"the text is not valid Unicode: {error.reason}"
            raise _invalid(param, why) from None
        except RecursionError:
            raise _invalid(param, "it is nested too deeply") from None
        except WorkerLost:
            raise unavailable("the text could not be processed: send it again") from None
        if isinstance(reply, JobFailed):
            raise _invalid(param, reply.reason)
        return reply.value

    def _check_length(self, num_chars: int, param: str) -> None:
        if num_chars > self._max_chars:
            raise ApiError(
                400,
                f"{param}: {num_chars} characters are more than {_CHARS_A_TOKEN} for each token "
                f"of the context, {self._max_chars}",
                param,
                "context_length_exceeded",
            )


def _invalid(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param}: {why}", param, "invalid_value")


def _num_chars(given: Any) -> int:
    """Of all texts in it, names of fields among them: a template may write each."""
    num, rest = 0, [given]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            num += len(one)
        elif isinstance(one, dict):
            rest += [*one, *one.values()]
        elif isinstance(one, list):
            rest += one
    return num


def _plain(message: ChatMessage, index: int) -> dict[str, Any]:
    """A message as templates read it."""
    content = message.content
    if isinstance(content, list):
        for part in content:
            if part.type != "text" or part.text is None:
                where = f"messages[{index}].content"
                raise ApiError(400, f"{where}: parts of type text alone", where, "unsupported")
        content = "\n".join(part.text or "" for part in content)
    if content is None and not message.tool_calls:
        where = f"messages[{index}].content"
        raise ApiError(400, f"{where} is required", where, "missing_required_parameter")
    found: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": content or "",
    }
    for name in ("name", "reasoning_content", "reasoning", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": msgspec.to_builtins(call.function)}
            for call in message.tool_calls
        ]
    return found
