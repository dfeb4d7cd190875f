"""A tiny checkpoint with a tokenizer, from texts to texts, as transformers continues them."""

import json
from pathlib import Path

import numpy as np
import pytest

from inference.engine import Engine
from inference.request import SamplingParams

_GOLDEN = Path(__file__).resolve().parents[1] / "golden"


@pytest.mark.quick_code
def test_a_directory_with_a_tokenizer_end_to_end():
    directory = _GOLDEN / "llama-tokenizer"
    with np.load(directory / "expected.npz") as arrays:
        golden = {name: arrays[name] for name in arrays.files}
    engine = Engine.from_model(
        str(directory), dtype="float32", max_seqs=3, prefill_chunks=(2,), decode_rows=(4,),
        chunk_tokens=32,
    )  # fmt: skip
    engine.scheduler.shapes = engine.scheduler.shapes[-1:]  # one to compile
    texts = golden["texts"].tolist()
    messages = json.loads(str(golden["chat_messages"]))
    chat_ids = engine.tokenizer.apply_chat_template(messages)
    assert engine.tokenizer.chat_text(messages) == str(golden["chat_text"])
    assert chat_ids == golden["ids_chat"].tolist()
    completions = engine.generate([*texts, chat_ids], SamplingParams(max_new_tokens=24))
    for key, completion in zip([*range(len(texts)), "chat"], completions, strict=True):
        expected = golden[f"greedy_{key}"].tolist()
        assert completion.prompt_token_ids == golden[f"ids_{key}"].tolist()
        assert completion.token_ids == expected
        ended = expected[-1] in engine.eos_ids
        assert completion.finish_reason == ("stop" if ended else "length")
        shown = expected[:-1] if ended else expected
        assert completion.text == engine.tokenizer.decode(shown)
    alone = engine.generate([texts[0]], SamplingParams(max_new_tokens=24))[0]
    assert alone.token_ids == golden["greedy_0"].tolist()
