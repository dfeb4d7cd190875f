"""Streaming text equals decoding at once, however the tokens arrive."""

import itertools
import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from inference.text.detokenizer import Detokenizer
from inference.text.tokenizer import Tokenizer, byte_alphabet

WORDS = ["hello", " world", "é", "日本", "😀", "\n", "stop", "st"]


def byte_level() -> Tokenizer:
    alphabet = byte_alphabet()
    spelled = ["".join(alphabet[byte] for byte in word.encode()) for word in WORDS]
    tokens = list(dict.fromkeys([*alphabet.values(), *spelled]))
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend, backend.get_vocab_size(), {"eos_token": "<|end|>"}, None)


def sentencepiece(strips: bool) -> Tokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [word.replace(" ", "▁") for word in WORDS] + ["▁", "▁▁"]
    backend = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strips)
    backend.add_special_tokens(["</s>"])  # skipped, it ends no run of bytes
    return Tokenizer(backend, len(tokens) + 1, {"eos_token": "</s>"}, None)


TOKENIZERS = {
    "byte-level": byte_level(),
    "sentencepiece": sentencepiece(False),
    "sentencepiece with a dummy prefix": sentencepiece(True),
}
LIBRARY = {
    name: tokenizers.Tokenizer.from_str(json.dumps(ours.to_json()))
    for name, ours in TOKENIZERS.items()
}


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.data())
def test_deltas_join_to_the_decoded_text(name, data):
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    detokenizer = Detokenizer(tokenizer)
    deltas = []
    while len(ids) > detokenizer.num_tokens:
        size = data.draw(st.integers(1, 3))
        start = detokenizer.num_tokens
        deltas.append(detokenizer.push(ids[start : start + size]))
    assert "".join(deltas) + detokenizer.flush() == streamed(tokenizer, ids)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    """What a stream can tell: of a run of byte tokens first what is UTF-8 from its beginning on."""
    if not tokenizer.byte_ids:
        return tokenizer.decode(ids)
    text, ids = "", [token for token in ids if tokenizer.token_bytes(token)]
    for _, run in itertools.groupby(ids, tokenizer.byte_ids.__contains__):
        data = b"".join(map(tokenizer.token_bytes, run))
        try:
            text += data.decode()
        except UnicodeDecodeError as error:
            text += data[: error.start].decode() + "\ufffd" * (len(data) - error.start)
    return text.removeprefix(" ") if tokenizer.strips_first_space else text


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.data())
def test_decoded_as_the_library_does(name, data):
    ours, library = TOKENIZERS[name], LIBRARY[name]
    lookup = {ours.token_bytes(i): i for i in reversed(range(ours.vocab_size))}
    spelled = st.text(max_size=2).map(lambda text: [lookup[bytes([b])] for b in text.encode()])
    one = st.integers(0, ours.vocab_size - 1).map(lambda token: [token])
    ids = sum(data.draw(st.lists(one | spelled | st.just([ours.eos_id]), max_size=8)), [])
    assert ours.decode(ids) == library.decode(ids)
    assert ours.decode(ids, False) == library.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("data, whole, told", [
    (b"\xe0d", "\ufffd" * 2, "\ufffd" * 2), (b"\xe2\x82", "\ufffd" * 2, "\ufffd" * 2),
    (b"d\xe0d", "\ufffd" * 3, "d\ufffd\ufffd"), ("日d".encode(), "日d", "日d"),
])  # fmt: skip
def test_bytes_that_are_no_text_are_replaced_one_by_one(data, whole, told):
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [1 + byte for byte in data]
    detokenizer = Detokenizer(tokenizer)
    assert tokenizer.decode([*ids, 257, *ids]) == f"{whole}hello{whole}"
    assert detokenizer.push([*ids, 257, *ids]) + detokenizer.flush() == f"{told}hello{told}"


@pytest.mark.parametrize("name", TOKENIZERS)
@given(st.text())
def test_no_character_is_split(name, text):
    tokenizer = TOKENIZERS[name]
    lookup = {tokenizer.token_bytes(i): i for i in reversed(range(tokenizer.vocab_size))}
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.push([lookup[bytes([byte])]]) for byte in text.encode()]
    expected = text.removeprefix(" ") if tokenizer.strips_first_space else text
    assert "".join(deltas) == expected and detokenizer.flush() == ""


