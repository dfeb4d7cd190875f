"""Python's literals as JSON: texts, numbers, True, False, None, lists, tuples and dicts.

Nothing is evaluated; a name, a call or an operator is no literal.
"""

import json
import re
import sys

_MAX_DEPTH = 64
_NAMES = {"True": "true", "False": "false", "None": "null"}
_NAMES |= {name: name for name in _NAMES.values()}  # JSON's own
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v"}
_ESCAPES |= {"\\": "\\", "'": "'", '"': '"', "/": "/", "\n": ""}
_DIGITS = {"x": 2, "u": 4, "U": 8}  # of a character's number, by the letter before them
_TOKEN = re.compile(
    r"""\s*(?:(?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')"""
    r"""|(?P<number>-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?(?![\w.]))"""
    r"""|(?P<name>[A-Za-z]+)|(?P<sign>[][(){}:,]))""",
    re.DOTALL,
)
_CLOSING = {"[": "]", "(": ")", "{": "}"}


def to_json(text: str) -> str | None:
    """A literal as JSON; None: it is none."""
    parts: list[str] = []
    try:
        end = _read(text, 0, parts, 0)
    except ValueError:
        return None
    return "".join(parts) if end is not None and not text[end:].strip() else None


def character(escape: str) -> str:
    """What an escape behind its backslash stands for; raises ValueError if it is none."""
    if escape[0] in _DIGITS:
        code = int(escape[1:], 16)
        if code > sys.maxunicode:
            raise ValueError(f"there is no character {code}")
        return chr(code)
    return _ESCAPES.get(escape, "\\" + escape)


def num_digits(letter: str) -> int:
    """Digits of a character's number behind this letter of an escape."""
    return _DIGITS.get(letter, 0)


def quoted(text: str) -> str:
    """A part of a text as it is within quotes in JSON; a half of a surrogate pair is escaped."""
    return "".join(json.dumps(c, ensure_ascii="\ud800" <= c <= "\udfff")[1:-1] for c in text)


def _read(text: str, at: int, parts: list[str], depth: int) -> int | None:
    """Adds the JSON of the literal at a place; returns where it ends. None: there is none."""
    match = _TOKEN.match(text, at)
    if match is None or depth > _MAX_DEPTH:
        return None
    if match["text"] is not None:
        parts.append(f'"{quoted(_unescaped(match["text"][1:-1]))}"')
    elif match["number"] is not None:
        parts.append(match["number"])
    elif match["name"] is not None:
        if match["name"] not in _NAMES:
            return None
        parts.append(_NAMES[match["name"]])
    elif match["sign"] in _CLOSING:
        return _read_items(text, match.end(), parts, depth, match["sign"])
    else:
        return None
    return match.end()


def _read_items(text: str, at: int, parts: list[str], depth: int, opening: str) -> int | None:
    closing, is_dict = _CLOSING[opening], opening == "{"
    parts.append("{" if is_dict else "[")
    num = 0
    while (match := _TOKEN.match(text, at)) is None or match["sign"] != closing:
        if num:
            if match is None or match["sign"] != ",":
                return None
            at = match.end()
            end = _TOKEN.match(text, at)
            if end is not None and end["sign"] == closing:  # a comma behind the last one
                match = end
                break
            parts.append(", ")
        if is_dict:
            key = _TOKEN.match(text, at)
            after = _read(text, at, parts, depth + 1)
            colon = None if after is None else _TOKEN.match(text, after)
            if key is None or key["text"] is None or colon is None or colon["sign"] != ":":
                return None
            parts.append(": ")
            at = colon.end()
        item_end = _read(text, at, parts, depth + 1)
        if item_end is None:
            return None
        at, num = item_end, num + 1
    parts.append("}" if is_dict else "]")
    return match.end()


def _unescaped(text: str) -> str:
    """The characters of a text between its quotes; raises ValueError if it is none."""
    read, at = "", 0
    while at < len(text):
        c = text[at]
        at += 1
        if c == "\\":
            size = 1 + num_digits(text[at])
            c = character(text[at : at + size])
            at += size
        read += c
    return read
