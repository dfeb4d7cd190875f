"""Cutting text by the names of llama.cpp, beside what the models' own tokenizer.json say."""

import json

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from inference.checkpoints.gguf import gguf_tokenizer
from inference.checkpoints.gguf.pretokenizers import SPLITS
from tests.inference.text.test_round_trips import BYTE_LEVEL, as_gguf, random_texts
from tests.inference.text.test_tokenizer import gguf_header

CASES = "HelloWorld XMLHttpRequest O'NEIL's I'LL ǅabc ÉCOLE école aB/c//\n\n 12345 x1234 -->\r\n é"
TEXTS = [CASES, *(f"{text} {CASES[i % 40 :]}" for i, text in enumerate(random_texts([])[:1500]))]
ASCII = [text.encode("ascii", "ignore").decode() for text in TEXTS]

# The regular expressions of the published files, as llama.cpp's llama-vocab.cpp quotes them.
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLISHED = {
    "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2, "llama-bpe": LLAMA3, "llama3": LLAMA3,
    "llama-v3": LLAMA3, "falcon3": LLAMA3, "dbrx": LLAMA3, "smaug-bpe": LLAMA3, "tekken": TEKKEN,
    "gpt-4o": GPT4O, "llama4": GPT4O, "kanana2": GPT4O, "minimax-m2": GPT4O, "qwen35": QWEN35,
    "lfm2": LLAMA3, "pixtral": LLAMA3, "midm-2.0": LLAMA3, "falcon-h1": LLAMA3, "glm4": LLAMA3,
    "chatglm-bpe": LLAMA3, "stablelm2": QWEN2, "hunyuan": QWEN2, "solar-open": QWEN2,
}  # fmt: skip
# And as it approximates them, which is the same for text without accents.
CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
UPPER, LOWER = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
APPROXIMATED = {
    name: f"{BEFORE}{UPPER}*{LOWER}+{suffix}|{BEFORE}{UPPER}+{LOWER}*{suffix}|{digits}{REST}"
    for name, suffix, digits in (
        ("tekken", "", r"\p{N}"), ("gpt-4o", f"{CONTRACTIONS}?", r"\p{N}{1,3}"),
    )
}  # fmt: skip
GPT2 = {
    *("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "exaone4", "granite-docling", "mellum"),
    "gigachat",
}
DIGITS_FIRST = {
    *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
}
# Whose patterns stand in no other form here; how they cut is written down below.
BY_HAND = {
    "deepseek-v3": (
        "Hello, World's 12345 日本語です <b>x</b>\n\n ok",
        "Hello|,| World|'s| |123|45| |日本語です| <|b|>x|</|b|>\n\n| ok",
    ),
    "deepseek-llm": (
        "Hello, World's 12345 日本語 ok \n a",
        "Hello|,| World|'|s| |12345| |日本語| ok| |\n| a",
    ),
    "deepseek-coder": (
        "Hello, World's 123 日本語 x_y",
        "Hello|,| World|'|s| |1|2|3| |日本語| x|_|y",
    ),
    "kimi-k2": (
        "HelloWorld's 12345日本語です XMLHttp!\n\n ok",
        "Hello|World's| |123|45|日本語|です| XMLHttp|!\n\n| ok",
    ),
    "bailingmoe": ("It's 123 GO'LL \n\n x", "It|'s| |1|2|3| GO|'LL| \n\n| x"),
    "seed-coder": ("It's 123 !!\n x", "It|'s| |1|2|3| !!|\n| x"),
    "falcon": ("It's 12345 a`b ++c", "It|'|s| |123|45| a|`|b| |++|c"),
}
BY_HAND |= {name: BY_HAND["deepseek-v3"] for name in ("hunyuan-dense", "joyai-llm")}
BY_HAND |= {"bailingmoe2": BY_HAND["bailingmoe"]}


def cuts(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"),
         pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )  # fmt: skip


def reference(name: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in GPT2:
        return byte_level
    if name in DIGITS_FIRST:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    return cuts(PUBLISHED[name])


@pytest.mark.parametrize("name", sorted(SPLITS.keys() - {"default"} - BY_HAND.keys()))
def test_text_is_cut_as_published(name, tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    backend = as_gguf(tmp_path / "a.gguf", BYTE_LEVEL, "gpt2", name)._backend
    expected = reference(name)
    for text in TEXTS:
        found = backend.pre_tokenizer.pre_tokenize_str(text)
        assert found == expected.pre_tokenize_str(text), repr(text)
    assert (backend.normalizer is not None) == (name in ("qwen2", "qwen35"))


@pytest.mark.parametrize("name", BY_HAND)
def test_text_is_cut_as_written_down(name, tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    backend = as_gguf(tmp_path / "a.gguf", BYTE_LEVEL, "gpt2", name)._backend
    text, expected = BY_HAND[name]
    cuts = [text[start:stop] for _, (start, stop) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert "|".join(cuts) == expected


def test_gemma_4_merges_characters_as_its_tokenizer_does(tmp_path, monkeypatch):
    """Its merges are in the file; spaces are "▁", and what has no token is bytes."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    texts = [text for text in TEXTS[:600] if "<0x" not in text]  # there tokens to be found
    corpus = [f"{text}\n\n{CASES}" for text in texts[:300]]
    expected = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    expected.normalizer = normalizers.Replace(" ", "▁")
    special = ["<unk>", "<bos>", "<eos>", *(f"<0x{byte:02X}>" for byte in range(256))]
    expected.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=900, special_tokens=special, limit_alphabet=300)
    )
    described = json.loads(expected.to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].get)
    header = gguf_header(
        tmp_path / "a.gguf", "gemma4", tokens, [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)],
        token_merges=[" ".join(merge) for merge in described["merges"]], unk_token_id=0,
        bos_token_id=1,
    )  # fmt: skip
    ours = gguf_tokenizer.load_tokenizer(header, len(tokens))
    for text in texts:
        ids = expected.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == [1, *ids], repr(text)
        assert ours._backend.decode(ids) == text.replace("▁", " ")


@pytest.mark.parametrize("name", APPROXIMATED)
def test_ascii_is_cut_as_llama_cpp_does(name):
    published, approximated = cuts(PUBLISHED[name]), cuts(APPROXIMATED[name])
    for text in ASCII:
        assert published.pre_tokenize_str(text) == approximated.pre_tokenize_str(text), repr(text)


def test_qwen_composes_what_it_reads(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    ours = as_gguf(tmp_path / "a.gguf", BYTE_LEVEL, "gpt2", "qwen2")
    for text in TEXTS[:300]:
        assert ours.encode(text) == ours.encode(normalizers.NFC().normalize_str(text))


@pytest.mark.parametrize(("name", "strips"), [("Phi-3 mini 4k", True), ("tiny", False)])
def test_control_tokens_of_phi_3_take_the_blanks_after_them(name, strips, tmp_path, monkeypatch):
    """Its tokenizer.json says so of all but three; a .gguf file has no word for it."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "<|end|>"]
    header = gguf_header(
        tmp_path / "a.gguf", "llama", tokens, [2, 3, 3, *[6] * 256, 1, 3], name=name,
        token_scores=[-float(i) for i in range(len(tokens))], unk_token_id=0, bos_token_id=1,
    )  # fmt: skip
    backend = gguf_tokenizer.load_tokenizer(header, len(tokens))._backend
    stripping = {t.content for t in backend.get_added_tokens_decoder().values() if t.rstrip}
    assert stripping == ({"</s>", "<|end|>"} if strips else set())
