"""Tokenizers read and rebuilt: ids equal transformers', whatever the text."""

import json
import re
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from configs.errors import InputError
from inference.checkpoints import resolve, tokenizer_files
from inference.checkpoints.gguf import gguf_file, gguf_tokenizer
from inference.engine import Engine
from inference.request import SamplingParams
from inference.server.protocol import logprobs
from inference.text import grammar, tokenizer
from inference.text.detokenizer import Detokenizer
from inference.text.grammar import Grammars

GOLDEN = Path(__file__).parents[2] / "golden" / "llama-tokenizer"
TEXTS = (
    "The capital of France is",
    "x = 1234;\n\tif x  >=  10:\n        pass  # ok",
    "日本語 naïve 😀👨‍👩‍👧",
    "  leading, trailing   ",
    "<|im_start|>user\nI'll <bos>2024<eos>",
)
# transformers 5.23.0, from the same files; SmolLM2 with the digit rule of the published tokenizer,
# which its GGUF reader leaves out.
IDS = {
    "smollm2-135m": (
        "504 3575 282 4649 314",
        "104 446 216 33 34 35 36 43 198 197 342 1792 216 10888 256 33 32 42 448 1301 216 907 10907",
        "23274 115 40993 179 120 248 15486 46494 40303 218 10813 235 118 321 231 10813 235 119 321"
        " 231 10813 235 117",
        "216 2899 28 35079 333",
        "1 4093 198 57 3060 2067 34761 46 34 32 34 36 44 85 395 46",
    ),
    "gemma3-270m": (
        "2 818 5279 529 7001 563",
        "2 236781 578 236743 236770 236778 236800 236812 236793 107 255968 584 1123 138 11957 138"
        " 236770 236771 236787 107 144 4373 138 236865 7546",
        "2 94951 120362 163543 243874 237243 243767 237243 244814",
        "2 138 26016 236764 45330 139",
        "2 236820 236909 548 236779 3041 111038 2364 107 236777 236789 859 236743 2 236778 236771"
        " 236778 236812 1",
    ),
}


@pytest.mark.parametrize("model", IDS)
def test_real_vocabularies_give_the_reference_ids(model):
    real = resolve.resolve(model).open(None).load_tokenizer()
    for text, expected in zip(TEXTS, IDS[model], strict=True):
        ids = real.encode(text)
        assert ids == [int(token) for token in expected.split()]
        shown = real.decode(ids, skip_special=False)
        assert shown.removeprefix("<bos>") == text


def test_smollm2_chat_template():
    real = resolve.resolve("smollm2-135m").open(None).load_tokenizer()
    messages = [{"role": "user", "content": "Hi"}]
    assert real.chat_text(messages) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = real.apply_chat_template(messages)
    assert ids[0] == real.bos_id == 1 and ids.count(real.eos_id) == 2


def test_hugging_face_directory():
    expected = np.load(GOLDEN / "expected.npz")
    tiny = tokenizer_files.load_tokenizer(GOLDEN, 320)
    for i, text in enumerate(expected["texts"].tolist()):
        assert tiny.encode(text) == expected[f"ids_{i}"].tolist()
        assert tiny.decode(tiny.encode(text)) == text
    messages = json.loads(str(expected["chat_messages"]))
    assert tiny.chat_text(messages) == str(expected["chat_text"])
    assert tiny.apply_chat_template(messages) == expected["ids_chat"].tolist()
    assert (tiny.bos_id, tiny.eos_id) == (0, 1)


def copy_golden(folder: Path) -> Path:
    shutil.copytree(GOLDEN, folder / "copy")
    return folder / "copy"


def test_templates_by_name_and_in_a_file(tmp_path):
    directory = copy_golden(tmp_path)
    named = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": named, "bos_token": {"content": "<|begin|>"}}))
    read = tokenizer_files.load_tokenizer(directory, 320)
    assert read.chat_text([]) == "D" and read.bos_id == 0
    assert read.templates == {"tool": "T"} and read.chat_text([], tools=[{}]) == "D"
    (directory / "chat_template.jinja").write_text("J{{ bos_token }}")
    assert tokenizer_files.load_tokenizer(directory, 320).chat_text([]) == "J<|begin|>"
    more = directory / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("U{{ tools | length }}")
    read = tokenizer_files.load_tokenizer(directory, 320)
    assert read.chat_text([]) == "J<|begin|>" and read.chat_text([], tools=[{}, {}]) == "U2"
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(InputError, match="no chat template but tool_use"):
        tokenizer_files.load_tokenizer(directory, 320).chat_text([])


@pytest.mark.parametrize("template", [5, [{"name": "default", "template": 5}], [{"template": "x"}]])
def test_a_template_that_is_no_text_is_refused(template, tmp_path):
    directory = copy_golden(tmp_path)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(InputError, match="chat_template must be a string|no name of a chat"):
        tokenizer_files.load_tokenizer(directory, 320)


