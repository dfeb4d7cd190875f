"""Cached pages of prompts around a gap, while a file is edited: what each order of texts shares."""

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from inference.text.infill import Gap
from inference.text.tokenizer import Tokenizer, byte_alphabet
from tests import fakes

NUM_EDITS = 20
FILE = "".join(f"def f{n}(x):\n    return x + {n}\n\n" for n in range(40))
CURSOR, TYPED = 300, "y = f(x) "
CODESTRAL = ("[PREFIX]", "[SUFFIX]")
STARCODER = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")


@pytest.fixture(scope="module")
def model():
    return fakes.llama(vocab_size=260, max_context=2048)


def tokenizer(marks) -> Tokenizer:
    """A token a byte, and the marks."""
    backend = tokenizers.Tokenizer(
        models.BPE({character: byte for byte, character in byte_alphabet().items()}, [])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return Tokenizer(backend, 260, {}, None)


def cached_share(model, marks, gaps) -> float:
    """Share of the tokens of all prompts but the first whose pages were cached."""
    engine = fakes.engine(
        model, None, "riding", False, max_seqs=2, decode_rows=(2,), page_tokens=16,
        chunk_tokens=64, prefill_chunks=(2,), cache_bytes=8 << 20, tokenizer=tokenizer(marks),
    )  # fmt: skip
    counters, before = engine.scheduler.counters, None
    for gap in gaps:
        prompt = engine.tokenizer.infill.encode(gap)
        assert len(prompt) > 1000
        engine.generate([prompt], fakes.greedy(4))
        before = before or (counters.num_cached_tokens, counters.num_prompt_tokens)
    num_cached, num_tokens = counters.num_cached_tokens, counters.num_prompt_tokens
    return (num_cached - before[0]) / (num_tokens - before[1])


@pytest.mark.parametrize("marks, suffix_first, low, high", [
    (CODESTRAL, None, 0.97, 1), (STARCODER, True, 0.97, 1), (STARCODER, False, 0.25, 0.35),
])  # fmt: skip
def test_text_that_is_typed_before_the_gap(model, marks, suffix_first, low, high):
    gaps = [
        Gap(FILE[:CURSOR] + TYPED * n, FILE[CURSOR:], (), suffix_first)
        for n in range(NUM_EDITS + 1)
    ]
    assert low <= cached_share(model, marks, gaps) <= high


@pytest.mark.parametrize("suffix_first, low, high", [(True, 0, 0), (False, 0.4, 0.6)])
def test_a_gap_that_moves_through_a_file(model, suffix_first, low, high):
    ends = range(CURSOR, CURSOR + 30 * (NUM_EDITS + 1), 30)
    gaps = [Gap(FILE[:end], FILE[end:], (), suffix_first) for end in ends]
    assert low <= cached_share(model, STARCODER, gaps) <= high
