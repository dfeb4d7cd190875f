"""Text to token ids and back, beside the event loop."""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from configs.errors import InputError
from inference.server.frames import TextFacts
from inference.server.protocol import structure
from inference.server.protocol.errors import ApiError
from inference.server.protocol.fields import ChatMessage, Sampling
from inference.server.protocol.tools import Offer
from inference.text import grammar
from inference.text.grammar import Grammars
from inference.text.tokenizer import Tokenizer
from inference.text.tool_calls import constrain, formats, prompting
from inference.text.tool_calls.formats import Format

_CHARS_A_TOKEN = 16  # a prompt with more characters for each token of the context is refused unread

T = TypeVar("T")


class Texts:
    """The tokenizer of the engine, and one thread that encodes: a long prompt delays other prompts,
    and no token of a stream.

    Attributes:
        tokenizer: for what takes no time.
    """

    def __init__(self, max_context: int):
        """Without a tokenizer yet."""
        self._tokenizer: Tokenizer | None = None
        self._max_chars = _CHARS_A_TOKEN * max_context
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="texts")

    @classmethod
    async def load(cls, facts: TextFacts | None, max_context: int) -> "Texts":
        """Makes the tokenizer in the thread; `facts` are None where the engine serves token ids
        alone.
        """
        found = cls(max_context)
        if facts is not None:
            loop = asyncio.get_running_loop()
            found._tokenizer = await loop.run_in_executor(found._thread, facts.tokenizer)
        return found

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
            ApiError: 400, it cannot be encoded.
        """
        self._check_length(len(text), param)
        tokenizer = self.tokenizer
        return await self._run(param, lambda: tokenizer.encode(text, add_special))

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
        continues: bool = False,
    ) -> list[int]:
        """Token ids of a conversation.

        Args:
            messages: of it.
            add_generation_prompt: it ends with the start of the assistant's turn.
            tools: that the model may call.
            variables: further ones of the chat template.
            continues: it ends where the last message does, which goes on.

        Raises:
            ApiError: 400, the messages hold what is not supported, or the template refuses them.
        """
        given = [_plain(message, index) for index, message in enumerate(messages)]
        self._check_length(_num_chars([given, tools, dict(variables)]), "messages")
        tokenizer = self.tokenizer

        def encode() -> list[int]:
            asked, told = prompting.prepare(given, tools, tokenizer.template_for(tools))
            as_texts = prompting.with_texts(asked)
            how = (add_generation_prompt, told, None, variables, continues)
            try:
                return tokenizer.apply_chat_template(asked, *how)
            except InputError:
                if as_texts == asked:
                    raise
                with contextlib.suppress(InputError):
                    return tokenizer.apply_chat_template(as_texts, *how)
                raise

        return await self._run("messages", encode)

    async def read_structure(
        self,
        request: Sampling,
        accepts: bool,
        offer: Offer | None = None,
        format: Format = formats.JSON,
    ) -> str | None:
        """The grammar that a request's answer has to follow, if it asks for one, which is compiled
        here first: what takes long delays other prompts, and no step of the engine.

        Raises:
            ApiError: 400, it cannot be compiled, or grammars are not accepted.
        """
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
            for name, schema in offer.schemas.items():
                await self._compile(functools.partial(grammar.of_json_schema, schema),
                                    offer.places[name])  # fmt: skip
            how = format, offer.schemas, offer.is_parallel
            other = found
            if other is None:
                return await self._compile(lambda: constrain.of_calls(*how), "tools")
            return await self._compile(lambda: constrain.of_calls_or(*how, other), "tools")
        assert found is not None
        return await self._compile(lambda: found, param)

    async def _compile(self, write: Callable[[], str], param: str) -> str:
        def compile() -> str:
            text = write()
            self._grammars.start(text)
            return text

        return await self._run(param, compile)

    @functools.cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, [self.tokenizer.eos_id or 0])

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids."""
        tokenizer = self.tokenizer
        return await self._run("tokens", lambda: tokenizer.decode(ids))

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, param: str, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except InputError as error:
            raise ApiError(400, f"{param}: {error}", param, "invalid_value") from None
        except RecursionError:
            raise ApiError(400, f"{param} are nested too deeply", param, "invalid_value") from None

    def _check_length(self, num_chars: int, param: str) -> None:
        if num_chars > self._max_chars:
            raise ApiError(
                400,
                f"{param}: {num_chars} characters are more than {_CHARS_A_TOKEN} for each token "
                f"of the context, {self._max_chars}",
                param,
                "context_length_exceeded",
            )


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
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            found[name] = value
    if message.tool_calls:
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": msgspec.to_builtins(call.function)}
            for call in message.tool_calls
        ]
    return found
