"""A conversation grows by what is said, and is saved whole."""

import json
import os
from pathlib import Path

import pytest

from configs.errors import InputError
from inference.checkpoints import tokenizer_files
from inference.text.conversation import Conversation

TINY = Path(__file__).parents[2] / "golden" / "llama-tokenizer"


@pytest.fixture(scope="module")
def tiny():
    return tokenizer_files.load_tokenizer(TINY, 320)


def test_it_grows_by_what_is_said(tiny):
    talk = Conversation(tiny, 200)
    talk.instruct("Be brief.")
    ids = talk.ask("Hi <|end_of_turn|>")
    assert tiny.decode(ids, skip_special=False) == (
        "<|begin|>[system]\nBe brief.<|end_of_turn|>\n[user]\nHi <|end_of_turn|><|end_of_turn|>\n"
        "[assistant]\n"
    )
    assert ids.count(2) == 2  # those of the template
    talk.answer("Hello", 3)
    assert talk.num_tokens == len(ids) + 3 and talk.num_free_tokens == 200 - len(ids) - 3
    longer = talk.ask("Bye")
    assert longer[: len(ids)] == ids  # what a cache of prefixes finds again
    talk.withdraw()
    assert talk.num_tokens == len(ids) + 3  # as if it had not been asked
    assert [message["role"] for message in talk.messages] == ["system", "user", "assistant"]
    talk.instruct("")
    assert [message["role"] for message in talk.messages] == ["user", "assistant"]
    talk.instruct("Again.")
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Again."}] and talk.num_tokens == 0


def test_what_does_not_fit_is_not_kept(tiny):
    talk = Conversation(tiny, 40)
    first = talk.ask("Hi")
    talk.answer("Hello", 2)
    before = list(talk.messages)
    refused = ("word " * 40, "not kept; /reset"), ("\udcff", "not valid text"), ("", "is empty")
    for text, message in refused:
        with pytest.raises(InputError, match=message):
            talk.ask(text)
    assert talk.messages == before and talk.num_tokens == len(first) + 2


def test_it_is_saved_whole_or_not_at_all(tiny, tmp_path, monkeypatch):
    talk = Conversation(tiny, 100)
    talk.ask("ünï")
    monkeypatch.setenv("HOME", str(tmp_path))
    talk.save("~/saved.jsonl")
    (line,) = (tmp_path / "saved.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {"messages": talk.messages}
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    for name in ("saved.jsonl/x", "", "a\0b", "pipe", "none/x", "~nobody-of-this-name/x"):
        with pytest.raises(InputError, match="is not a file in an existing folder|is no path"):
            talk.save(f"{tmp_path}/{name}")
    talk.save(str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink() and (tmp_path / "pipe").is_fifo()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"saved.jsonl", "pipe", "link", "linked"}
