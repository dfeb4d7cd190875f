"""Mistral's `tekken.json`: texts are cut and merged as tiktoken does, special tokens come first."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.errors import InputError
from inference.checkpoints import text_files, tokenizer_files

# All bytes, and what is made of them, by rank.
PIECES = [bytes([byte]) for byte in range(256)] + [
    piece.encode() for piece in ("he", "th", "e ", "the", "é", "ét", " t", " the", "there")
]
SPECIAL = ("<unk>", "<s>", "</s>", "[INST]")
COUNT = 6  # of special tokens, two of which have no name
PATTERN = r" ?[a-zé]+|\s+"


def described(**changes: Any) -> dict[str, Any]:
    return {
        "config": {
            "pattern": PATTERN, "num_vocab_tokens": len(PIECES) + 2,
            "default_vocab_size": COUNT + len(PIECES), "default_num_special_tokens": COUNT,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
            for rank, piece in enumerate([*PIECES, b"beyond", b"the end"])
        ],
        "special_tokens": [
            {"rank": rank, "token_str": name, "is_control": True}
            for rank, name in enumerate(SPECIAL)
        ],
    } | changes  # fmt: skip


def load(folder: Path, **changes: Any):
    (folder / "tekken.json").write_text(json.dumps(described(**changes)))
    return tokenizer_files.load_tokenizer(folder, COUNT + len(PIECES))


def by_hand(text: str) -> list[int]:
    """Of each part of a text the pair with the lowest rank is merged, the first of equals."""
    ids = []
    for part in re.findall(PATTERN, text):
        tokens = [bytes([byte]) for byte in part.encode()]
        while True:
            pairs = [a + b for a, b in zip(tokens, tokens[1:], strict=False)]
            ranks = [PIECES.index(pair) if pair in PIECES else len(PIECES) for pair in pairs]
            if not ranks or min(ranks) == len(PIECES):
                break
            first = int(np.argmin(ranks))
            tokens[first : first + 2] = [pairs[first]]
        ids += [COUNT + PIECES.index(token) for token in tokens]
    return ids


def test_texts_are_cut_and_merged_as_tiktoken_does(tmp_path):
    tokenizer, generator = load(tmp_path), np.random.default_rng(0)
    for _ in range(300):
        text = "".join(generator.choice(list("thheeré "), generator.integers(1, 14)))
        ids = tokenizer.encode(text, add_special=False)
        # A part that is a token by itself is not merged.
        whole = [part.encode() for part in re.findall(PATTERN, text)]
        expected = [
            token
            for part in whole
            for token in (
                [COUNT + PIECES.index(part)] if part in PIECES else by_hand(part.decode())
            )
        ]
        assert ids == expected, text
        assert tokenizer.decode(ids) == text


def test_special_tokens_come_first(tmp_path):
    tokenizer = load(tmp_path)
    assert tokenizer.encode("[INST]")[:2] == [1, 3] and (tokenizer.bos_id, tokenizer.eos_id) == (
        1,
        2,
    )
    expected = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert tokenizer.special_tokens == expected
    assert tokenizer.encode("<SPECIAL_5>", add_special=False) == [5]


def test_older_files_list_no_special_tokens(tmp_path):
    pieces = described()["vocab"][:261]
    config = {"pattern": PATTERN, "default_vocab_size": 291, "default_num_special_tokens": 30}
    (tmp_path / "tekken.json").write_text(json.dumps({"config": config, "vocab": pieces}))
    tokenizer = tokenizer_files.load_tokenizer(tmp_path, 291)
    assert tokenizer.encode("[TOOL_CONTENT]the", add_special=False) == [19, 30 + 259]
    assert tokenizer.special_tokens["pad_token"] == "<pad>"


def test_a_tokenizer_json_beside_it_counts(tmp_path):
    load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer\.json: not a valid tokenizer"):
        tokenizer_files.load_tokenizer(tmp_path, 9)
    assert text_files.read(tmp_path).keys() == {"tekken.json", "tokenizer.json"}


BAD = {
    "pattern": ({"config": {"default_vocab_size": 9}}, "config: pattern is missing"),
    "regex": (
        {"config": described()["config"] | {"pattern": "("}}, "tekken.json: not a valid tokenizer: "
    ),
    "few": ({"vocab": described()["vocab"][:9]}, "vocab must list at least 265 tokens"),
    "base64": (
        {"vocab": [{"rank": 0, "token_bytes": "%"}] * 265}, "vocab: token 0 must have this rank and"
    ),
    "order": ({"vocab": described()["vocab"][::-1]}, "vocab: token 0 must have this rank"),
    "names": (
        {"special_tokens": [{"rank": 9, "token_str": "<s>"}]}, "rank=9 and token_str='<s>' are no"
    ),
    "twice": (
        {"special_tokens": [{"rank": rank, "token_str": "<s>"} for rank in (0, 1)]}, "two have one"
    ),
    "list": ({"special_tokens": {"<s>": 1}}, "special_tokens must list objects"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_unsound_is_named(case, tmp_path):
    changes, cause = BAD[case]
    with pytest.raises(InputError) as caught:
        load(tmp_path, **changes)
    assert cause in str(caught.value) and "\n" not in str(caught.value)
