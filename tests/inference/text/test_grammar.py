"""Grammars: what may come next, when a text is whole, and what cannot be compiled."""

import contextlib
import json
import random
import time

import numpy as np
import pytest
import tokenizers

from configs.errors import InputError
from inference.text import grammar
from inference.text.grammar import Grammars
from inference.text.tokenizer import Tokenizer
from tests.inference.server.fake_engine import END, VOCAB, tokenizer
from tests.inference.text import test_quoting

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0},
                   "kind": {"enum": ["a", "ü"]}},
    "required": ["name", "age"], "additionalProperties": False,
}  # fmt: skip


NESTED: dict = {"type": "object"}
for _ in range(70):
    NESTED = {"properties": {"a": NESTED}}


CHAIN = "start: a0\n" + "".join(f"a{n}: a{n + 1}\n" for n in range(3000))


DOUBLING = "start: r0\n" + "".join(f"r{n}: r{n + 1} r{n + 1}\n" for n in range(20)) + 'r20: "a"\n'


@pytest.fixture(scope="module")
def grammars():
    return Grammars(tokenizer(), [END])


@pytest.mark.parametrize("vocab_size", [270, 288])  # of words that are full, and are not
def test_without_an_end_token_no_other_ends_a_text(vocab_size):
    backend = tokenizers.Tokenizer.from_str(json.dumps(tokenizer().to_json()))
    grammars = Grammars(Tokenizer(backend, vocab_size, {}, None), [])
    state = grammars.start(grammar.of_regex("a+"), b"aaa")
    (word,) = np.flatnonzero(words := state.mask())
    assert (word, words[word], len(words)) == (3, 1 << 1, 9) and not state.is_complete
    state.accept(0)  # which stood for the end
    assert state.has_failed
    state = grammars.start(grammar.of_regex("ab"), b"a")
    state.accept(98)
    assert state.is_complete and not state.has_failed and not state.mask().any()


