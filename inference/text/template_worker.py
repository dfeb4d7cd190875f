"""Renders chat templates in a process of its own, which can be ended.

Requests and replies are JSON, one a line; a reply is {"text": ...} or {"error": ...}. A template
that takes too long ends the process by a signal, one that takes too much memory by an exception.
`chat_template` runs it; it imports nothing but Jinja, to start in a tenth of a second.
"""

import contextlib
import datetime
import functools
import json
import signal
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, meta, nodes, parser, sandbox, utils

try:
    import resource
except ImportError:  # not a POSIX system: the parent limits time, nothing limits memory
    resource = None  # type: ignore[assignment]

MAX_TEMPLATE_CHARS = 1 << 20
# Limits for each MB of the request, rounded up: malicious templates are small.
SECONDS, DATA_BYTES, OUTPUT_CHARS = 0.8, 48 << 20, 1 << 20


def limit_scale(num_bytes: int) -> int:
    """By what the limits are multiplied for a request of so many bytes."""
    return 1 + num_bytes // (1 << 20)


def main() -> None:
    """Replies to requests until the parent closes the pipe."""
    for line in sys.stdin.buffer:
        scale = limit_scale(len(line))
        _limit(scale)
        try:
            request = json.loads(line)
            text = render(request["template"], request["variables"], scale * OUTPUT_CHARS)
            reply: dict[str, object] = {"text": text}
        except Exception as error:
            # After it ran out of memory, a new process is safer.
            reply = {"error": _reason(error, scale), "is_last": isinstance(error, MemoryError)}
        sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n")
        sys.stdout.buffer.flush()
        _limit(0)  # none while the next request, which may be large, is read


def _limit(scale: int) -> None:
    signal.setitimer(signal.ITIMER_PROF, scale * SECONDS)  # its signal ends the process
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        num_bytes = scale * DATA_BYTES or hard
        soft = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
        with contextlib.suppress(OSError, ValueError):  # a system without this limit
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def render(template: str, variables: Mapping[str, object], max_chars: int) -> str:
    """Renders a template; raises what Jinja, or the template's Python code, raises."""
    pieces, size = [], 0
    for piece in _compile(template).generate(**variables):
        size += len(piece)
        if size > max_chars:
            raise jinja2.TemplateError(f"it writes more than {max_chars} characters")
        pieces.append(piece)
    return "".join(pieces)


def syntax_problem(template: str) -> str:
    """Where a template is no Jinja; '' where it is."""
    try:
        _compile(template)
    except jinja2.TemplateSyntaxError as error:
        return f"line {error.lineno}: {' '.join(str(error.message).split())[:300]}"
    except (RecursionError, SyntaxError, MemoryError) as error:
        return _reason(error, 1)
    return ""


def _reason(error: Exception, scale: int) -> str:
    text = " ".join(str(error).split())[:300]
    if isinstance(error, sandbox.SecurityError):
        return f"reaches outside its sandbox: {text}"
    if isinstance(error, jinja2.TemplateError):
        return f"failed: {text}"
    if isinstance(error, MemoryError):
        return f"needs more than {scale * DATA_BYTES >> 20} MB of memory"
    if isinstance(error, RecursionError):
        return "failed: it recurses without end"
    if isinstance(error, SyntaxError):  # in the Python code that Jinja generates
        return "failed: it is nested too deeply"
    return f"failed: {type(error).__name__}: {text}"


class _Sandbox(sandbox.ImmutableSandboxedEnvironment):
    """Refuses at once what Jinja's own sandbox would render as an empty text."""

    def unsafe_undefined(self, obj: object, attribute: str) -> NoReturn:
        raise sandbox.SecurityError(
            f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe"
        )


class _GenerationTag(ext.Extension):
    """`{% generation %}` marks the assistant's text for training; it renders as its content, a call
    block as in transformers: variables set inside are not seen outside.
    """

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> str:
        return caller()


class _Namespace(utils.Namespace):
    """`namespace(...)` that refuses names with a leading underscore."""

    def __init__(*args: object, **values: object) -> None:
        self, *mappings = args  # `namespace(self=...)` is legal
        whole = dict(*mappings, **values)
        for name in whole:
            _check_name(name)
        utils.Namespace.__init__(self, whole)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise sandbox.SecurityError(f"a namespace takes no name that begins with '_': {name!r}")


class _Dict:
    """`dict` as a function, which does not expose the class as Jinja's own does."""

    def __call__(self, *args: object, **values: object) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, *args: Any) -> dict[object, object]:
        return dict.fromkeys(*args)


@functools.lru_cache(maxsize=8)
def variables(template: str) -> frozenset[str]:
    """Names that a template reads and does not set; none of a malformed one."""
    try:
        return frozenset(meta.find_undeclared_variables(_environment().parse(template)))
    except (jinja2.TemplateError, RecursionError):
        return frozenset()


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda pattern: datetime.datetime.now().strftime(pattern),
        "namespace": _Namespace,
        "dict": _Dict(),
    }
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