def test_further_templates_have_names(tmp_path):
    directory = copy_golden(tmp_path)
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    (directory / "chat_template.jinja").write_text("D")
    read = tokenizer_files.load_tokenizer(directory, 320)
    assert read.template == "D" and read.templates == {"tool_use": "T"}
    (directory / "chat_template.jinja").unlink()
    read = tokenizer_files.load_tokenizer(directory, 320)  # files win over the configuration
    assert read.template is None and read.templates == {"tool_use": "T"}


def test_tokens_that_only_the_configuration_knows_are_added(tmp_path):
    """As transformers 5 does: by id, after what tokenizer.json has; then those with a name."""
    directory = copy_golden(tmp_path)
    count = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"].__len__()
    backend = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    size = max(backend.get_vocab_size(), count)
    added = {
        str(size): {"content": "<|one|>", "special": True, "normalized": False},
        str(size + 1): {"content": "two words", "special": False, "rstrip": True},
    }
    config = directory / "tokenizer_config.json"
    config.write_text(
        json.dumps({"added_tokens_decoder": added, "bos_token": "<|one|>", "pad_token": "<|pad|>"})
    )
    (directory / "special_tokens_map.json").write_text('{"bos_token": "<|begin|>"}')
    read = tokenizer_files.load_tokenizer(directory, size + 3)
    ids = read.encode("a<|one|> two words  b<|pad|>", add_special=False)
    assert {size, size + 1, size + 2} <= set(ids) and read.bos_id == size
    assert read.decode([size]) == "" and read.decode([size + 1]) == "two words"


def test_the_map_of_special_tokens_rules_where_nothing_is_listed(tmp_path):
    directory = copy_golden(tmp_path)
    (directory / "tokenizer_config.json").write_text('{"bos_token": "<|end|>"}')
    (directory / "special_tokens_map.json").write_text(
        '{"bos_token": {"content": "<|begin|>", "lstrip": false}}'
    )
    read = tokenizer_files.load_tokenizer(directory, 320)
    assert read.special_tokens["bos_token"] == "<|begin|>" and read.bos_id == 0


@pytest.mark.parametrize("how", ["map", "decoder"])
def test_a_panic_leaves_no_trace_on_stderr(how, tmp_path, capfd):
    directory = copy_golden(tmp_path)
    value = json.loads(GOLDEN_JSON)
    single = [{"SpecialToken": {"id": "<none>", "type_id": 0}}]
    value["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {},
    }  # fmt: skip
    if how == "map":
        value = json.loads(GOLDEN_JSON)
        value["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (directory / "tokenizer.json").write_text(json.dumps(value))
    with pytest.raises(InputError, match="not a valid tokenizer"):
        tokenizer_files.load_tokenizer(directory, 320)
    assert capfd.readouterr().err == ""


def test_without_a_template_there_is_no_guess(tmp_path):
    directory = copy_golden(tmp_path)
    (directory / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="no chat template"):
        tokenizer_files.load_tokenizer(directory, 320).chat_text([])


def test_a_token_without_an_embedding_is_refused():
    with pytest.raises(InputError, match="outside the model's vocabulary of 300"):
        small = tokenizer_files.load_tokenizer(GOLDEN, 300)
        small.encode(" ".join(np.load(GOLDEN / "expected.npz")["texts"].tolist()))


def test_lone_surrogates_are_refused():
    with pytest.raises(InputError, match="not valid Unicode"):
        tokenizer_files.load_tokenizer(GOLDEN, 320).encode("\ud800")


GOLDEN_JSON = (GOLDEN / "tokenizer.json").read_text()
WORD_LEVEL = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
BAD_JSON = {
    "empty": "",
    "null": "null",
    "no model": "{}",
    "truncated": GOLDEN_JSON[:1000],
    "unknown merge": GOLDEN_JSON.replace('"merges": [', '"merges": [["zz", "qq"],'),
    "unsupported decoder": json.dumps({"model": WORD_LEVEL}),
}


@pytest.mark.parametrize("case", BAD_JSON)
def test_bad_tokenizer_json_is_one_line(case, tmp_path):
    directory = copy_golden(tmp_path)
    (directory / "tokenizer.json").write_text(BAD_JSON[case])
    with pytest.raises(InputError, match="tokenizer") as caught:
        tokenizer_files.load_tokenizer(directory, 320)
    assert "\n" not in str(caught.value)


def test_missing_tokenizer_json_is_named(tmp_path):
    with pytest.raises(InputError, match=r"tokenizer\.json is missing"):
        tokenizer_files.load_tokenizer(tmp_path, 320)


@pytest.mark.quick_code
def test_a_checkpoint_without_a_tokenizer_serves_ids():
    bare = GOLDEN.parent / "llama-mqa-float32"
    engine = Engine.from_model(str(bare), max_seqs=1, decode_rows=(2,), prefill_chunks=(1,))
    (answer,) = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=2))
    assert len(answer.token_ids) == 2 and answer.text == ""
    missing = f"{bare}/tokenizer.json is missing (save it from the fast tokenizer)"
    with pytest.raises(InputError, match=f"^{re.escape(missing)}: give token ids instead of text$"):
        engine.generate(["a text"])