def permitted(state) -> list[int]:
    words = state.mask()
    assert words.dtype == "uint32" and len(words) == -(-VOCAB // 32)
    return [v for v in range(VOCAB) if words[v // 32] >> (v % 32) & 1]


def follow(state, text: str) -> None:
    for token in text.encode():
        assert token in permitted(state), (text, chr(token))
        state.accept(token)
    assert not state.has_failed


@pytest.mark.parametrize("source, whole, wrong", [
    (grammar.of_json_schema(PERSON), '{"name": "x", "age": 12, "kind": "ü"}', '{"age"'),
    (grammar.of_json_schema(PERSON), '{"name":"\\n\\u001f","age":1}', '{"name":"x"}'),
    (grammar.of_json_schema({"type": "object"}), '{"a": [1, {"b": null}], "c": -1.5e3}', "[1]"),
    (grammar.of_regex(r"[0-9]{2}x?"), "12", "1x"),
    (grammar.of_choices(["yes", 'no "\\ \n é']), 'no "\\ \n é', "maybe"),
    (grammar.of_lark('start: item ("," item)*\nitem: /[a-z]+/ | "é"'), "ab,é,c", ","),
    (grammar.of_gbnf('root ::= item ("," item)*\nitem ::= [a-z]+ | "é"'), "ab,é,c", ","),
    (grammar.of_lark('%import common.INT\nstart: INT %json {"type": "null"}'), "12null", "x"),
])  # fmt: skip
def test_what_is_permitted_and_nothing_else(grammars, source, whole, wrong):
    state = grammars.start(source)
    follow(state, whole)
    assert END in permitted(state)
    state.accept(END)
    assert state.is_complete and not state.has_failed
    state, tokens = grammars.start(source), list(wrong.encode())
    at = next(i for i, token in enumerate(tokens) if token not in permitted(state)
              or state.accept(token))  # fmt: skip
    assert END not in permitted(state)
    state.accept(tokens[at])
    assert state.has_failed and not permitted(state)
    assert all(token < 256 or token == END for token in permitted(grammars.start(source)))


def test_texts_of_one_grammar_are_independent(grammars):
    source = grammar.of_choices(["ab", "cd"])
    one, other = grammars.start(source), grammars.start(source)
    one.accept(ord("a"))
    assert permitted(one) == [ord("b")] and permitted(other) == [ord("a"), ord("c")]
    assert permitted(grammars.start(source, b"c")) == [ord("d")]
    for known in (b"x", b"ab"):
        with pytest.raises(InputError, match="permits nothing after"):
            grammars.start(source, known)


def test_any_walk_ends_in_json_of_the_schema(grammars):
    dice = random.Random(0)
    source = grammar.of_json_schema(PERSON)
    for _ in range(20):
        state, tokens = grammars.start(source), []
        while not state.is_complete and len(tokens) < 4000:
            choices = permitted(state)
            end = [id for id in (END, *b'"}:,') if id in choices]
            token = dice.choice(end if end and dice.random() < 0.5 else choices)
            state.accept(token)
            tokens.append(token)
        found = json.loads(tokenizer().decode(tokens))
        assert isinstance(found["name"], str) and found["age"] >= 0
        assert found.keys() <= PERSON["properties"].keys()


@pytest.mark.parametrize("write, given, problem", [
    (grammar.of_json_schema, {"type": "stsring"}, "stsring"),
    (grammar.of_json_schema, {"$ref": "#/missing"}, "does not exist"),
    (grammar.of_json_schema, {"$ref": "http://localhost/x"}, "is not fetched"),
    (grammar.of_json_schema, {"minLength": "x"}, "minLength"),
    (grammar.of_json_schema, NESTED, "nested too deeply"),
    (grammar.of_json_schema, {"enum": ["x" * grammar.MAX_CHARS]}, "at most 65536 characters"),
    (grammar.of_regex, r"\d\.((", r"invalid regular expression \\d\\.\(\(: unclosed group$"),
    (grammar.of_regex, "(?<=a)b", r"expression \(\?<=a\)b: look-around, .* is not supported$"),
    (grammar.of_regex, r"[^\s\S]", "permits no text"), (grammar.of_regex, "\ud800", "surrogate"),
    (grammar.of_lark, 'start: a\na: a "x"', "permits no text"),
    (grammar.of_lark, 'start: "a" B\nB: /a/ & /b/', "permits no text"),
    (grammar.of_regex, "a{70000}", "costs more than it may: [^\n]*too many"),
    (grammar.of_lark, DOUBLING, "costs more than it may: [^\n]*Too many"),
    (grammar.of_lark, DOUBLING.upper().replace("START", "start"), "costs more than it may"),
    (grammar.of_gbnf, DOUBLING.replace(":", " ::=").replace("start", "root"), "costs more"),
    (grammar.of_regex, "a" * (grammar.MAX_CHARS + 1), "at most 65536 characters"),
    (grammar.of_choices, [], "at least one character"),
    (grammar.of_lark, "start: nothing", "unknown name"), (grammar.of_lark, "", "Empty grammar"),
    (grammar.of_lark, 'a: "b"', "no start rule"), (grammar.of_gbnf, "root ::= (", "cannot be read"),
    (grammar.of_gbnf, "root ::= a", "Rule 'a' not found"), 
    (grammar.of_gbnf, 'root ::= "\\', "out of range"),
    (grammar.of_gbnf, "root ::= " + "(" * 5000, "nested too deeply"),
    (grammar.of_lark, "start: " + "(" * 5000, "too deeply nested"),
    (grammar.of_lark, "x" * (grammar.MAX_CHARS + 1), "at most 65536 characters"),
    (grammar.of_lark, CHAIN, "at most 512 rules, not 3001"),
    (grammar.of_lark, CHAIN.replace("a", "A"), "at most 512 rules, not 3001"),
    (grammar.of_lark, CHAIN.replace(":", "[lazy]:"), "at most 512 rules, not 3001"),
    (grammar.of_lark, CHAIN.replace(":", ".1:"), "at most 512 rules, not 3001"),
    (grammar.without, [], "at least one character"), (grammar.without, ["a", ""], "at least one"),
    (grammar.without, ["a" * 70_000], "at most 65536 characters"),
    (grammar.of_choices, ["a", ""], "at least one character"),
])  # fmt: skip
def test_what_cannot_be_compiled_says_why(grammars, write, given, problem):
    with pytest.raises(InputError, match=problem):
        grammars.start(write(given))


@pytest.mark.parametrize("pattern", ["a{1,1000}{1,1000}{1,1000}", "(a|b)*a(a|b){60}"])
def test_costly_grammars_end_or_fail(grammars, pattern):
    state = grammars.start(grammar.of_regex(pattern))
    for _ in range(200):
        if state.has_failed or ord("a") not in permitted(state):
            break
        state.accept(ord("a"))


def test_as_many_are_kept_as_there_is_room_for():
    """Long ones need more of it."""
    short = [grammar.of_regex(f"a{{{n}}}") for n in range(10, 20)]
    room = 3 * grammar._num_bytes(short[0])
    own = Grammars(tokenizer(), [END], room)
    for _ in range(2):
        for text in short:
            own.start(text)
    assert list(own._cached) == short[-3:] and own._kept_bytes == room
    own.start(short[-3])
    long = grammar.of_choices(["b" * 300])
    own.start(long)
    assert list(own._cached) == [short[-3], long]
    assert own._kept_bytes == sum(map(grammar._num_bytes, own._cached)) <= room


@pytest.mark.parametrize("num", [1, 5000])
def test_choices_may_be_many(grammars, num):
    """And one may be another's beginning."""
    choices = [f"c{n}" for n in range(num)]
    state = grammars.start(grammar.of_choices(choices))
    follow(state, choices[-1])
    assert END in permitted(state)
    both = grammars.start(grammar.of_choices(["a", "ab"]))
    follow(both, "a")
    assert permitted(both) == [ord("b"), END]


@pytest.mark.parametrize("word", [
    "bad", "a.b", 'x"y', "a/b", "a\nb", "[^a]", "a\\b", "{2}", "(?i)q", "#c", "\x00z", "it's",
    "<|end|>", "a-b&~c", "$^", "ö",
])  # fmt: skip
def test_texts_without_a_word(grammars, word):
    for before in ("", "Grüße, 世界! 🙂 ", word[:-1] + " "):
        state, (*start, last) = grammars.start(grammar.without(["other", word])), word.encode()
        for token in [*before.encode(), *start]:
            assert token in permitted(state)
            state.accept(token)
        assert last not in permitted(state) and not state.has_failed
    state = grammars.start(grammar.without([word]))
    follow(state, "Any other text.\n\nAt all, 世界! ~&^$ (x) [y] {z}\t")
    assert END in permitted(state) and len(permitted(state)) > 100


def test_a_word_is_banned_however_tokens_divide_it():
    """Also where one token ends it and says more."""
    own = test_quoting.tiny()
    state = Grammars(own, [own.eos_id]).start(grammar.without(["the"]))
    for start in ("", "t", "th", "oh, t"):
        for token in own.encode(start, add_special=False):
            state.accept(token)
        words = state.mask()
        for token in range(own.vocab_size):
            data = own.token_bytes(token)
            if data.isascii() and data:
                is_permitted = bool(words[token // 32] >> (token % 32) & 1)
                assert is_permitted == (b"the" not in start.encode() + data), (start, data)
        state = Grammars(own, [own.eos_id]).start(grammar.without(["the"]))


@pytest.mark.parametrize("unit", ["a[", "a{", "a ", "a\n", "a.", "a-", ":", "(", '"'])
def test_no_long_text_takes_long_to_look_at(unit):
    """It is looked at beside streams."""

    def seconds():
        since = time.process_time()
        for write in (grammar.is_gbnf, grammar.of_lark):
            with contextlib.suppress(InputError):
                write(unit * (grammar.MAX_CHARS // len(unit)))
        return time.process_time() - since

    assert min(seconds() for _ in range(3)) < 0.2


@pytest.mark.parametrize("text, is_one", [
    ('root ::= "a"', True), ('  a-b ::=\n"x"', True), ("", False), ('start: "::="', False),
    ("x" * 60_000, False), ("\n" * 60_000 + "a ::= b", True),
    (" " * 60_000, False),
])  # fmt: skip
def test_which_of_two_languages_a_grammar_is_in(text, is_one):
    assert grammar.is_gbnf(text) == is_one