@given(st.data())
def test_stop_strings_end_the_text_before_them(data):
    tokenizer = TOKENIZERS["byte-level"]
    text = data.draw(st.text("abc é", max_size=30))
    stop = data.draw(st.lists(st.text("abc é", min_size=1, max_size=4), min_size=1, max_size=3))
    ids = [token for byte in text.encode() for token in _ids_of(tokenizer, bytes([byte]))]
    detokenizer = Detokenizer(tokenizer, stop)
    emitted = ""
    for token in ids:
        emitted += detokenizer.push([token])
        if detokenizer.stopped is None:
            seen = tokenizer.decode(ids[: detokenizer.num_tokens]).rstrip("\ufffd")
            assert len(seen) - len(emitted) <= max(map(len, stop)) - 1
    emitted += detokenizer.flush()
    ends = [text.find(s) for s in stop if s in text]
    if not ends:
        assert emitted == text and detokenizer.stopped is None
    else:
        assert detokenizer.stopped in stop
        assert text.startswith(emitted + detokenizer.stopped)
        assert all(s not in emitted for s in stop)


def _ids_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    return [next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == data)]


def test_tokens_after_the_stop_are_not_taken():
    tokenizer = TOKENIZERS["byte-level"]
    ids = [token for byte in b"ab--c--d" for token in _ids_of(tokenizer, bytes([byte]))]
    detokenizer = Detokenizer(tokenizer, ["--"])
    assert detokenizer.push(ids) == "ab"
    assert (detokenizer.stopped, detokenizer.num_tokens) == ("--", 4)
    assert detokenizer.push(ids) == "" and detokenizer.flush() == ""


def test_a_stop_string_is_ignored_in_the_first_tokens():
    tokenizer = TOKENIZERS["byte-level"]
    ids = [token for byte in b"a--b--c" for token in _ids_of(tokenizer, bytes([byte]))]
    assert Detokenizer(tokenizer, ["--"], min_tokens=1).push(ids) == "a"
    assert Detokenizer(tokenizer, ["--"], min_tokens=2).push(ids) == "a--b"  # begun too early


def test_a_character_cut_off_at_the_end_is_replaced_once():
    tokenizer = TOKENIZERS["byte-level"]
    ids = [token for byte in "😀".encode()[:3] for token in _ids_of(tokenizer, bytes([byte]))]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) == ""
    assert detokenizer.flush() == tokenizer.decode(ids) == "\ufffd"


def test_special_tokens_are_decoded_only_when_asked():
    tokenizer = TOKENIZERS["byte-level"]
    ids = [tokenizer.eos_id]
    assert Detokenizer(tokenizer).push(ids) == tokenizer.decode(ids) == ""
    assert tokenizer.decode(ids, skip_special=False) == "<|end|>"


def test_of_two_stop_strings_at_one_place_the_longer_is_reported():
    """Whichever is named first, where one token completes both."""
    tokenizer = TOKENIZERS["byte-level"]
    ids = [id for id in range(tokenizer.vocab_size) if tokenizer.token_bytes(id) == b"stop"]
    for stop in (("st", "sto"), ("sto", "st"), ("op", "sto", "st")):
        detokenizer = Detokenizer(tokenizer, stop)
        assert detokenizer.push(ids) == "" and detokenizer.stopped == "sto"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_special_tokens_that_are_shown(name):
    tokenizer = TOKENIZERS[name]
    (word, id), *_ = tokenizer.specials_in(["a <|end|>", "</s>"]).items()
    assert tokenizer.specials_in(["<|end", "s>"]) == {}
    hello = tokenizer.encode("hello", add_special=False)
    for shown, text in (((), "hellohello"), ((id,), f"hello{word}hello")):
        detokenizer = Detokenizer(tokenizer, shown_ids=shown)
        assert detokenizer.push([*hello, id, *hello]) + detokenizer.flush() == text
