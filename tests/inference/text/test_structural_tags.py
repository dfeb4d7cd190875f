"""Structural tags: texts under the mask are those that a reader of another kind accepts."""

import json
import random
import re

import msgspec
import pytest
import tokenizers
from tokenizers import AddedToken

from configs.errors import InputError
from inference.text import grammar
from inference.text.grammar import Grammars
from inference.text.structural_tags import formats
from inference.text.tokenizer import Tokenizer
from tests.inference.server.fake_engine import END, VOCAB, tokenizer

INTEGER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
           "additionalProperties": False}  # fmt: skip
GET = {"type": "tag", "begin": "<f=get>", "end": "</f>",
       "content": {"type": "json_schema", "json_schema": INTEGER}}  # fmt: skip
TIME = {"type": "tag", "begin": "<f=time>", "end": ["</f>", "</g>"],
        "content": {"type": "any_text", "excludes": ["no"]}}  # fmt: skip
CODE = {"type": "tag", "begin": "[code]", "end": "[end]",
        "content": {"type": "regex", "pattern": "[a-z/]+|[0-9]{3}"}}  # fmt: skip
CALLS = {"type": "triggered_tags", "triggers": ["<f=", "[c"], "tags": [GET, TIME, CODE]}
THOUGHT = {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"}
DONE = {"type": "const_string", "value": "Done."}
FORMATS = {
    "free": CALLS,
    "at least one": {**CALLS, "at_least_one": True},
    "first": {**CALLS, "stop_after_first": True},
    "just one": {**CALLS, "at_least_one": True, "stop_after_first": True},
    "without": {**CALLS, "excludes": ["e", "</"]},
    "within": {"type": "tag", "begin": "<", "content": CALLS, "end": "]]"},
    "thought": {"type": "sequence", "elements": [THOUGHT, CALLS]},
    "until": {"type": "sequence", "elements": [
        {"type": "any_text"}, {"type": "or", "elements": [GET, CODE]}, DONE]},
    "before done": {"type": "sequence", "elements": [{**CALLS, "stop_after_first": True}, DONE]},
    "list": {"type": "tags_with_separator", "tags": [GET, CODE], "separator": ", "},
    "repeated": {"type": "sequence", "elements": [
        {"type": "star", "content": GET}, {"type": "optional", "content": CODE},
        {"type": "plus", "content": DONE}]},
}  # fmt: skip
# Tokens that cut marks and run over them.
PIECES = (
    "a<",
    "<f",
    "<f=",
    "f=g",
    "=get>",
    ">{",
    '>{"n',
    '":1',
    "1}</",
    "}</f>",
    "</f> a<f=t",
    "ime>",
    "x</g>[",
    "[cod",
    "e]a/",
    "[end",
    "]]",
    "<think>no",
    "</thin",
    "k>",
    "Done.",
)
CLOSING = ('"n":1}</f>', "</think>", "[code]a[end]", "]]")  # fmt: skip


def pieces() -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer().to_json()))
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in (*PIECES, *CLOSING)])
    return Tokenizer(backend, backend.get_vocab_size(), {"eos_token": "<|end|>"}, None)


@pytest.fixture(scope="module")
def cut():
    return Grammars(pieces(), [END])


@pytest.fixture(scope="module")
def grammars():
    """Of bytes alone: of fixed text, only the usual tokens are permitted."""
    return Grammars(tokenizer(), [END])


def written(format, specials_in=lambda texts: {}) -> str:
    return formats.of_json(formats.as_json(msgspec.convert(format, formats.Format)), specials_in)


# --- a reader that goes back ----------------------------------------------------------------------


def ends(format: dict, text: str, at: int) -> set[int]:
    """Where a part of a text that begins at a place may end."""
    return _READERS[format["type"]](format, text, at)


def _json(format, text, at):
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except ValueError:
        return set()
    return {end} if list(value) == ["n"] and type(value["n"]) is int else set()


def _regex(format, text, at):
    pattern = re.compile(format["pattern"])
    return {end for end in range(at, len(text) + 1) if pattern.fullmatch(text, at, end)}


def _any(format, text, at):
    excludes = format.get("excludes", [])
    rest = range(at, len(text) + 1)
    return {end for end in rest if not any(word in text[at:end] for word in excludes)}


def _sequence(format, text, at):
    places = {at}
    for element in format["elements"]:
        places = {end for place in places for end in ends(element, text, place)}
    return places


def _tag(format, text, at):
    if not text.startswith(format["begin"], at):
        return set()
    closing = [format["end"]] if isinstance(format["end"], str) else format["end"]
    inner = ends(format["content"], text, at + len(format["begin"]))
    return {place + len(end) for place in inner for end in closing if text.startswith(end, place)}


