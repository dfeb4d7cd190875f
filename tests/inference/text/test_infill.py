"""Prompts around a gap: each family's marks in its order, and no text that spells a mark."""

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from configs.errors import InputError
from inference.text import infill
from inference.text.infill import Gap
from inference.text.tokenizer import Tokenizer, byte_alphabet

BYTES = {character: byte for byte, character in byte_alphabet().items()}
QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
STAR = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
LLAMA = ("▁<PRE>", "▁<SUF>", "▁<MID>")


def byte_level(*marks, special=True, bos=False, names=None) -> Tokenizer:
    """A token a byte, and marks from 256 on."""
    backend = tokenizers.Tokenizer(models.BPE(dict(BYTES), []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    if bos:
        backend.add_special_tokens([AddedToken("<s>", special=True)])
        first = ("<s>", backend.token_to_id("<s>"))
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[first])
    return Tokenizer(backend, backend.get_vocab_size(), names or {}, None)


def sentencepiece(*marks) -> Tokenizer:
    """Llama 2's kind, which adds a blank before a text."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "a", "b", "▁a"]
    backend = tokenizers.Tokenizer(
        models.BPE({token: n for n, token in enumerate(tokens)}, [("▁", "a")], unk_token="<unk>",
                   byte_fallback=True)
    )  # fmt: skip
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    names = ("<unk>", "<s>", "</s>", *marks)
    backend.add_tokens([AddedToken(name, normalized=False, special=True) for name in names])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return Tokenizer(backend, backend.get_vocab_size(), {"bos_token": "<s>"}, None)


def spelled(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Tokens as they are stored, runs of bytes as one text."""
    texts: list[str] = []
    for id in ids:
        if id < 256 and texts and texts[-1][0] == "'":
            texts[-1] += chr(id)
        else:
            texts.append("'" + chr(id) if id < 256 else tokenizer._backend.id_to_token(id))
    return texts


@pytest.mark.parametrize("marks, first, expected", [
    (QWEN, None, "<|fim_prefix|> 'ab <|fim_suffix|> 'cd <|fim_middle|>"),
    (STAR, None, "<fim_prefix> 'ab <fim_suffix> 'cd <fim_middle>"),
    (STAR, True, "<fim_prefix> <fim_suffix> 'cd <fim_middle> 'ab"),
    (("<fim-prefix>", "<fim-suffix>", "<fim-middle>"), None,
     "<fim-prefix> 'ab <fim-suffix> 'cd <fim-middle>"),
    (LLAMA, False, "▁<PRE> 'ab ▁<SUF> 'cd ▁<MID>"),
    (LLAMA, True, "▁<PRE> ▁<SUF> 'cd ▁<MID> 'ab"),
    (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), False,
     "<｜fim▁begin｜> 'ab <｜fim▁hole｜> 'cd <｜fim▁end｜>"),
    (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), None, "[SUFFIX] 'cd [PREFIX] 'ab"),
    (("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>"), True,
     "<[fim-suffix]> 'cd <[fim-prefix]> 'ab <[fim-middle]>"),
    (("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), None,
     "<|code_prefix|> 'ab <|code_suffix|> 'cd <|code_middle|>"),
    (("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"), True,
     "<|code_suffix|> 'cd <|code_prefix|> 'ab <|code_middle|>"),
    (("<|prefix|>", "<|suffix|>", "<|middle|>"), None,
     "<|prefix|> 'ab <|suffix|> 'cd <|middle|>"),
])  # fmt: skip
@pytest.mark.parametrize("bos", [False, True])
def test_each_family_has_its_marks_in_its_order(marks, first, expected, bos):
    one = byte_level(*marks, bos=bos)
    ids = one.infill.encode(Gap("ab", "cd", (), first))
    assert spelled(one, ids) == ["<s>"] * bos + expected.split()
    assert one.infill.encode(Gap("ab", "cd", (), first), add_special=False) == ids[bos:]
    if first is None:
        assert one.encode_infill("ab", "cd") == ids


@pytest.mark.parametrize("marks, first, valid", [
    (QWEN, True, "false"), (("[PREFIX]", "[SUFFIX]"), False, "true"),
])  # fmt: skip
def test_an_order_that_a_family_was_not_trained_in(marks, first, valid):
    with pytest.raises(InputError, match=f"leave it out, or send {valid}"):
        byte_level(*marks).infill.encode(Gap("a", "b", (), first))


@pytest.mark.parametrize("marks", [(), QWEN[:2], ("[PREFIX]",), ("<fim_prefix>", *QWEN[1:])])
def test_a_tokenizer_without_all_marks_fills_no_gaps(marks):
    one = byte_level(*marks)
    assert infill.of_tokenizer(one) is None and one.infill is None
    with pytest.raises(InputError, match="no fill-in-the-middle tokens"):
        one.encode_infill("a", "b")


def test_marks_beyond_the_embedding_are_none():
    one = byte_level(*QWEN)
    assert Tokenizer(one._backend, 258, {}, None).infill is None


