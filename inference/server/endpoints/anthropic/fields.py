"""The bodies of POST /v1/messages and /v1/messages/count_tokens: every field and its range."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import msgspec
from msgspec import Meta, Struct

from inference.server.protocol.fields import (
    MAX_MESSAGES,
    Effort,
    InputIds,
    MessagesFields,
    NewTokens,
    Short,
    Tokens,
)
from inference.server.protocol.tool_fields import MAX_TOOLS, FunctionName, Variables

_MAX_EDITS, _MAX_SYSTEM = 16, 64
Role = Literal["user", "assistant", "system"]
_Kind = Annotated[str, Meta(max_length=64)]
_CallId = Annotated[str, Meta(min_length=1, max_length=512)]


class CacheControl(Struct):
    """The end of a prefix to cache; no effect, because all prefixes are cached."""

    type: Literal["ephemeral"]
    ttl: Short | None = None


class ResultBlock(Struct):
    """A part of a tool's result; only text is supported."""

    type: _Kind
    text: str | None = None
    cache_control: CacheControl | None = None


class Block(Struct):
    """A part of a message: `text`; `tool_use` (`id`, `name`, `input`) and `tool_result`
    (`tool_use_id`, `content`, `is_error`); `thinking` and `redacted_thinking` of earlier answers.
    """

    type: _Kind
    text: str | None = None
    id: _CallId | None = None
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    input: dict[str, Any] | None = None
    tool_use_id: _CallId | None = None
    content: str | Annotated[list[ResultBlock], Meta(max_length=MAX_MESSAGES)] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    cache_control: CacheControl | None = None


class Turn(Struct):
    """A message of the conversation. Neighbors of one role are one turn."""

    role: Role
    content: str | Annotated[list[Block], Meta(max_length=MAX_MESSAGES)]


class ToolDefinition(Struct, omit_defaults=True):
    """A tool that the model may call; `strict` has no effect: forced calls always follow the
    schema. A `type` other than custom is a tool of Anthropic's, which is rejected.
    """

    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: _Kind | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


class ToolMode(Struct):
    """Whether the answer may, must or must not call a tool, or (`tool`) which one."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    """Whether the model thinks, for templates that read it; `adaptive` leaves it to the model.
    `budget_tokens`: of a thought at most, with `enabled`; `display` has no effect.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Tokens | None = None
    display: Short | None = None


class OutputFormat(Struct):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    """The form of the answer, and the reasoning effort, for templates that read it."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class Edit(Struct):
    """A change of the conversation. `clear_thinking_...` has no effect, because templates drop
    thoughts of earlier turns themselves; others are rejected.
    """

    type: _Kind


class ContextManagement(Struct):
    """Changes of the conversation before it is answered."""

    edits: Annotated[list[Edit], Meta(max_length=_MAX_EDITS)] | None = None


class Metadata(Struct):
    """The user; no effect."""

    user_id: Short | None = None


class CountTokensRequest(Struct, kw_only=True):
    """POST /v1/messages/count_tokens: a conversation. null is the default.

    Attributes:
        system: system message before the conversation.
        thinking, output_config: variables of the template, and the form of the answer.
        context_management: changes of the conversation; those of thoughts have no effect.
        cache_control: no effect: all prefixes are cached.
    """

    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_MESSAGES)]
    model: Short | None = None
    system: str | Annotated[list[Block], Meta(max_length=_MAX_SYSTEM)] | None = None
    tools: Annotated[list[ToolDefinition], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolMode | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: Variables | None = None


if TYPE_CHECKING:
    _Conversation = MessagesFields
else:  # structs have one base
    _kinds = get_type_hints(CountTokensRequest, include_extras=True)
    _Conversation = msgspec.defstruct(
        "_Conversation",
        [("messages", _kinds.pop("messages")), *((name, _kinds[name], None) for name in _kinds)],
        bases=(MessagesFields,),
        kw_only=True,
    )


class MessagesRequest(_Conversation, kw_only=True):
    """POST /v1/messages. null is the default.

    Attributes:
        max_tokens: tokens to generate at most.
        system: system message before the conversation.
        stop_sequences: texts that end the answer, which excludes them.
        thinking, output_config: variables of the template, and the form of the answer.
        context_management: changes of the conversation; those of thoughts have no effect.
        cache_control: no effect: all prefixes are cached.
        input_ids: the prompt's token ids, in place of what the template makes of the messages.
        return_token_ids: the answer has its token ids, and those of its prompt.
    """

    max_tokens: NewTokens
    stop_sequences: (
        Annotated[list[Annotated[str, Meta(min_length=1, max_length=256)]], Meta(max_length=64)]
        | None
    ) = None
    metadata: Metadata | None = None
    input_ids: InputIds | None = None
    return_token_ids: bool | None = None


Request = MessagesRequest | CountTokensRequest
