"""Checks a request's tools and variables of the chat template."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from inference.server.protocol.errors import invalid
from inference.server.protocol.fields import ChatRequest, TokenizeRequest
from inference.server.protocol.tool_fields import AllowedTools, Tool, ToolChoice
from inference.text import template_worker

_Request = ChatRequest | TokenizeRequest

_EFFORT = "reasoning_effort"
SWITCHES = ("enable_thinking", "thinking")  # variables of templates: whether the model thinks
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_OWN_VARIABLES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
     "chat_template", "tokenize")
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class OfferedTools:
    """Tools that the model may call, or has to.

    Attributes:
        tools: all of them, as chat templates read them.
        schemas: function that may be called -> schema of its arguments.
        places: function -> place of its schema in the request.
        is_required: the answer has to be a call.
        is_parallel: the answer may be several calls.
    """

    tools: list[dict[str, object]]
    schemas: dict[str, dict[str, object]]
    places: dict[str, str]
    is_required: bool
    is_parallel: bool


def read(request: _Request) -> OfferedTools | None:
    """Tools that the model may call, or None; raises an `ApiError` (400) that names the field."""
    choice = request.tool_choice
    if not request.tools:
        if choice is not None and choice != "none":
            raise invalid("tool_choice", "goes with tools")
        return None
    schemas = _schemas(request.tools)
    places = {tool.function.name: _place(n) for n, tool in enumerate(request.tools)}
    if choice == "none":
        return None
    names, is_required, is_parallel = list(schemas), choice == "required", True
    if isinstance(choice, ToolChoice) and choice.type == "function":
        if choice.function is None:
            raise invalid("tool_choice.function", "is required")
        names, is_required, is_parallel = [choice.function.name], True, False
        _check_known("tool_choice.function.name", names[0], schemas)
    elif isinstance(choice, ToolChoice):
        names, is_required = _allowed(choice.allowed_tools, schemas)
    if isinstance(request, ChatRequest) and request.parallel_tool_calls is False:
        is_parallel = False
    return OfferedTools(
        [_plain(tool) for tool in request.tools], {name: schemas[name] for name in names}, places,
        is_required, is_parallel,
    )  # fmt: skip


def check_turn(request: _Request) -> tuple[bool, bool]:
    """Whether the prompt ends with the start of the assistant's turn, and whether the model
    continues the last message.

    Raises:
        ApiError: 400, the request has both, or sets a variable that only the server may set.
    """
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        raise invalid("continue_final_message", "and add_generation_prompt exclude each other")
    check_variables(request.chat_template_kwargs)
    return not continues and request.add_generation_prompt is not False, continues


def check_variables(variables: Iterable[str] | None) -> None:
    """Raises an `ApiError` (400) if a variable of a template is one that only the server sets."""
    for name in variables or ():
        if name in _OWN_VARIABLES:
            raise invalid("chat_template_kwargs", f"may not hold {name}")


def variables(request: ChatRequest, template: str) -> dict[str, Any]:
    """Variables of the chat template in addition to the conversation. `reasoning_effort` and
    `documents` need a template that reads them; the effort `medium` is the default of models.

    Raises:
        ApiError: 400, the template does not read a field.
    """
    read = template_worker.variables(template)
    if request.documents and "documents" not in read:
        raise invalid("documents", "are not read by this model's chat template", "unsupported")
    variables = dict(request.chat_template_kwargs or {})
    effort = request.reasoning_effort
    if effort is None:
        return variables
    switches = {name: effort != "none" for name in SWITCHES if name in read}
    if _EFFORT in read:
        return switches | {_EFFORT: effort} | variables
    if effort == "none" and switches:
        return switches | variables
    if effort != "medium":
        why = f"of {effort} is not read by this model's chat template"
        raise invalid(_EFFORT, why, "unsupported")
    return variables


def _schemas(tools: list[Tool]) -> dict[str, dict[str, object]]:
    schemas: dict[str, dict[str, object]] = {}
    for n, tool in enumerate(tools):
        function = tool.function
        if function.name in schemas:
            raise invalid(f"tools[{n}].function.name", f"is that of another tool: {function.name}")
        schema = _NO_PARAMETERS if function.parameters is None else function.parameters
        if schema.get("type", "object") != "object":
            raise invalid(f"{_place(n)}.type", 'is "object"')
        schemas[function.name] = {**schema, "type": "object"}
    return schemas


def _allowed(
    allowed: AllowedTools | None, schemas: dict[str, dict[str, object]]
) -> tuple[list[str], bool]:
    if allowed is None:
        raise invalid("tool_choice.allowed_tools", "is required")
    names = list(dict.fromkeys(tool.function.name for tool in allowed.tools))
    for n, name in enumerate(names):
        _check_known(f"tool_choice.allowed_tools.tools[{n}].function.name", name, schemas)
    return names, allowed.mode == "required"


def _check_known(where: str, name: str, schemas: dict[str, dict[str, object]]) -> None:
    if name not in schemas:
        raise invalid(where, f"is that of a tool, and {name} is none of these")


def _plain(tool: Tool) -> dict[str, object]:
    """A tool in the form that chat templates read."""
    function: dict[str, object] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    function["parameters"] = tool.function.parameters
    if tool.function.parameters is None:
        function["parameters"] = {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _place(n: int) -> str:
    return f"tools[{n}].function.parameters"
