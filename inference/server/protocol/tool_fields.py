"""Fields of tools, and variables of chat templates."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

MAX_TOOLS, MAX_VARIABLES = 64, 16
FunctionName = Annotated[str, Meta(pattern=r"\A[a-zA-Z0-9_-]{1,64}\Z", max_length=64)]
_Variable = Annotated[str, Meta(pattern=r"\A[a-zA-Z][a-zA-Z0-9_]*\Z", max_length=64)]


class Function(Struct):
    """A function that the model may call. `strict` has no effect: forced calls always follow the
    schema, others need not.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """A tool; only functions are supported."""

    type: Literal["function"]
    function: Function


class NamedFunction(Struct):
    """A function by its name."""

    name: FunctionName


class NamedTool(Struct):
    """A tool by its name."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Struct):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MAX_TOOLS)]


class ToolChoice(Struct):
    """The tool that has to be called, or the tools among which the model chooses."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class CalledFunction(Struct):
    """The function of an earlier call; `arguments`: JSON as text, or an object."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: str | dict[str, Any]


class EarlierCall(Struct):
    """A call of an earlier message."""

    function: CalledFunction
    id: Annotated[str, Meta(max_length=512)] | None = None
    type: Literal["function"] | None = None


Tools = Annotated[list[Tool], Meta(min_length=1, max_length=MAX_TOOLS)]
Choice = Literal["none", "auto", "required"] | ToolChoice
Variables = Annotated[
    dict[_Variable, Annotated[str, Meta(max_length=512)] | int | float | bool | None],
    Meta(max_length=MAX_VARIABLES),
]
