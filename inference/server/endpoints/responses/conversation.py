"""Translates a request of /v1/responses into a chat completion."""

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
from inference.server.protocol import tool_results
from inference.server.protocol.errors import ApiError, invalid, missing
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

_UNSUPPORTED = {
    "previous_response_id": "nothing is stored here; send all items as input",
    "conversation": "nothing is stored here; send all items as input",
    "background": "nothing is stored here; leave it out, or stream",
    "prompt": "this server keeps no templates",
}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")  # of parts
# Fields of a chat completion -> their names in a response, the longer names first.
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
    """Returns the request as a chat; raises an `ApiError` (400) that names the field."""
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
    """Renames the field of a chat completion's error to that of the response's request."""
    return error.renamed_by(_NAMES)


def _check(request: ResponsesRequest) -> None:
    for name, why in _UNSUPPORTED.items():
        if getattr(request, name):
            raise invalid(name, f"is not supported: {why}", "unsupported")
    if request.truncation == "auto":
        why = "is disabled here: what does not fit into the context is an error"
        raise invalid("truncation", why, "unsupported")
    if not request.tools and request.tool_choice not in (None, "none", "auto"):
        raise invalid("tool_choice", "goes with tools")


def _messages(request: ResponsesRequest) -> list[ChatMessage]:
    messages: list[ChatMessage] = []
    call_ids: set[str | None] = set()
    thought: str | None = None
    if request.instructions is not None:
        messages.append(ChatMessage("system", request.instructions))
    if isinstance(request.input, str):
        return [*messages, ChatMessage("user", request.input)]
    for index, item in enumerate(request.input):
        where = f"input[{index}]"
        if item.type == "reasoning":
            thought = "\n\n".join(filter(None, (thought, _thought(item, where))))
        elif item.type == "function_call":
            call = _call(item, where)
            is_same_turn = thought is None and messages and messages[-1].role == "assistant"
            message = messages.pop() if is_same_turn else ChatMessage("assistant")
            message.tool_calls = [*(message.tool_calls or ()), call]
            messages.append(message)
            call_ids.add(call.id)
        elif item.type == "function_call_output":
            output = _content(_required(item, "output", where), f"{where}.output")
            id = _required(item, "call_id", where)
            tool_results.check_answers(id, call_ids, f"{where}.call_id")
            messages.append(ChatMessage("tool", output, tool_call_id=id))
        else:
            content = _content(_required(item, "content", where), f"{where}.content")
            messages.append(ChatMessage(_required(item, "role", where), content))
        if thought is not None and item.type != "reasoning":
            if messages[-1].role == "assistant":
                messages[-1].reasoning_content = thought
            thought = None
    return messages


def _thought(item: InputItem, where: str) -> str:
    """Returns the text of an earlier thought, or of its summary."""
    content = _content(item.content or item.summary or [], f"{where}.content")
    return content if isinstance(content, str) else "\n".join(part.text or "" for part in content)


def _call(item: InputItem, where: str) -> EarlierCall:
    called = CalledFunction(_required(item, "name", where), _required(item, "arguments", where))
    return EarlierCall(called, _required(item, "call_id", where), "function")


def _required(item: InputItem, name: str, where: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise missing(f"{where}.{name}")
    return value


def _content(content: Content, where: str) -> str | list[ContentPart]:
    if isinstance(content, str):
        return content
    parts = []
    for index, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type not in (*_TEXTS, "refusal") or text is None:
            place = f"{where}[{index}].type"
            raise invalid(place, f"is one of {', '.join(_TEXTS)}, with text", "unsupported")
        parts.append(ContentPart("text", text))
    return parts


def _format(request: ResponsesRequest) -> ResponseFormat | None:
    format = request.text.format if request.text else None
    if format is None or format.type != "json_schema":
        return None if format is None else ResponseFormat(format.type)
    if format.schema is None:
        raise missing("text.format.schema")
    return ResponseFormat("json_schema", JsonSchema(format.schema, format.name, format.description))


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
            raise missing("tool_choice.name")
        return ToolChoice("function", NamedFunction(choice.name))
    if choice.tools is None or choice.mode is None:
        raise missing("tool_choice.tools" if choice.tools is None else "tool_choice.mode")
    tools = [NamedTool("function", NamedFunction(tool.name)) for tool in choice.tools]
    return ToolChoice("allowed_tools", None, AllowedTools(choice.mode, tools))