def _triggered(format, text, at):
    found, begun = set(), {(at, 0)}
    seen = set()
    while begun:
        place, tags = begun.pop()
        seen.add((place, tags))
        triggers = [n for word in format["triggers"] if (n := text.find(word, place)) >= 0]
        trigger = min(triggers, default=len(text))
        may_be_free = not (format.get("at_least_one") and not tags)
        over = bool(format.get("stop_after_first") and tags)
        free = {place} if over or not may_be_free else _any(format, text, place)
        free = {end for end in free if not any(t in text[place:end] for t in format["triggers"])}
        if tags or may_be_free:
            found |= free
        if trigger in free and not over:
            after = {end for tag in format["tags"] for end in _tag(tag, text, trigger)}
            begun |= {(end, 1) for end in after} - seen
    return found


def _list(format, text, at):
    found, places = {at}, {at}
    while places:
        after = {
            end for place in places for tag in format["tags"] for end in _tag(tag, text, place)
        }
        found |= after
        step = len(format["separator"])
        places = {end + step for end in after if text.startswith(format["separator"], end)}
    return found


def _repeated(least, most):
    def read(format, text, at):
        found, places = set(), {at}
        for count in range(most + 1):
            found |= places if count >= least else set()
            places = {end for place in places for end in ends(format["content"], text, place)}
        return found

    return read


_READERS = {
    "const_string": lambda format, text, at: (
        {at + len(format["value"])} if text.startswith(format["value"], at) else set()
    ),
    "json_schema": _json, "regex": _regex, "any_text": _any, "sequence": _sequence, "tag": _tag,
    "or": lambda format, text, at: set().union(*(ends(e, text, at) for e in format["elements"])),
    "triggered_tags": _triggered, "tags_with_separator": _list,
    "star": _repeated(0, 60), "plus": _repeated(1, 60), "optional": _repeated(0, 1),
}  # fmt: skip


# --- walks ----------------------------------------------------------------------------------------


