"""Random Unicode through every kind of tokenizer, beside what `tokenizers` makes of it itself."""

import json
import random
from pathlib import Path

import gguf
import pytest
import tokenizers
from tokenizers import pre_tokenizers

from inference.checkpoints.gguf import gguf_file, gguf_tokenizer
from inference.text.detokenizer import Detokenizer
from inference.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[2] / "golden"
BYTE_LEVEL = GOLDEN / "llama-tokenizer" / "tokenizer.json"
SENTENCEPIECE = GOLDEN / "sentencepiece-tokenizer" / "tokenizer.json"
COUNT = 10_000
WORDS = (
    *(
        "The",
        " ridge",
        "waits ",
        "bytes",
        "größer",
        "日本語",
        "한국어",
        " façade",
        "return",
        "1234",
    ),
    *("  ", "    ", "\n\n", "\r\n\t", "\u2028", "\x00", "\x1f", "\u00a0", "\u200b", "\ufeff"),
    *(
        "e\u0301",
        "👨‍👩‍👧",
        "🏳️‍🌈",
        "ﷺ",
        "\ufffd",
        "▁",
        "▁▁",
        "Ġ",
        "<0x41>",
        "'s",
        "'LL",
        "½",
        "Ⅷ",
        "٣",
    ),
)
RANGES = (
    (0, 0x7F),
    (0, 0x7F),
    (0x80, 0x7FF),
    (0x800, 0xD7FF),
    (0xE000, 0xFFFF),
    (0x10000, 0x10FFFF),
)


def random_texts(special: list[str]) -> list[str]:
    rng = random.Random(0)

    def piece() -> str:
        if rng.random() < 0.5:
            return rng.choice(WORDS)
        if special and rng.random() < 0.03:
            return rng.choice(special)
        return chr(rng.randint(*rng.choice(RANGES)))

    return ["".join(piece() for _ in range(rng.randrange(12))) for _ in range(COUNT)]


def as_gguf(path: Path, source: Path, model: str, pre: str | None) -> Tokenizer:
    """A tokenizer.json in the words of GGUF metadata, and rebuilt from them."""
    read = json.loads(source.read_text(encoding="utf-8"))
    added = {token["content"]: 4 - token["special"] for token in read["added_tokens"]}
    tokens = sorted(read["model"]["vocab"], key=read["model"]["vocab"].get)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    kinds = [added.get(t, 6 if t.startswith("<0x") else 1) for t in tokens]
    writer.add_token_types(kinds)
    if pre is None:
        writer.add_token_scores([-float(index) for index in range(len(tokens))])
        writer.add_unk_token_id(0)
    else:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(merge) for merge in read["model"]["merges"]])
        writer.add_add_bos_token(True)
    writer.add_bos_token_id(tokens.index("<s>" if pre is None else "<|begin|>"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf_tokenizer.load_tokenizer(gguf_file.open_gguf(path), len(tokens))


def from_json(backend: tokenizers.Tokenizer) -> Tokenizer:
    again = tokenizers.Tokenizer.from_str(backend.to_str())
    return Tokenizer(again, again.get_vocab_size(), {}, None)


def metaspace() -> tokenizers.Tokenizer:
    """As transformers writes SentencePiece tokenizers today."""
    backend = tokenizers.Tokenizer.from_file(str(SENTENCEPIECE))
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizers.Tokenizer.from_str(backend.to_str())


@pytest.fixture(params=["byte-level, tokenizer.json", "byte-level, GGUF",
                        "byte-level, smollm, GGUF",
                        "SentencePiece, tokenizer.json", "SentencePiece, tokenizer.json, Metaspace",
                        "SentencePiece, GGUF"])  # fmt: skip
def pair(request, tmp_path, monkeypatch):
    """Ours, and the reference that `tokenizers` reads by itself."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    byte_level = request.param.startswith("byte-level")
    reference = tokenizers.Tokenizer.from_file(str(BYTE_LEVEL if byte_level else SENTENCEPIECE))
    if request.param.endswith("Metaspace"):
        reference = metaspace()
    if not request.param.endswith("GGUF"):
        return from_json(reference), reference
    if "smollm" in request.param:  # as its published tokenizer.json has it
        reference.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True),
             pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )  # fmt: skip
        return as_gguf(tmp_path / "c.gguf", BYTE_LEVEL, "gpt2", "smollm"), reference
    if byte_level:
        return as_gguf(tmp_path / "a.gguf", BYTE_LEVEL, "gpt2", "gpt-2"), reference
    return as_gguf(tmp_path / "b.gguf", SENTENCEPIECE, "llama", None), reference


def test_round_trips(pair):
    ours, reference = pair
    special = [token.content for token in reference.get_added_tokens_decoder().values()]
    texts = random_texts(special)
    rng = random.Random(1)
    whole = 0
    for text, encoding in zip(texts, reference.encode_batch(texts), strict=True):
        ids = ours.encode(text)
        assert ids == encoding.ids, repr(text)
        decoded = ours.decode(ids)
        assert decoded == reference.decode(ids), repr(text)
        assert ours.decode(ids, skip_special=False) == reference.decode(
            ids, skip_special_tokens=False
        ), repr(text)
        detokenizer, shown, start = Detokenizer(ours), "", 0
        while start < len(ids):
            size = rng.randrange(1, 4)
            shown += detokenizer.push(ids[start : start + size])
            start += size
        assert shown + detokenizer.flush() == decoded, repr(text)
        whole += decoded == text
    # Not those with special tokens, or with characters that SentencePiece spells a space with.
    assert whole > COUNT / 2


def test_without_what_stands_around_a_text(pair):
    ours, reference = pair
    texts = random_texts([])[:1000]
    for text, encoding in zip(
        texts, reference.encode_batch(texts, add_special_tokens=False), strict=True
    ):
        assert ours.encode(text, add_special=False) == encoding.ids
