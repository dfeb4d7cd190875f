"""The ways in which models write calls of tools, as text."""

import dataclasses
import functools
import re

from configs.errors import InputError, shown
from inference.text.tool_calls.shapes import Bare, Literals, NameThenJson, Objects, Shape, Tagged


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of calls: their shape, and the text around one or several.

    Attributes:
        opening: before a call, or several; "": nothing does.
        closing: behind them.
        aliases: other openings that some models write.
        brackets: a line that begins with one may be a call, or a list of them, without the opening.
        shape: what stands between opening and closing.
        gap: between those and a call.
        between: between calls, each with its opening; inside of one opening if `is_section`.
        is_message: a call is a message on a channel (`Channels`), whose closing ends the answer: so
            a grammar leaves it out, and has one call.
        is_read: False: the template's calls have this name and stay text; what a request forces is
            plain JSON, as the other fields say.
    """

    name: str
    opening: str = ""
    closing: str = ""
    aliases: tuple[str, ...] = ()
    brackets: str = ""
    shape: Shape = Objects()
    gap: str = ""
    between: str = "\n"
    is_section: bool = False
    is_message: bool = False
    is_read: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """All texts that the format has around names and values."""
        texts = (text for text in dataclasses.astuple(self.shape) if isinstance(text, str))
        return (self.opening, self.closing, *self.aliases, *texts)

    @property
    def openings(self) -> tuple[str, ...]:
        return tuple(mark for mark in (self.opening, *self.aliases) if mark)


HERMES = Format("hermes", "<tool_call>", "</tool_call>", gap="\n")
LLAMA3_JSON = Format(
    "llama3_json", "<|python_tag|>", brackets="{", shape=Objects("parameters"), between="; "
)
JSON = Format("json", brackets="{[")
_FUNCTION = Tagged(
    "<parameter=", ">\n", "\n</parameter>\n", ">\n", head="<function=", tail="</function>\n"
)
_LIST = Objects(is_list=True)
_DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_FORMATS = (
    HERMES,
    LLAMA3_JSON,
    JSON,
    Format("qwen3_coder", "<tool_call>", "</tool_call>", shape=_FUNCTION, gap="\n"),
    Format(
        "glm45", "<tool_call>", "</tool_call>",
        shape=Tagged(
            "<arg_key>", "</arg_key>\n", "</arg_value>\n", "\n", value_begin="<arg_value>"
        ),
    ),
    Format(
        "minimax_m2", "<minimax:tool_call>", "</minimax:tool_call>", gap="\n", between="",
        is_section=True,
        shape=Tagged(
            '<parameter name="', '">', "</parameter>\n", '">\n', head='<invoke name="',
            tail="</invoke>\n",
        ),
    ),
    Format(
        "deepseek_v32", "<｜DSML｜function_calls>", "</｜DSML｜function_calls>", gap="\n",
        between="", is_section=True,
        shape=Tagged(
            '<｜DSML｜parameter name="', '" string="', "</｜DSML｜parameter>\n", '">\n',
            head='<｜DSML｜invoke name="', value_begin='false">', text_begin='true">',
            tail="</｜DSML｜invoke>\n",
        ),
    ),
    Format(
        "seed_oss", "<seed:tool_call>", "</seed:tool_call>", gap="\n",
        shape=dataclasses.replace(_FUNCTION, key_end=">", value_end="</parameter>\n"),
    ),
    Format(
        "mistral", "[TOOL_CALLS]", between="", shape=NameThenJson("[ARGS]", id_mark="[CALL_ID]")
    ),
    Format(
        "kimi_k2", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", between="",
        is_section=True,
        shape=NameThenJson(
            "<|tool_call_argument_begin|>", head="<|tool_call_begin|>", prefix="functions.",
            id_mark=":", id_pattern="[0-9]{1,2}", tail="<|tool_call_end|>",
        ),
    ),
    Format(
        "deepseek_v3", *_DEEPSEEK, is_section=True,
        shape=NameThenJson(
            "\n```json\n", head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            tail="\n```<｜tool▁call▁end｜>",
        ),
    ),
    Format(
        "deepseek_v31", *_DEEPSEEK, between="", is_section=True,
        shape=NameThenJson(
            "<｜tool▁sep｜>", head="<｜tool▁call▁begin｜>", tail="<｜tool▁call▁end｜>"
        ),
    ),
    Format("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", shape=Literals()),
    Format("pythonic", brackets="[", shape=Literals()),
    Format(
        "olmo3", "<function_calls>", "</function_calls>", gap="\n", is_section=True,
        shape=Literals(is_list=False),
    ),
    Format("granite", "<|tool_call|>", aliases=("<tool_call>",), shape=_LIST),
    Format("phi4", "functools", shape=_LIST),
    Format(
        "cohere", "<|START_ACTION|>", "<|END_ACTION|>",
        shape=Objects("parameters", "tool_name", is_list=True),
    ),
    Format("jamba", "<tool_calls>", "</tool_calls>", shape=_LIST),
    Format("nemotron", "<TOOLCALL>", "</TOOLCALL>", shape=_LIST),
    Format("gemma4", "<|tool_call>", "<tool_call|>", between="", shape=Bare('<|"|>')),
    Format(
        "functiongemma", "<start_function_call>", "<end_function_call>", between="",
        shape=Bare("<escape>"),
    ),
    Format(
        "openai", "<|channel|>commentary to=", "<|call|>", between="", is_message=True,
        shape=NameThenJson(" <|constrain|>json<|message|>", prefix="functions."),
    ),
)  # fmt: skip
FORMATS = {format.name: format for format in _FORMATS}
AUTO = "auto"
CHOICES = (AUTO, *FORMATS)

_TOOLS = re.compile(r"\btools\b")
_PARAMETERS = re.compile(r'"name"[^{}]{1,60}"parameters"')
_JSON_CALLS = re.compile(
    r"""["']name\\?["']\s*:|(?:calls?|calls?["']\]|(?<!\btool)\.function)\s*\|\s*tojson"""
)
# Names of vLLM's parsers, and what templates write around their calls; the first match counts.
_MARKS = (
    ("seed_oss", "<seed:tool_call>"),
    ("qwen3_coder", "<function="),
    ("glm45", "<arg_key>"),
    ("minimax_m2", "<minimax:tool_call>"),
    ("lfm2", "<|tool_call_start|>"),
    ("lfm2", "<|tool_list_start|>"),
    ("mistral", "[ARGS]"),
    ("openai", "<|channel|>", "<|message|>"),
    ("deepseek_v3", "<｜tool▁call", "```json"),
    ("deepseek_v31", "<｜tool▁call"),
    ("deepseek_v32", "｜DSML｜"),
    ("kimi_k2", "<|tool_calls_section_begin|>"),
    ("gemma4", "<|tool_call>"),
    ("functiongemma", "<start_function_call>"),
    ("granite", "<|tool_call|>"),
    ("phi4", "functools["),
    ("jamba", "<tool_calls>"),
    ("nemotron", "<TOOLCALL>"),
    ("pythonic", "[func_name1("),
    ("olmo3", "<function_calls>"),
    ("internlm", "<|action_start|>"),
    ("cohere", "<|START_ACTION|>"),
)


def by_name(name: str, template: str | None) -> Format:
    """Returns the format of this name; "auto": that of a chat template.

    Raises:
        InputError: there is no such format; lists those there are.
    """
    if name not in CHOICES:
        raise InputError(
            f"a format of tool calls is one of {', '.join(CHOICES)}, not {shown(name)}"
        )
    return of_template(template) if name == AUTO else FORMATS[name]


@functools.lru_cache(maxsize=8)
def of_template(template: str | None) -> Format:
    """The format that a chat template asks for, or plain JSON; an unknown one is not `is_read`."""
    source = template or ""
    if not knows_tools(source):
        return JSON
    name = next((name for name, *marks in _MARKS if all(mark in source for mark in marks)), None)
    if name is None and knows_calls(source) and not _JSON_CALLS.search(source):
        name = "unknown"
    if name is not None:
        return FORMATS.get(name) or dataclasses.replace(JSON, name=name, is_read=False)
    if HERMES.opening in source:
        return HERMES
    plain = source.replace('\\"', '"')  # in a string of Jinja
    if LLAMA3_JSON.opening in source or _PARAMETERS.search(plain):
        return LLAMA3_JSON
    return JSON


def knows_tools(template: str | None) -> bool:
    """Whether a chat template shows tools to the model."""
    return _TOOLS.search(template or "") is not None


def knows_calls(template: str | None) -> bool:
    """Whether a chat template writes the calls of earlier messages."""
    return "tool_calls" in (template or "")