def permitted(state, size: int) -> list[int]:
    words = state.mask()
    return [v for v in range(size) if words[v // 32] >> (v % 32) & 1]


def walked(state, own: Tokenizer, dice: random.Random) -> str:
    """A text that obeys the mask, and has marks often."""
    tokens: list[int] = []
    size = own.vocab_size
    marks, closing = range(VOCAB, size), range(size - len(CLOSING), size)
    while END not in tokens:
        options = permitted(state, size)
        likely = [token for token in marks if token in options]
        if len(tokens) > 30:
            likely = [token for token in (*closing, *b'</>"}1]endDone.') if token in options]
        if END in options and (len(tokens) > 30 or dice.random() < 0.1):
            likely = [END]
        usual = [token for token in options if token < 128] or options
        tokens.append(dice.choice(likely if likely and dice.random() < 0.6 else usual))
        state.accept(tokens[-1])
        assert len(tokens) < 3000, own.decode(tokens)[:500]
    return own.decode(tokens)


@pytest.mark.parametrize("name", FORMATS)
def test_every_walk_under_the_mask_is_a_text_of_the_format(cut, name):
    own, source, dice = pieces(), written(FORMATS[name]), random.Random(name)
    texts = [walked(cut.start(source), own, dice) for _ in range(12)]
    for text in texts:
        assert len(text) in ends(FORMATS[name], text, 0), text
    assert len(set(texts)) > 4
    marks = [text for text in texts if "<f=" in text or "[code]" in text]
    assert len(marks) >= 3


def test_tokens_that_cut_a_mark_are_permitted_as_their_bytes_are(cut):
    own, source = pieces(), written(CALLS)
    texts = ("", "a", "a<f", "<f=", "<f=ge", '<f=get>{"n":', '<f=get>{"n": 1}<', "<f=time>x</", "[")
    for text in texts:
        options = permitted(cut.start(source, [*text.encode()]), own.vocab_size)
        for token in range(VOCAB, own.vocab_size):
            state = cut.start(source, [*text.encode()])
            for byte in own.token_bytes(token):
                state.accept(byte)
            assert (token in options) is not state.has_failed, (text, own.token_bytes(token))


# --- single texts ---------------------------------------------------------------------------------


def verdict(grammars, source, text) -> str:
    """Whether a text is 'whole', 'begun', or up to where it was permitted."""
    state = grammars.start(source)
    for place, byte in enumerate(text.encode()):
        if byte not in permitted(state, VOCAB):
            return text.encode()[:place].decode()
        state.accept(byte)
    return "whole" if END in permitted(state, VOCAB) else "begun"


CHOICE = {"type": "grammar", "grammar": 'root ::= "yes" | "no" [0-9]'}
LARK = {"type": "grammar", "grammar": 'start: "maybe" %json {"type": "null"}'}
XML = {"type": "json_schema", "style": "qwen_xml", "json_schema": {
    "type": "object", "properties": {"q": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["q"]}}  # fmt: skip


@pytest.mark.parametrize("format, text, expected", [
    (CALLS, "a < b <f", "whole"),
    (CALLS, "a<f=", "begun"),
    (CALLS, "a<f=x", "a<f="),
    (CALLS, '<f=get>{"n": 1}</f> <f=time>on</g>[code]123[end].', "whole"),
    (CALLS, '<f=get>{"n": "x', '<f=get>{"n": '),
    (CALLS, "<f=time>no", "<f=time>n"),
    (FORMATS["at least one"], "a", ""),
    (FORMATS["first"], "a[code]a/b[end] ", "a[code]a/b[end]"),
    (FORMATS["just one"], "[code]a/b[end]", "whole"),
    (FORMATS["within"], "<a<f=time>]]</f>]]", "whole"),
    (FORMATS["within"], "<]].", "<]]"),
    (FORMATS["thought"], "<think>a <f=x</think><f=x", "<think>a <f=x</think><f="),
    ({"type": "tag", "begin": "<c>", "content": CHOICE, "end": "</c>"}, "<c>no1</c>", "whole"),
    ({"type": "or", "elements": [CHOICE, LARK]}, "maybenull", "whole"),
    ({"type": "tag", "begin": "<f>", "content": XML, "end": "</f>"},
     "<f><parameter=q>a<b</parameter><parameter=n>3</parameter></f>", "whole"),
    ({"type": "qwen_xml_parameter", "json_schema": XML["json_schema"]}, "<parameter=n",
     "<parameter="),
    ({**XML, "style": "glm_xml"}, "<arg_key>q</arg_key><arg_value>a</arg_value>", "whole"),
    ({**XML, "style": "minimax_xml"}, '<parameter name="q">a</parameter>', "whole"),
    ({"type": "json_schema", "json_schema": True}, "[1]", "whole"),
])  # fmt: skip
def test_what_is_permitted_and_nothing_else(grammars, format, text, expected):
    assert verdict(grammars, written(format), text) == expected


def test_marks_that_are_special_tokens(grammars):
    """They end free text, which has none in it."""
    own = tokenizer()
    tag = {**GET, "begin": "[TOOL_CALLS]get[ARGS]", "end": ""}
    calls = {"type": "triggered_tags", "triggers": ["[TOOL_CALLS]"], "tags": [tag]}
    opening, arguments = (own.specials_in([word])[word] for word in ("[TOOL_CALLS]", "[ARGS]"))
    source = written(calls, own.specials_in)
    tokens = [*b"Hi. ", opening, *b"get", arguments, *b'{"n": 1}', *b" More."]
    state = grammars.start(source)
    for token in tokens:
        assert token in permitted(state, VOCAB), tokens
        state.accept(token)
    assert END in permitted(state, VOCAB) and arguments not in permitted(state, VOCAB)
    assert verdict(grammars, source, "[TOOL_CALLS]") == "[TOOL_CALLS"


def test_keywords_that_are_relaxed_are_named():
    words = {"type": "array", "items": {"enum": [*"abcdefgh"]}, "uniqueItems": True}
    tag = {**GET, "content": {"type": "json_schema", "json_schema": words}}
    assert grammar.relaxed(written(tag)) == ["uniqueItems"]
    both = {"type": "sequence", "elements": [tag, CHOICE]}
    assert grammar.relaxed(written(both)) == ["uniqueItems"]
    text = {"type": "const_string", "value": '"$comment": "relaxed: uniqueItems"'}
    assert grammar.relaxed(written({"type": "or", "elements": [text, CHOICE]})) == []


@pytest.mark.parametrize("format, problem", [
    ({**CALLS, "triggers": ["<f="]}, r"exactly one of them has to begin the tag '\[code\]', not 0"),
    ({**CALLS, "triggers": ["<f=", "<", "[c"]}, "begin the tag '<f=get>', not 2"),
    ({**CALLS, "triggers": ["<f=", "[c", "x"]}, "triggers: 'x' begins no tag"),
    ({"type": "tag", "begin": "", "content": CALLS, "end": "x<f="}, "'<f=' is a part of 'x<f='"),
    ({"type": "sequence", "elements": [{"type": "any_text"}, CHOICE]}, "free text has no end"),
    ({**THOUGHT, "end": ""}, "free text has no end"),
    ({**THOUGHT, "end": ["</", "</x>"]}, "never ends with '</x>', because it ends with '</'"),
    ({"type": "star", "content": {"type": "any_text"}}, "free text has no end"),
    ({"type": "json_schema", "json_schema": False}, "permits no JSON"),
    ({"type": "json_schema", "json_schema": {"$ref": "http://x"}}, "is not fetched"),
    ({"type": "regex", "pattern": "(("}, "invalid regular expression"),
    ({"type": "grammar", "grammar": "root ::= ("}, "cannot be read"),
    ({**CALLS, "tags": [{**GET, "begin": f"<f={n}>"} for n in range(300)] + [CODE]}, "512 rules"),
    ({"type": "const_string", "value": "x" * 70_000}, "at most 65536 characters"),
    ({"type": "sequence", "elements": [{"type": "any_text"}, {"type": "or", "elements": [
        {"type": "const_string", "value": f"{n:>0200}"} for n in range(150)]}]},
     "written out, has at most 1048576 characters"),
])  # fmt: skip
def test_what_cannot_be_forced_says_why(grammars, format, problem):
    with pytest.raises(InputError, match=problem):
        grammars.start(written(format))
