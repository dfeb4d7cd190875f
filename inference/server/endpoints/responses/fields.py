"""The body of POST /v1/responses: every field, its type and its range."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from inference.server.protocol.fields import (
    MAX_MESSAGES,
    MAX_TOP_LOGPROBS,
    Effort,
    InputIds,
    NewTokens,
    ResponsesFields,
    Short,
)
from inference.server.protocol.tool_fields import MAX_TOOLS, FunctionName, Variables

_MAX_LABELS = 16
Mode = Literal["none", "auto", "required"]
LOGPROBS = "message.output_text.logprobs"


class InputPart(Struct):
    """A part of a message or of a function's output; only text is supported."""

    type: Annotated[str, Meta(max_length=64)]
    text: str | None = None
    refusal: str | None = None


Content = str | Annotated[list[InputPart], Meta(max_length=MAX_MESSAGES)]


class InputItem(Struct):
    """A message (`role`, `content`), a call of a function (`call_id`, `name`, `arguments`), its
    output (`call_id`, `output`), or the thought before such (`content`). Items of earlier answers
    can be sent unchanged.
    """

    type: Literal["message", "function_call", "function_call_output", "reasoning"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    call_id: Annotated[str, Meta(min_length=1, max_length=512)] | None = None
    name: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    arguments: str | None = None
    output: Content | None = None
    id: Short | None = None
    status: Short | None = None
    summary: Annotated[list[InputPart], Meta(max_length=MAX_MESSAGES)] | None = None


class TextFormat(Struct, omit_defaults=True):
    """The form of an answer's text; `schema`: of json_schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: Short | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, omit_defaults=True):
    """Configuration of the text; `verbosity` has no effect."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class FunctionTool(Struct, omit_defaults=True):
    """A function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AllowedFunction(Struct):
    """A function by its name."""

    type: Literal["function"]
    name: FunctionName


class ChosenTool(Struct, omit_defaults=True):
    """The function that has to be called, or (`allowed_tools`) those that the model may call."""

    type: Literal["function", "allowed_tools"]
    name: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Annotated[list[AllowedFunction], Meta(min_length=1, max_length=MAX_TOOLS)] | None = None


class ReasoningConfig(Struct):
    """The reasoning effort, for templates that read it. The other fields have no effect: thoughts
    are not summarized.
    """

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(ResponsesFields, kw_only=True):
    """POST /v1/responses. null is the default. Nothing is stored, whatever `store` says: the next
    request sends all items of the conversation as `input`.

    Attributes:
        input: a text of the user, or items.
        instructions: system message before the input.
        include: log-probabilities, by `message.output_text.logprobs`; others have no effect.
        parallel_tool_calls: an answer may call several functions.
        metadata: returned with the answer.
        input_ids: the prompt's token ids, in place of what the template makes of the input.
        return_token_ids: the answer has its token ids, and those of its prompt.
    """

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: NewTokens | None = None
    text: TextConfig | None = None
    tools: Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Mode | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    include: Annotated[list[Short], Meta(max_length=_MAX_LABELS)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    reasoning: ReasoningConfig | None = None
    chat_template_kwargs: Variables | None = None
    input_ids: InputIds | None = None
    return_token_ids: bool | None = None

    metadata: (
        Annotated[dict[Annotated[str, Meta(max_length=64)], Short], Meta(max_length=_MAX_LABELS)]
        | None
    ) = None
    truncation: Literal["auto", "disabled"] | None = None

    background: Any = None
    conversation: Any = None
    previous_response_id: Any = None
    prompt: Any = None


# Fields with the meaning that they have in a chat completion.
SAME = (
    *ResponsesFields.__struct_fields__, "chat_template_kwargs", "parallel_tool_calls",
    "top_logprobs", "input_ids", "return_token_ids",
)  # fmt: skip
