"""A request for a response as a request for the next message of a conversation."""

import re
from typing import Any

from inference.server.endpoints.responses.fields import (
    LOGPROBS,
    SAME,
    ChosenTool,
    Content,
    InputItem,
    Mode,
    ResponsesRequest,
)
from inference.server.protocol.errors import ApiError, invalid
from inference.server.protocol.fields import (
    ChatMessage,
    ChatRequest,
    ContentPart,
    JsonSchema,
    ResponseFormat,
)
from inference.server.protocol.tool_fields import (
    AllowedTools,
    CalledFunction,
    EarlierCall,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    ToolChoice,
)

_TEXTS = ("input_text", "output_text", "text")  # types of parts
# What fields of a conversation are called here, the longer names first.
_NAMES = (
    (r"messages\b.*", "input"),
    (r"reasoning_effort", "reasoning.effort"),
    (r"max_(completion_)?tokens", "max_output_tokens"),
    (r"response_format\.json_schema\.schema", "text.format.schema"),
    (r"response_format(\.json_schema)?", "text.format"),
    (r"tools\[(\d+)\]\.function\.", r"tools[\1]."),
    (r"tool_choice\.function\.name", "tool_choice.name"),
    (r"tool_choice\.function", "tool_choice.name"),
    (r"tool_choice\.allowed_tools\.tools\[(\d+)\]\.function\.name", r"tool_choice.tools[\1].name"),
)


def read(request: ResponsesRequest) -> ChatRequest:
    """The same as a chat completion.

    Raises:
        ApiError: 400, which names the field.
    """
    _check(request)
    asks_for_logprobs = LOGPROBS in (request.include or ()) or bool(request.top_logprobs)
    same = {name: getattr(request, name) for name in SAME}
    return ChatRequest(
        **same | {"top_logprobs": request.top_logprobs if asks_for_logprobs else None},
        messages=_messages(request),
        max_completion_tokens=request.max_output_tokens,
        logprobs=asks_for_logprobs,
        response_format=_format(request),
        tools=_tools(request),
        tool_choice=_choice(request.tool_choice) if request.tools else None,
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
    )


def renamed(error: ApiError) -> ApiError:
    """What is wrong with a conversation, in the words of its request."""
    param = error.param
    if param is None:
        return error
    found = next(
        (re.sub(old, new, param, count=1) for old, new in _NAMES if re.match(old, param)), param
    )
    message = error.message
    if message.startswith(param):
        message = found + message[len(param) :]
    return ApiError(error.status, message, found, error.code, error.may_retry)


def _check(request: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation"):
        if getattr(request, name):
            why = "is not supported: nothing is stored here; send all items as input"
            raise invalid(name, why, "unsupported")
    if request.background:
        why = "is not supported: nothing is stored here; leave it out, or stream"
        raise invalid("background", why, "unsupported")
    if request.prompt:
        raise invalid("prompt", "is not supported: this server keeps no templates", "unsupported")
    if request.truncation == "auto":
        why = "is disabled here: what does not fit into the context is an error"
        raise invalid("truncation", why, "unsupported")
    if not request.tools and request.tool_choice not in (None, "none", "auto"):
        raise invalid("tool_choice", "goes with tools")


def _messages(request: ResponsesRequest) -> list[ChatMessage]:
    found = []
    if request.instructions is not None:
        found.append(ChatMessage("system", request.instructions))
    if isinstance(request.input, str):
        return [*found, ChatMessage("user", request.input)]
    for index, item in enumerate(request.input):
        where = f"input[{index}]"
        if item.type == "function_call":
            call = _call(item, where)
            is_same_turn = found and found[-1].role == "assistant"
            message = found.pop() if is_same_turn else ChatMessage("assistant")
            message.tool_calls = [*(message.tool_calls or ()), call]
            found.append(message)
        elif item.type == "function_call_output":
            output = _content(_given(item, "output", where), f"{where}.output")
            id = _given(item, "call_id", where)
            found.append(ChatMessage("tool", output, tool_call_id=id))
        else:
            content = _content(_given(item, "content", where), f"{where}.content")
            found.append(ChatMessage(_given(item, "role", where), content))
    return found


def _call(item: InputItem, where: str) -> EarlierCall:
    called = CalledFunction(_given(item, "name", where), _given(item, "arguments", where))
    return EarlierCall(called, _given(item, "call_id", where), "function")


def _given(item: InputItem, name: str, where: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise ApiError(
            400, f"{where}.{name} is required", f"{where}.{name}", "missing_required_parameter"
        )
    return value


def _content(content: Content, where: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    found = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*_TEXTS, "refusal") or text is None:
            place = f"{where}[{index}].type"
            raise invalid(place, f"is one of {', '.join(_TEXTS)}, with text", "unsupported")
        found.append(ContentPart("text", text))
    return found


def _format(request: ResponsesRequest) -> ResponseFormat | None:
    asked = request.text.format if request.text else None
    if asked is None or asked.type != "json_schema":
        return None if asked is None else ResponseFormat(asked.type)
    if asked.schema is None:
        raise invalid("text.format.schema", "is required", "missing_required_parameter")
    return ResponseFormat("json_schema", JsonSchema(asked.schema, asked.name, asked.description))


def _tools(request: ResponsesRequest) -> list[Tool] | None:
    if not request.tools:  # as OpenAI has it, none may be an empty list
        return None
    return [
        Tool("function", Function(tool.name, tool.description, tool.parameters, tool.strict))
        for tool in request.tools
    ]


def _choice(choice: Mode | ChosenTool | None) -> Mode | ToolChoice | None:
    if not isinstance(choice, ChosenTool):
        return choice
    if choice.type == "function":
        if choice.name is None:
            raise invalid("tool_choice.name", "is required", "missing_required_parameter")
        return ToolChoice("function", NamedFunction(choice.name))
    if choice.tools is None or choice.mode is None:
        name = "tool_choice.tools" if choice.tools is None else "tool_choice.mode"
        raise invalid(name, "is required", "missing_required_parameter")
    tools = [NamedTool("function", NamedFunction(tool.name)) for tool in choice.tools]
    return ToolChoice("allowed_tools", None, AllowedTools(choice.mode, tools))
