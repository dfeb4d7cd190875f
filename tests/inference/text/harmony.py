"""Answers on channels for tests: a tokenizer whose marks are special, a token a byte otherwise, and
a plain reading of whole answers by regular expressions.
"""

import functools
import json
import re

import tokenizers
from tokenizers import AddedToken, decoders, models

from inference.text.tokenizer import Tokenizer, byte_alphabet
from tests.inference.server.parrot import TEMPLATES

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>",
         "<|call|>")  # fmt: skip
RETURN, CALL = 261, 262
NAMES = {"weather", "web-search", "now"}
GAP = "\n\n"


@functools.cache
def tokenizer() -> Tokenizer:
    alphabet = byte_alphabet()
    backend = tokenizers.Tokenizer(models.BPE({alphabet[byte]: byte for byte in range(256)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, special=True) for name in MARKS])
    special = {"eos_token": "<|return|>"}
    return Tokenizer(backend, 270, special, TEMPLATES["harmony"])


def read(answer: str) -> tuple[str, str, list]:
    """Thoughts, texts, and calls with their arguments, of an answer with whole headers."""
    thoughts, texts, calls = [], [], []
    end = r"<\|(?:end|call|return)\|>\s*"
    borders = rf"(?:{end})?<\|start\|>assistant(?=\W)|{end}(?=<\|channel\|>)"
    for n, message in enumerate(re.split(borders, answer)):
        header, mark, body = message.partition("<|message|>")
        body = re.sub(rf"{end}$", "", body)
        if not mark:
            texts += [] if n else [message]
            continue
        to = re.search(r"to=([^\s<]+)", header)
        name = to and to[1].removeprefix("functions.")
        if name in NAMES:
            given, size = json.JSONDecoder().raw_decode(body.strip() or "{}")
            calls.append((name, given))
            texts.append(body.strip()[size:])
        elif "<|channel|>analysis" in header:
            thoughts.append(body)
        else:
            texts.append(body)
    return *(GAP.join(filter(None, map(str.strip, part))) for part in (thoughts, texts)), calls
