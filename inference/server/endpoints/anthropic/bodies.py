"""Bodies of /v1/messages: the message, and the events of its stream."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from inference.server.protocol.responses import WeightVersions

# `pause_turn`: the engine was paused, and ended its answers.
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn"]


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str = ""


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """The thought before an answer, which is not signed."""

    thinking: str = ""
    signature: str = ""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call of a tool. `input` of a call that the model wrote as invalid JSON, or that was cut
    off, is `{"INVALID_JSON": text}`.
    """

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputDetails(Struct):
    """Tokens of the answer's thought."""

    thinking_tokens: int = 0


class MessageUsage(Struct):
    """Tokens of the answer, and of the conversation: those computed, and those cached before. A
    stream's first event counts all of the conversation as computed.
    """

    input_tokens: int
    output_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    output_tokens_details: OutputDetails = field(default_factory=OutputDetails)


class MessageBody(Struct, tag_field="type", tag="message"):
    """An answer; with its token ids, if the request has `return_token_ids`."""

    id: str
    model: str
    content: list[AnswerBlock]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: WeightVersions | UnsetType = UNSET


class TokenCount(Struct):
    """Tokens of a conversation."""

    input_tokens: int


# --- events ---------------------------------------------------------------------------------------


class Event(Struct, tag_field="type"):
    """An event of a stream."""


class MessageStart(Event, tag="message_start"):
    """The answer begins."""

    message: MessageBody


class BlockStart(Event, tag="content_block_start"):
    """A block begins, empty."""

    index: int
    content_block: AnswerBlock


class NewText(Struct, tag_field="type", tag="text_delta"):
    """New text."""

    text: str


class NewThought(Struct, tag_field="type", tag="thinking_delta"):
    """New text of a thought."""

    thinking: str


class NewInput(Struct, tag_field="type", tag="input_json_delta"):
    """New text of a call's input, which is JSON when it is complete."""

    partial_json: str


class BlockDelta(Event, tag="content_block_delta"):
    """The new part of a block."""

    index: int
    delta: NewText | NewThought | NewInput


class BlockStop(Event, tag="content_block_stop"):
    """A block is complete."""

    index: int


class End(Struct):
    """The end of an answer, and the text that stopped it."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Event, tag="message_delta"):
    """The answer ends; with its token ids, as in `MessageBody`."""

    delta: End
    usage: MessageUsage
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: WeightVersions | UnsetType = UNSET


class MessageStop(Event, tag="message_stop"):
    """The last event."""


class Ping(Event, tag="ping"):
    """Keeps the connection open."""


AnyEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping
