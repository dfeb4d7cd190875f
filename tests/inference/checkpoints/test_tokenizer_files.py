"""The files beside `tokenizer.json`: what they add, as transformers reads them."""

import json
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
import tokenizers

from configs.errors import InputError
from inference.checkpoints import tokenizer_files
from inference.checkpoints.gguf import pretokenizers
from inference.text import panics

GOLDEN = Path(__file__).parents[2] / "golden"
TINY = GOLDEN / "llama-tokenizer"
SPECIAL = json.loads((GOLDEN / "special-tokens" / "expected.json").read_text())


def copy_with(folder: Path, changes: dict[str, dict]) -> Path:
    made = Path(shutil.copytree(TINY, folder / "model"))
    for name, keys in changes.items():
        before = json.loads((made / name).read_text()) if (made / name).exists() else {}
        (made / name).write_text(json.dumps(before | keys))
    return made


@pytest.mark.parametrize("case", SPECIAL["cases"])
def test_special_tokens_are_those_of_transformers(case, tmp_path):
    expected = SPECIAL["cases"][case]
    read = tokenizer_files.load_tokenizer(copy_with(tmp_path, expected["changes"]), 400)
    ids = [read.encode(text) for text in SPECIAL["texts"]]
    assert ids == expected["ids"]
    assert [read.decode(tokens) for tokens in ids] == expected["decoded"]
    assert read.special_tokens == expected["special"]


def test_named_tokens_are_special_in_conversations_too(tmp_path):
    """In a tokenizer.json without them: the template's are tokens, the user's are text."""
    made = copy_with(tmp_path, {"tokenizer.json": {"added_tokens": []}})
    read = tokenizer_files.load_tokenizer(made, 400)
    read.template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    ids = read.apply_chat_template([{"role": "user", "content": "<|begin|><|end_of_text|>"}])
    assert (ids[0], ids[-1]) == (read.bos_id, read.eos_id)
    assert not {read.bos_id, read.eos_id} & set(ids[1:-1])


def test_a_raw_prompt_is_split_where_the_checkpoint_says_so(tmp_path):
    made = copy_with(tmp_path, {"tokenizer_config.json": {"split_special_tokens": True}})
    read = tokenizer_files.load_tokenizer(made, 400)
    assert read.encode("<|end_of_text|>", add_special=False) != [read.eos_id]
    read.template = "{{ messages[0].content }}{{ eos_token }}"
    for content in ("a", "<|end_of_text|>"):
        ids = read.apply_chat_template([{"role": "user", "content": content}])
        assert ids.count(read.eos_id) == 1 and ids[-1] == read.eos_id


def test_thousands_of_listed_tokens_cost_one_pass(tmp_path):
    """Gemma 3 lists 6,415, all of which its tokenizer.json has."""
    tokens = json.loads((TINY / "tokenizer.json").read_text())["added_tokens"]
    tokens += [{**tokens[0], "id": 320 + i, "content": f"<unused{i}>"} for i in range(6_412)]
    listed = {token["id"]: {k: v for k, v in token.items() if k != "id"} for token in tokens}
    made = copy_with(
        tmp_path,
        {
            "tokenizer.json": {"added_tokens": tokens},
            "tokenizer_config.json": {"added_tokens_decoder": listed},
        },
    )
    start = time.process_time()
    read = tokenizer_files.load_tokenizer(made, 7_000)
    assert time.process_time() - start < 1
    assert read.encode("<unused6411>", add_special=False) == [320 + 6411]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tokenizer_config.json": {"chat_template": ["x"]}}, "chat_template lists"),
        ({"tokenizer_config.json": {"extra_special_tokens": 5}}, "must be a list or an object"),
        ({"tokenizer_config.json": {"added_tokens_decoder": {" 3_20 ": {}}}}, "is no id"),
        ({"added_tokens.json": {"<|foo|>": "x"}}, "not an id"),
        ({"added_tokens.json": {"<|foo|>": 3}}, "listed as 3"),
    ],
)
def test_what_is_no_token_is_named(changes, expected, tmp_path):
    with pytest.raises(InputError, match=expected) as caught:
        tokenizer_files.load_tokenizer(copy_with(tmp_path, changes), 400)
    assert "\n" not in str(caught.value)


@pytest.fixture
def panicking(tmp_path):
    """A tokenizer that panics on some texts only."""
    pattern = {"type": "Split", "pattern": {"Regex": "(?:a|a)+$"}, "behavior": "Isolated"}
    made = copy_with(tmp_path, {"tokenizer.json": {"pre_tokenizer": pattern | {"invert": False}}})
    return tokenizer_files.load_tokenizer(made, 320)


def test_a_panic_while_encoding_is_one_line(panicking, capfd):
    with pytest.raises(InputError, match="cannot encode text"):
        panicking.encode("a" * 24 + "b")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("made", ["llama-tokenizer", "sentencepiece-tokenizer"])
def test_an_encoding_leaves_the_stderr_of_the_process_alone(made, monkeypatch):
    read = tokenizer_files.load_tokenizer(GOLDEN / made, 4_096)
    monkeypatch.setattr(panics, "_CapturedStderr", None)
    assert read.encode("A text with 12 digits.")


def test_no_published_pattern_is_held_to_panic():
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    for pattern in {
        pattern for split in pretokenizers.SPLITS.values() for pattern in split.patterns
    }:
        whole = tokenizers.Regex(pattern)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(whole, "isolated")
        assert not panics.may_panic(backend), pattern


def test_what_others_write_meanwhile_is_kept(panicking, capfd):
    """Logs of other threads: delayed by an encoding, never lost, whichever of them ends first."""
    texts = [threading.Thread(target=panicking.encode, args=("word " * 20_000,)) for _ in range(3)]
    for thread in texts:
        thread.start()
    lines = 0
    while any(thread.is_alive() for thread in texts):
        sys.__stderr__.write(f"line {lines}\n")
        sys.__stderr__.flush()
        lines += 1
    for thread in texts:
        thread.join()
    found = capfd.readouterr().err.split("\n")
    assert sorted(found[:-1]) == sorted(f"line {i}" for i in range(lines))
