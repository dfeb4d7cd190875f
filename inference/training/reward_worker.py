"""Calls a function (line, answer) -> number in a process that can be ended: `rewards` starts it.

Requests and replies are JSON, one a line: first {"path": [...], "function": "module:function",
"limit_s": seconds of a call}, to which the reply is {} or {"error": ...}; then {"line": {...},
"answer": text}, with {"reward": ...} or {"error": ...}. It imports nothing else but the
function's module.
"""

import importlib
import inspect
import json
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

ARGUMENTS = "(line, answer)"
_REASON_CHARS, _VALUE_CHARS = 300, 80


def main() -> None:
    """Replies to requests until the parent closes the pipe; then ends its process group."""
    # What a function prints or reads would be taken for replies and requests: it gets nothing.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nothing, standard)

    def reply(fields: dict[str, object]) -> None:
        replies.write(json.dumps(fields).encode() + b"\n")
        replies.flush()

    start = json.loads(requests.readline())
    sys.path[:] = start["path"]
    try:
        function = _function(start["function"])
    except BaseException as error:  # a module may exit, too
        reply({"error": _reason(error)})
        return
    reply({})
    for request in requests:
        fields = json.loads(request)
        # The parent ends what takes longer; where there is none any more, the kernel does.
        signal.setitimer(signal.ITIMER_REAL, 2 * start["limit_s"])
        try:
            reply({"reward": _finite(function(fields["line"], fields["answer"]))})
        except BaseException as error:
            reply({"error": _reason(error)})
        signal.setitimer(signal.ITIMER_REAL, 0)
    os.killpg(0, signal.SIGKILL)  # with what the function has started


class _Unusable(Exception):
    """There is no such function, or what it returns is no reward."""


def _function(name: str) -> Callable[..., object]:
    """Raises _Unusable if a module has no such function, or what importing the module raises."""
    module_name, _, function_name = name.partition(":")
    module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        names = (key for key, value in vars(module).items() if inspect.isfunction(value))
        valid = ", ".join(name for name in names if not name.startswith("_")) or "none"
        raise _Unusable(f"the module has no such function; valid: {valid}")
    try:
        inspect.signature(function).bind({}, "")
    except TypeError:
        raise _Unusable(f"the function does not take the two arguments {ARGUMENTS}") from None
    except ValueError:  # a function in C, which does not say
        pass
    return function


def _finite(value: Any) -> float:
    """What a function returns, as a number; raises _Unusable if it is none, or not finite."""
    try:
        if isinstance(value, str | bytes | bytearray):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        text = _line(repr, value)[:_VALUE_CHARS]
        raise _Unusable(f"it returns {text}, which is no number") from None
    if not math.isfinite(number):
        raise _Unusable(f"it returns {number}, which is not finite")
    return number


def _reason(error: BaseException) -> str:
    text = _line(str, error)[:_REASON_CHARS]
    if isinstance(error, _Unusable):
        return text
    return f"it raises {type(error).__name__}{': ' * bool(text)}{text}"


def _line(text_of: Callable[[Any], str], value: object) -> str:
    try:
        return " ".join(text_of(value).split())
    except Exception:  # its own text fails
        return f"a {type(value).__name__}"


if __name__ == "__main__":
    main()
