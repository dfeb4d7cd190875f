"""Translates a request of /v1/messages into a chat completion."""

from typing import Any

from configs.errors import shown
from inference.server.endpoints.anthropic import turns
from inference.server.endpoints.anthropic.fields import (
    CountTokensRequest,
    MessagesRequest,
    Request,
    ToolDefinition,
    ToolMode,
)
from inference.server.protocol.errors import ApiError, invalid, missing
from inference.server.protocol.fields import (
    ChatRequest,
    JsonSchema,
    MessagesFields,
    ResponseFormat,
)
from inference.server.protocol.tool_fields import Choice, Function, NamedFunction, Tool, ToolChoice
from inference.server.protocol.tools import SWITCHES

_SAME = MessagesFields.__struct_fields__  # fields with the meaning that they have in a chat
_MODES: dict[str, Choice] = {"auto": "auto", "any": "required", "none": "none"}
_CLEARS_THOUGHTS = "clear_thinking_"  # beginning of a type, before a date
# Fields of a chat completion -> their names here, the longer names first.
_NAMES = (
    (r"messages\b.*", "messages"),
    (r"stop$", "stop_sequences"),
    (r"reasoning_effort", "output_config.effort"),
    (r"thinking_token_budget", "thinking.budget_tokens"),
    (r"response_format\.json_schema\.schema", "output_config.format.schema"),
    (r"response_format(\.json_schema)?", "output_config.format"),
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function\.", r"tools[\1]."),
    (r"tool_choice\.function\.name", "tool_choice.name"),
)


def read(request: Request) -> ChatRequest:
    """Returns the request as a chat; raises an `ApiError` (400) that names the field."""
    _check_edits(request)
    more: dict[str, Any] = {} if isinstance(request, CountTokensRequest) else _sampling(request)
    output, choice = request.output_config, request.tool_choice
    schema = None if output is None or output.format is None else output.format.schema
    is_serial = choice is not None and choice.disable_parallel_tool_use
    last = request.messages[-1]
    return ChatRequest(
        **more,
        messages=turns.read(request.system, request.messages),
        tools=[_tool(tool, n) for n, tool in enumerate(request.tools or ())] or None,
        tool_choice=None if choice is None else _choice(choice),
        parallel_tool_calls=False if is_serial else None,
        continue_final_message=last.role == "assistant",
        reasoning_effort=None if output is None else output.effort,
        response_format=(
            None if schema is None else ResponseFormat("json_schema", JsonSchema(schema))
        ),
        chat_template_kwargs=_switches(request) | (request.chat_template_kwargs or {}),
    )


def renamed(error: ApiError) -> ApiError:
    """Renames the field of a chat completion's error to that of the request."""
    return error.renamed_by(_NAMES)


def _sampling(request: MessagesRequest) -> dict[str, Any]:
    same = {name: getattr(request, name) for name in _SAME}
    thinking = request.thinking
    budget = thinking.budget_tokens if thinking and thinking.type == "enabled" else None
    return same | {
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "thinking_token_budget": budget,
        "input_ids": request.input_ids,
        "return_token_ids": request.return_token_ids,
    }


def _check_edits(request: Request) -> None:
    edits = request.context_management.edits if request.context_management else None
    for n, edit in enumerate(edits or ()):
        if not edit.type.startswith(_CLEARS_THOUGHTS):
            why = f"{shown(edit.type)} is not supported: send the conversation as it is to be read"
            raise invalid(f"context_management.edits[{n}].type", why, "unsupported")


def _switches(request: Request) -> dict[str, str | int | float | bool | None]:
    """Variables of the template that turn thoughts on or off."""
    thinking = request.thinking
    if thinking is None or thinking.type == "adaptive":
        return {}
    return {name: thinking.type == "enabled" for name in SWITCHES}


def _tool(tool: ToolDefinition, n: int) -> Tool:
    if tool.type not in (None, "custom"):
        why = f"{shown(tool.type)} is not supported: send name, description and input_schema"
        raise invalid(f"tools[{n}].type", why, "unsupported")
    if tool.input_schema is None:
        raise missing(f"tools[{n}].input_schema")
    return Tool("function", Function(tool.name, tool.description, tool.input_schema, tool.strict))


def _choice(choice: ToolMode) -> Choice:
    if choice.type != "tool":
        return _MODES[choice.type]
    if choice.name is None:
        raise missing("tool_choice.name")
    return ToolChoice("function", NamedFunction(choice.name))
