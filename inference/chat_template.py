"""Chat templates: Jinja programs from a checkpoint, run in the sandbox transformers uses."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, parser, sandbox

from configs.errors import InputError

_MAX_TEMPLATE_CHARS = 1 << 20
_MAX_OUTPUT_CHARS = 16 << 20


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
) -> str:
    """The prompt a template makes of a conversation.

    Args:
        template: Jinja source.
        messages: plain data, normally {"role": ..., "content": ...} each.
        add_generation_prompt: end with the opening of the assistant's turn.
        special_tokens: further variables, such as bos_token.

    Raises:
        InputError: the template is malformed, refuses the messages, reaches outside its sandbox or
            writes too much.
    """
    try:
        stream = _compile(template).generate(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **(special_tokens or {}),
        )
        return _join(stream)
    except sandbox.SecurityError as error:
        raise InputError(
            f"the chat template reaches outside its sandbox: {_one_line(error)}"
        ) from None
    except jinja2.TemplateError as error:
        raise InputError(f"the chat template failed: {_one_line(error)}") from None
    except RecursionError:
        raise InputError("the chat template failed: it recurses without end") from None
    except SyntaxError:  # of the Python that Jinja makes of it
        raise InputError("the chat template failed: it is nested too deeply") from None
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        MemoryError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"the chat template failed: {type(error).__name__}: {_one_line(error)}"
        ) from None


def _join(stream: Any) -> str:
    pieces, size = [], 0
    for piece in stream:
        size += len(piece)
        if size > _MAX_OUTPUT_CHARS:
            raise InputError(f"the chat template writes more than {_MAX_OUTPUT_CHARS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


class _Sandbox(sandbox.ImmutableSandboxedEnvironment):
    """Refuses at once what Jinja's own sandbox would print as nothing."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise sandbox.SecurityError(
            f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe"
        )


class _GenerationTag(ext.Extension):
    """`{% generation %}` marks the assistant's text for training; it renders as its content."""

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    if len(template) > _MAX_TEMPLATE_CHARS:
        raise InputError(f"the chat template is longer than {_MAX_TEMPLATE_CHARS} characters")
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    for name in ("lipsum", "cycler", "joiner"):
        del environment.globals[name]
    return environment.from_string(template)


def _tojson(
    value: Any,
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


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
