"""Bodies of /v1/responses: the response, and the events of its stream."""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType, field

from inference.server.endpoints.responses.fields import ChosenTool, FunctionTool, TextConfig
from inference.server.protocol.responses import ChatToken, WeightVersions

Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text of a message; `logprobs`: if the request includes them."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatToken] = []


class OutputMessage(Struct, tag_field="type", tag="message"):
    """A message of the assistant."""

    id: str
    status: Status = "in_progress"
    content: list[OutputText] = []
    role: Literal["assistant"] = "assistant"


class OutputCall(Struct, tag_field="type", tag="function_call"):
    """A call of a function; `arguments`: JSON."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """Text of a thought."""

    text: str = ""


class OutputReasoning(Struct, tag_field="type", tag="reasoning"):
    """The thought before an answer; it is not summarized."""

    id: str
    status: Status = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText] = []


Item = OutputMessage | OutputCall | OutputReasoning


class InputDetails(Struct):
    """Input tokens whose pages were cached."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    """Tokens of the thought."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """Tokens of the conversation and of the answer."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails = field(default_factory=OutputDetails)


class Incomplete(Struct):
    """The reason why an answer was cut off; `abort`: the engine was paused."""

    reason: Literal["max_output_tokens", "abort"]


class Failure(Struct):
    """The error that ended an answer."""

    code: str
    message: str


class Reasoning(Struct):
    """The requested reasoning effort; there are no summaries."""

    effort: str | None = None
    summary: None = None


class ResponseBody(Struct):
    """An answer, with the fields of its request; once it is whole, with its token ids, if the
    request has `return_token_ids`.
    """

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[Item]
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    temperature: float
    text: TextConfig
    tool_choice: str | ChosenTool
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    reasoning: Reasoning
    user: str | None = None
    completed_at: int | None = None
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    usage: ResponseUsage | None = None
    background: bool = False
    previous_response_id: None = None
    service_tier: str = "default"
    store: bool = False
    truncation: str = "disabled"
    object: Literal["response"] = "response"
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    weight_versions: WeightVersions | UnsetType = UNSET


# --- events ---------------------------------------------------------------------------------------


class Event(Struct, tag_field="type", kw_only=True):
    """An event; numbered from 0."""

    sequence_number: int = 0


class ResponseEvent(Event):
    """An event of the whole response."""

    response: ResponseBody


class Created(ResponseEvent, tag="response.created"):
    """The first event."""


class InProgress(ResponseEvent, tag="response.in_progress"):
    """The answer begins."""


class Completed(ResponseEvent, tag="response.completed"):
    """The last event: the whole answer."""


class Cut(ResponseEvent, tag="response.incomplete"):
    """The last event of an answer that was cut off."""


class Failed(ResponseEvent, tag="response.failed"):
    """The last event of an answer that failed, with the error."""


class ItemAdded(Event, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: Item


class ItemDone(Event, tag="response.output_item.done"):
    """The whole item."""

    output_index: int
    item: Item


class ArgumentsDelta(Event, tag="response.function_call_arguments.delta"):
    """New text of a call's arguments."""

    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(Event, tag="response.function_call_arguments.done"):
    """All arguments of a call."""

    item_id: str
    output_index: int
    name: str
    arguments: str


class TextEvent(Event, kw_only=True):
    """An event of the text of a message or a thought, its only content."""

    item_id: str
    output_index: int
    content_index: int = 0


class PartAdded(TextEvent, tag="response.content_part.added"):
    """The text of a message or of a thought begins."""

    part: OutputText | ReasoningText


class TextDelta(TextEvent, tag="response.output_text.delta"):
    """New text of a message."""

    delta: str
    logprobs: list[ChatToken]


class TextDone(TextEvent, tag="response.output_text.done"):
    """The whole text of a message."""

    text: str
    logprobs: list[ChatToken]


class PartDone(TextEvent, tag="response.content_part.done"):
    """The whole text as a part of its message or thought."""

    part: OutputText | ReasoningText


class ReasoningDelta(TextEvent, tag="response.reasoning_text.delta"):
    """New text of a thought."""

    delta: str


class ReasoningDone(TextEvent, tag="response.reasoning_text.done"):
    """The whole text of a thought."""

    text: str


AnyEvent = (
    Created | InProgress | ItemAdded | PartAdded | TextDelta | TextDone | PartDone | ArgumentsDelta
    | ArgumentsDone | ReasoningDelta | ReasoningDone | ItemDone | Completed | Cut | Failed
)  # fmt: skip