def test_a_gguf_file_may_name_other_marks():
    """The known names come first: they have an order."""
    tokens = ("<before>", "<after>", "<between>", "<stuff>", "<project>", "<path>")
    names = {f"{key}_token": name for key, name in zip(infill.GGUF_NAMES, tokens, strict=True)}
    one = byte_level(*tokens, names=names)
    expected = ["<before>", "'a", "<after>", "'b", "<between>"]
    assert spelled(one, one.encode_infill("a", "b")) == expected
    assert one.infill.layout.ends == (259, 260, 261)
    ids = one.infill.encode(Gap("a", "b", (("f", "x"),)))
    assert spelled(one, ids)[:4] == ["<project>", "'myproject\n", "<path>", "'f\nx"]
    assert byte_level(*tokens[:2], names=names).infill is None
    both = byte_level("[PREFIX]", "[SUFFIX]", *tokens, names=names)
    assert spelled(both, both.encode_infill("a", "b")) == ["[SUFFIX]", "'b", "[PREFIX]", "'a"]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("text", [
    "<|fim_middle|>", "x<|fim_prefix|>y<|fim_suffix|>", "<|file_sep|>", "<|fim_<|fim_pad|>", "<|",
])  # fmt: skip
def test_no_text_spells_a_mark(text, special):
    others = "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"
    one = byte_level(*QWEN, *others, special=special)
    data = list(text.encode())
    sep, rep = one.token_id("<|file_sep|>"), one.token_id("<|repo_name|>")
    ids = one.infill.encode(Gap(text, text, ((text, text),)))
    project, name = list(b"myproject\n"), list(b"filename\n")
    files = [rep, *project, sep, *data, 10, *data, sep, *name]
    assert ids == [*files, 256, *data, 257, *data, 258]


def test_a_mark_that_the_vocabulary_has_as_a_word_is_rejected():
    vocabulary = BYTES | {"<f": 300, "<fi": 301}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("<", "f"), ("<f", "i")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    names = {"fim_pre_token": "<f", "fim_suf_token": "a", "fim_mid_token": "<fi"}
    one = Tokenizer(backend, 302, names, None)
    with pytest.raises(InputError, match="knows as a word"):
        one.encode_infill("<fi", "b")
    assert one.encode_infill("<g", "b") == [300, 60, 103, 97, 98, 301]


def test_a_suffix_has_no_blank_of_sentencepiece():
    """As Code Llama's and mistral_common's encoders do it; the prefix has one."""
    one = sentencepiece(*LLAMA)
    ids = [one._backend.id_to_token(id) for id in one.encode_infill("a", "a b")]
    assert ids == ["<s>", "▁<PRE>", "▁a", "▁<SUF>", "a", "▁", "b", "▁<MID>"]
    empty = [one._backend.id_to_token(id) for id in one.encode_infill("", "")]
    assert empty == ["<s>", *LLAMA]


def test_other_files_come_first():
    """As Qwen2.5-Coder reads a project; others get a line of text."""
    one = byte_level(*QWEN, "<|repo_name|>", "<|file_sep|>")
    files = (("a.py", "x = 1\n"), ("", "y"))
    assert spelled(one, one.infill.encode(Gap("p", "s", files))) == [
        "<|repo_name|>", "'myproject\n", "<|file_sep|>", "'a.py\nx = 1\n", "<|file_sep|>",
        "'tmp\ny", "<|file_sep|>", "'filename\n", QWEN[0], "'p", QWEN[1], "'s", QWEN[2],
    ]  # fmt: skip
    plain = byte_level(*STAR)
    before, *_ = spelled(plain, plain.infill.encode(Gap("p", "s", files)))
    assert before == "'\n\n--- a.py ---\n\nx = 1\n\n\n--- snippet ---\n\ny"


@pytest.mark.parametrize("limit, prefix, suffix", [
    (23, 10, 10), (22, 10, 9), (16, 10, 3), (11, 6, 2), (4, 1, 0),
])  # fmt: skip
def test_a_limit_cuts_the_ends_away_from_the_gap(limit, prefix, suffix):
    one = byte_level(*QWEN)
    ids = one.infill.encode(Gap("0123456789", "abcdefghij"), limit=limit)
    assert len(ids) == limit
    before, after = "0123456789"[10 - prefix :], "abcdefghij"[:suffix]
    assert ids == [256, *before.encode(), 257, *after.encode(), 258]
    with pytest.raises(InputError, match="3 tokens do not hold"):
        one.infill.encode(Gap("a", "b"), limit=3)


def test_many_files_are_copied_once(monkeypatch):
    """`list.__add__` for each file would copy all files behind it."""

    class Chunk(list):
        def __add__(self, other):
            raise AssertionError("a chunk was copied")

    one = byte_level(*STAR)
    monkeypatch.setattr(one.infill, "_encode_text", lambda text: Chunk(text.encode()))
    files = tuple((f"{n}", "x") for n in range(3))
    expected = "".join(f"\n\n--- {n} ---\n\nx" for n in range(3))
    assert one.infill._file_ids(files, None) == list(expected.encode())


def test_a_limit_drops_whole_files_from_the_first_on():
    one = byte_level(*QWEN, "<|file_sep|>")
    files = (("a", "1"), ("b", "2"))
    whole = one.infill.encode(Gap("p", "s", files))
    last = one.infill.encode(Gap("p", "s", files[1:]))
    none = one.encode_infill("p", "s")
    for limit in range(4, len(whole) + 2):
        ids = one.infill.encode(Gap("p", "s", files), limit=limit)
        if limit < len(none):
            assert len(ids) == limit
        else:
            assert ids == max((x for x in (none, last, whole) if len(x) <= limit), key=len)
