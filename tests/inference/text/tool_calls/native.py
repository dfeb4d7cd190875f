"""Formats of calls as their models write them, and a plain reading of whole texts.

`write` puts calls into a format; `read` finds them again by regular expressions alone. Both know
the formats by their published descriptions, not by `formats.FORMATS`.
"""

import ast
import json
import re

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "is_long": {"type": "boolean"},
    },
    "required": ["city"],
}  # fmt: skip
SEARCH = {
    "type": "object",
    "properties": {
        "query": {"$ref": "#/$defs/text"}, "filter": {"type": "object"}, "any": {},
        "tags": {"type": "array", "items": {"type": "string"}},
        "after": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "$defs": {"text": {"type": "string"}},
}  # fmt: skip
SCHEMAS: dict = {"weather": CITY, "web-search": SEARCH, "now": {"type": "object", "properties": {}}}
TEXTS = {"city", "query"}  # parameters that are no JSON


def _plain(value, key) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _value(text: str, key: str):
    if key in TEXTS:
        return text
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return text if key == "after" and not isinstance(value, str | None) else value


class Tags:
    """Parameters between tags, each call in a block of its own or several in one."""

    def __init__(self, block, call, parameter, is_section=False):
        """`block`, `call`, `parameter`: patterns with {} for what stands within them."""
        self._block, self._call, self._parameter = block, call, parameter
        self._is_section = is_section

    def write(self, *calls) -> str:
        texts = [
            self._call.format(name, "".join(
                self._parameter.format(key, _plain(value, key)) for key, value in given.items()
            ))
            for name, given in calls
        ]  # fmt: skip
        if self._is_section:
            return self._block.format("".join(texts))
        return "\n".join(map(self._block.format, texts))

    def blocks(self, text: str):
        """(start, end, calls) of each block; calls of it that are none end it."""
        for match in re.finditer(_pattern(self._block, "(.*?)"), text, re.DOTALL):
            calls, at = [], match.start(1)
            body = "(.*)" if self._call.endswith("{}") else "(.*?)"
            call = re.compile(_pattern(self._call, r"([\w.-]+)", body), re.DOTALL)
            while (one := call.match(text, at, match.end(1))) and one[1] in SCHEMAS:
                calls.append((one[1], self._arguments(one[2])))
                at = one.end()
            if calls:
                is_whole = not text[at : match.end(1)].strip()
                yield match.start(), match.end() if is_whole else at, calls

    def _arguments(self, body: str) -> dict:
        pairs = re.findall(_pattern(self._parameter, "(.*?)", "(.*?)"), body, re.DOTALL)
        return {key: _value(value, key) for key, value in pairs}


class Typed(Tags):
    """Parameters whose tag says whether the value is text."""

    def write(self, *calls) -> str:
        texts = (
            self._call.format(name, "".join(
                self._parameter.format(key, str(isinstance(value, str)).lower(), _plain(value, key))
                for key, value in given.items()
            ))
            for name, given in calls
        )  # fmt: skip
        return self._block.format("".join(texts))

    def _arguments(self, body: str) -> dict:
        triples = re.findall(_pattern(self._parameter, "(.*?)", "(.*?)", "(.*?)"), body, re.DOTALL)
        return {key: value if is_text == "true" else json.loads(value)
                for key, is_text, value in triples}  # fmt: skip


class Lists:
    """JSON objects in a list between two texts."""

    def __init__(self, block, keys=("name", "arguments")):
        self._block, self._keys = block, keys

    def write(self, *calls) -> str:
        objects = [dict(zip(self._keys, call, strict=True)) for call in calls]
        return self._block.format(json.dumps(objects, ensure_ascii=False))

    def blocks(self, text: str):
        before, after = map(re.escape, self._block.split("{}"))
        for match in re.finditer(before, text):
            try:
                calls, end = json.JSONDecoder().raw_decode(text, match.end())
            except ValueError:
                continue
            name, given = self._keys
            if all(call[name] in SCHEMAS for call in calls):
                end = re.compile(rf"(?:\s*{after})?(?<!\s)").match(text, end).end()
                yield match.start(), end, [(call[name], call[given]) for call in calls]


class Names:
    """A name and a JSON object, each call behind marks."""

    def __init__(self, block, head, tail="", between=""):
        """`block`: a text with {} for the calls; `head`: of a call, with {name} and its number."""
        self._block, self._head, self._tail, self._between = block, head, tail, between

    def write(self, *calls) -> str:
        texts = (
            self._head.format(name=name, n=n) + json.dumps(given, ensure_ascii=False) + self._tail
            for n, (name, given) in enumerate(calls)
        )
        return self._block.format(self._between.join(texts))

    def blocks(self, text: str):
        before, after = map(re.escape, self._block.split("{}"))
        head = re.escape(self._head).replace(r"\{name\}", r"([\w-]+)").replace(r"\{n\}", r"\d+")
        call, end = re.compile(rf"\s*{head}"), 0
        for match in re.finditer(before, text):
            calls, at = [], match.end()
            while at >= end and (one := call.match(text, at)) and one[1] in SCHEMAS:
                given, at = json.JSONDecoder().raw_decode(text, one.end())
                at = re.compile(rf"{re.escape(self._tail)}|").match(text, at).end()
                calls.append((one[1], given))
            if calls:
                end = re.compile(rf"{after}|").match(text, at).end()
                yield match.start(), end, calls


class Python:
    """A list of calls in Python, between two texts or in a line of its own."""

    def __init__(self, block):
        self._block = block

    def write(self, *calls, spell=repr) -> str:
        texts = (
            f"{name}({', '.join(f'{key}={spell(value)}' for key, value in given.items())})"
            for name, given in calls
        )
        return self._block.format(f"[{', '.join(texts)}]")

    def blocks(self, text: str):
        before, after = map(re.escape, self._block.split("{}"))
        call, last = re.compile(r"\s*([\w-]+)\("), 0
        for match in re.finditer(rf"{before}\[", text):
            line = text[last : match.start()].rpartition("\n")[2].rpartition("</think>")[2]
            if match.start() < last or (not before and line.strip()):
                continue
            calls, at = [], match.end()
            while (one := call.match(text, at)) and one[1] in SCHEMAS:
                given, at = _python_arguments(text, one.end())
                calls.append((one[1], given))
                at = re.compile(",|").match(text, at).end()
            if calls:
                last = re.compile(rf"\]{after}").match(text, at).end()
                yield match.start(), last, calls


class Lines(Python):
    """Calls in Python, each in a line."""

    def write(self, *calls, spell=repr) -> str:
        texts = (
            f"{name}({', '.join(f'{key}={spell(value)}' for key, value in given.items())})\n"
            for name, given in calls
        )
        return self._block.format("".join(texts))

    def blocks(self, text: str):
        before, after = map(re.escape, self._block.split("{}"))
        call = re.compile(r"\s*([\w-]+)\(")
        for match in re.finditer(before, text):
            calls, at = [], match.end()
            while (one := call.match(text, at)) and one[1] in SCHEMAS:
                given, at = _python_arguments(text, one.end())
                calls.append((one[1], given))
            if calls:
                end = re.compile(rf"\s*{after}|\s*").match(text, at).end()
                yield match.start(), end, calls


class Bare:
    """A name and an object with bare keys, and texts between marks without escapes."""

    def __init__(self, block, quote):
        self._block, self._quote = block, quote

    def write(self, *calls) -> str:
        return "".join(self._block.format(f"call:{name}{self._spell(given)}")
                       for name, given in calls)  # fmt: skip

    def _spell(self, value) -> str:
        if isinstance(value, str):
            return self._quote + value + self._quote
        if isinstance(value, list):
            return f"[{','.join(map(self._spell, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{self._spell(item)}' for key, item in value.items())}}}"
        return json.dumps(value)

    def blocks(self, text: str):
        before, after = map(re.escape, self._block.split("{}"))
        for match in re.finditer(rf"{before}call:([\w-]+)(?=\{{)", text):
            if match[1] not in SCHEMAS:
                continue
            parts = text[match.end() :].split(self._quote)
            ends = [
                json.dumps(part, ensure_ascii=False) if n % 2 else
                re.sub(r"([^\s{},\[\]:]+):", lambda key: json.dumps(key[1]) + ":", part)
                for n, part in enumerate(parts)
            ]  # fmt: skip
            given, _ = json.JSONDecoder().raw_decode("".join(ends))
            size = len(self._spell(given))
            end = re.compile(rf"{after}|").match(text, match.end() + size).end()
            yield match.start(), end, [(match[1], given)]


def _python_arguments(text: str, start: int) -> tuple[dict, int]:
    for match in re.compile(r"\)").finditer(text, start):
        try:
            tree = ast.parse(f"f({text[start : match.end()]}", mode="eval").body
        except SyntaxError:
            continue
        return {one.arg: ast.literal_eval(one.value) for one in tree.keywords}, match.end()
    raise AssertionError("the call has no end")


def _pattern(template: str, *groups: str) -> str:
    """A regular expression of a text with {}, any blanks at its line ends."""
    escaped = [re.escape(part).replace("\\\n", r"\s*") for part in template.split("{}")]
    if template.count("\n{}\n"):  # a value within lines of its own
        escaped = [
            part.replace(r"\s*", r"\n?") if part.endswith(r">\s*") else part
            for part in escaped[:-1]
        ] + [escaped[-1].replace(r"\s*", r"\n?", 1)]
    return "".join(a + b for a, b in zip(escaped, [*groups, ""], strict=True))


FORMATS = {
    "qwen3_coder": Tags("<tool_call>\n{}</tool_call>", "<function={}>\n{}</function>\n",
                        "<parameter={}>\n{}\n</parameter>\n"),
    "glm45": Tags("<tool_call>{}</tool_call>", "{}\n{}",
                  "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"),
    "minimax_m2": Tags("<minimax:tool_call>\n{}</minimax:tool_call>",
                       '<invoke name="{}">\n{}</invoke>\n',
                       '<parameter name="{}">{}</parameter>\n', is_section=True),
    "deepseek_v32": Typed("<｜DSML｜function_calls>\n{}</｜DSML｜function_calls>",
                          '<｜DSML｜invoke name="{}">\n{}</｜DSML｜invoke>\n',
                          '<｜DSML｜parameter name="{}" string="{}">{}</｜DSML｜parameter>\n',
                          is_section=True),
    "seed_oss": Tags("<seed:tool_call>\n{}</seed:tool_call>", "<function={}>\n{}</function>\n",
                     "<parameter={}>{}</parameter>\n"),
    "mistral": Names("{}", "[TOOL_CALLS]{name}[ARGS]"),
    "kimi_k2": Names("<|tool_calls_section_begin|>{}<|tool_calls_section_end|>",
                     "<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>",
                     "<|tool_call_end|>"),
    "deepseek_v3": Names("<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
                         "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
                         "\n```<｜tool▁call▁end｜>", "\n"),
    "deepseek_v31": Names("<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>",
                          "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "openai": Names("{}", "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
                    "<|call|>"),
    "gemma4": Bare("<|tool_call>{}<tool_call|>", '<|"|>'),
    "functiongemma": Bare("<start_function_call>{}<end_function_call>", "<escape>"),
    "olmo3": Lines("<function_calls>\n{}</function_calls>"),
    "lfm2": Python("<|tool_call_start|>{}<|tool_call_end|>"), "pythonic": Python("{}"),
    "cohere": Lists("<|START_ACTION|>{}<|END_ACTION|>", ("tool_name", "parameters")),
    "granite": Lists("<|tool_call|>{}"), "phi4": Lists("functools{}"),
    "jamba": Lists("<tool_calls>{}</tool_calls>"), "nemotron": Lists("<TOOLCALL>{}</TOOLCALL>"),
}  # fmt: skip


def read(format: str, text: str) -> tuple[str, list]:
    """The text around calls, and names and arguments of these; thoughts are text."""
    thoughts = [match.span() for match in re.finditer(r"<think>.*?</think>", text, re.DOTALL)]
    if text.lstrip().startswith("<think>") and "</think>" not in text:
        return text, []
    content, calls, end = "", [], 0
    for start, after, found in FORMATS[format].blocks(text):
        if any(a <= start < b for a, b in thoughts):
            continue
        content = _joined(content, text[end:start].rstrip(), bool(calls))
        calls, end = calls + found, after
    return _joined(content, text[end:], bool(calls)), calls


def _joined(content: str, text: str, follows_call: bool) -> str:
    return content + (text.lstrip() if follows_call and not (content and text.strip()) else text)