# Letters among those by which byte-level vocabularies spell bytes, and others.
ADDED = ("größe", "đem", "ö", "日本", "plain")
BYTE_LETTERS = [letter for letter in tokenizer.byte_alphabet().values() if letter not in ADDED]


def check_added(tokens: tokenizer.Tokenizer) -> None:
    """Added tokens are their own text, wherever text is made of them."""
    text = "".join(f"{word}-" for word in ADDED)
    ids = tokens.encode(text)
    added = ids[::2]
    assert [tokens.decode([token]) for token in added] == list(ADDED)
    detokenizer = Detokenizer(tokens)
    assert tokens.decode(ids) == "".join(detokenizer.push([token]) for token in ids) == text
    shape = logprobs.chat_shape(tokens, [(token, -1.0, ((), ())) for token in added])
    assert [bytes(one.bytes).decode() for one in shape.content] == list(ADDED)
    state = Grammars(tokens, [0]).start(grammar.of_choices([text]))
    for token in ids:
        assert state.mask()[token // 32] >> token % 32 & 1
        state.accept(token)
    assert state.is_complete and not state.has_failed


def test_letters_of_added_tokens_are_no_bytes():
    vocab = {letter: n for n, letter in enumerate(["<|end|>", *BYTE_LETTERS])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(ADDED))
    check_added(tokenizer.Tokenizer(backend, backend.get_vocab_size(), {}, None))


def test_nor_are_those_of_user_tokens_in_a_gguf_file(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    tokens = ["<|end|>", "ab", *BYTE_LETTERS, *ADDED]
    kinds = [3, 1] + [1] * len(BYTE_LETTERS) + [4] * len(ADDED)
    header = gguf_header(
        tmp_path / "a.gguf", "gpt2", tokens, kinds, tokenizer_pre="llama-bpe", token_merges=["a b"]
    )
    check_added(gguf_tokenizer.load_tokenizer(header, len(tokens)))


# Rebuilt from GGUF metadata.


PIECES = ["▁", "a", "b", "c", "ab", "bc", "▁a", "abc", "▁ab", "ca", "cab", "aa", "▁▁"]
SCORES = [-9.0, -9.5, -9.6, -9.7, -1.0, -2.0, -1.5, -4.0, -3.0, -2.5, -5.0, -6.0, -0.5]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def gguf_header(path: Path, model: str, tokens: list[str], kinds: list[int], **metadata):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for key, value in metadata.items():
        getattr(writer, f"add_{key}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf_file.open_gguf(path)


def sentencepiece(path: Path, **metadata) -> tokenizer.Tokenizer:
    tokens = ["<unk>", "<s>", "</s>", "<user>", *BYTES, *PIECES]
    header = gguf_header(
        path,
        "llama",
        tokens,
        [2, 3, 3, 4] + [6] * 256 + [1] * len(PIECES),
        token_scores=[0.0] * 260 + SCORES,
        bos_token_id=1,
        eos_token_id=2,
        unk_token_id=0,
        **metadata,
    )
    return gguf_tokenizer.load_tokenizer(header, len(tokens))


def merge_by_score(text: str) -> list[str]:
    """SentencePiece's rule: keep merging the neighbours that make the best-scored piece."""
    scores = dict(zip(PIECES, SCORES, strict=True))
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = enumerate(zip(parts, parts[1:], strict=False))
        joined = [(scores.get(left + right), -i) for i, (left, right) in pairs]
        best = max((pair for pair in joined if pair[0] is not None), default=None)
        if best is None:
            break
        i = -best[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    spelled = []
    for part in parts:
        spelled += [part] if part in scores else [f"<0x{byte:02X}>" for byte in part.encode()]
    return spelled


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spm")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RIDGELINE_CACHE", str(folder / "cache"))
        yield sentencepiece(folder / "spm.gguf")


@given(text=st.text("abc é", max_size=25))
def test_sentencepiece_merges_follow_the_scores(spm, text):
    expected = [1, *(260 + PIECES.index(p) if p in PIECES else 4 + BYTES.index(p)
                     for p in (merge_by_score(" " + text) if text else []))]  # fmt: skip
    assert spm.encode(text) == expected
    assert spm.decode(expected) == text


def test_sentencepiece_flags_and_added_tokens(spm, tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    plain = sentencepiece(tmp_path / "a.gguf", add_space_prefix=False, add_bos_token=False)
    assert plain.encode("ab") == [260 + PIECES.index("ab")]
    ended = sentencepiece(tmp_path / "b.gguf", add_bos_token=False, add_eos_token=True)
    assert ended.encode("a")[-1] == 2
    assert spm.encode("<user>", add_special=False) == [3]
    assert spm.decode([1, 3, 2]) == "<user>"


def test_rebuilt_tokenizer_comes_from_the_cache_and_survives_damage(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    first = sentencepiece(tmp_path / "a.gguf")
    (cached,) = (tmp_path / "cache").rglob("tokenizer-*.json")
    cached.write_text("damaged")
    header = gguf_file.open_gguf(tmp_path / "a.gguf")
    again = gguf_tokenizer.load_tokenizer(header, first.vocab_size)
    assert again.encode("abc cab") == first.encode("abc cab")
    assert "damaged" not in cached.read_text()
    monkeypatch.setattr(gguf_tokenizer, "_build", None)
    cached_only = gguf_tokenizer.load_tokenizer(header, first.vocab_size)
    assert cached_only.encode("abc cab") == first.encode("abc cab")


def byte_level(path: Path, pre: str | None, **metadata) -> tokenizer.Tokenizer:
    tokens = ["<|end|>", *tokenizer.byte_alphabet().values(), "12", "123", "1234", "ab"]
    kinds = [3] + [1] * (len(tokens) - 1)
    named = {} if pre is None else {"tokenizer_pre": pre}
    header = gguf_header(
        path, "gpt2", tokens, kinds, **named,
        token_merges=["1 2", "12 3", "123 4", "a b"], eos_token_id=0, **metadata,
    )  # fmt: skip
    return gguf_tokenizer.load_tokenizer(header, len(tokens))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [("gpt-2", ["1234"]), ("smollm", ["1", "2", "3", "4"]), ("llama-bpe", ["123", "4"]),
     ("default", ["123", "4"])],
)  # fmt: skip
def test_byte_level_digits_by_pre_tokenizer(pre, pieces, tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    rebuilt = byte_level(tmp_path / "a.gguf", pre)
    ids = rebuilt.encode("1234")
    assert [rebuilt.token_bytes(i).decode() for i in ids] == pieces
    text = "ab é😀\n\t don't <|end|>"
    assert rebuilt.decode(rebuilt.encode(text), skip_special=False) == text
    assert rebuilt.encode("<|end|>") == [0]


def test_without_a_pre_tokenizer_a_file_is_read_as_its_family(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    for _ in range(2):  # rebuilt, and from the cache
        caplog.clear()
        rebuilt = byte_level(tmp_path / "a.gguf", None)
        assert [rebuilt.token_bytes(i) for i in rebuilt.encode("1234")] == [b"123", b"4"]
        (line,) = caplog.messages
        assert line.endswith(
            "pre is missing: texts are cut as 'llama-bpe' cuts them, the default of llama"
        )
    caplog.clear()
    assert byte_level(tmp_path / "b.gguf", "smollm") and not caplog.messages
    header = gguf_file.open_gguf(tmp_path / "a.gguf")
    for family, name in (
        ("gpt2", "gpt-2"),
        ("qwen3moe", "qwen2"),
        ("olmo2", "dbrx"),
        ("x", "default"),
    ):
        monkeypatch.setitem(header.metadata, "general.architecture", family)
        assert gguf_tokenizer.pre_tokenizer(header) == name


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"tokenizer_pre": "martian"}, "pre-tokenizer 'martian' is not supported; valid: gpt-2"),
        ({"token_merges": ["zz qq"]}, "cannot rebuild the tokenizer"),
        ({"eos_token_id": 99_999}, "outside the vocabulary"),
    ],
)
def test_unsound_tokenizer_metadata_is_one_line(change, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    metadata = {"tokenizer_pre": "gpt-2", "token_merges": ["a b"]} | change
    header = gguf_header(tmp_path / "a.gguf", "gpt2", ["a", "b", "ab"], [1, 1, 1], **metadata)
    with pytest.raises(InputError, match=expected) as caught:
        gguf_tokenizer.load_tokenizer(header, 3)
    assert "\n" not in str(caught.value)


def test_unknown_tokenizer_model_lists_the_known(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    header = gguf_header(tmp_path / "a.gguf", "rwkv", ["a"], [1])
    with pytest.raises(InputError, match="'rwkv' is not supported; valid: gpt2, llama"):
        gguf_tokenizer.load_tokenizer(header, 1)
