"""Lines of a file of requests, as prompts and how to sample."""

import json
import types

import pytest

from configs.errors import InputError
from inference.files import user_files
from inference.request import SamplingParams
from inference.text import prompts, sampling_fields
from inference.text.prompts import Prompt


def test_every_field_of_a_line(tmp_path):
    given = {
        "max_new_tokens": 7.0, "temperature": 1, "top_k": 3, "top_p": 0.5, "min_p": 0.1,
        "epsilon_cutoff": 0.01,
        "repetition_penalty": 1.5, "presence_penalty": -1, "frequency_penalty": 0.5,
        "logit_bias": {"5": -1.5}, "allowed_token_ids": [5, 6], "banned_token_ids": [6],
        "min_tokens": 2, "stop": ["a", "b"],
        "stop_token_ids": [7], "ignore_eos": True, "seed": 2**63, "priority": -1,
        "n": 2, "best_of": 3, "vote": True, "beam_width": 0, "length_penalty": 0.5,
        "early_stopping": True,
        "speculate": False, "prompt_budget": 64.0, "cache_salt": "a", "adapter": "b",
        "skip_special_tokens": False, "shown_special_ids": [8], "thinks": True,
        "thinking_budget": 9,
    }  # fmt: skip
    grammar = {"grammar": 'start: "a"'}  # which ends a text, as `ignore_eos` does not
    assert {*given, *grammar} == {*sampling_fields.NAMES}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": ""},
    ]
    lines = [
        {"prompt": "A"} | given,
        {"prompt": "A", "stop": "x", "seed": None, "allowed_token_ids": None} | grammar,
        {"messages": messages, "tools": [{}], "documents": [], "id": 7},
    ]
    base = SamplingParams(temperature=0.5, seed=3)
    source = tmp_path / "in.jsonl"
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    read = prompts.from_file(str(source), base)
    whole = {"max_new_tokens": 7, "logit_bias": {5: -1.5}, "prompt_budget": 64}
    assert read[0].params == SamplingParams(**given | whole)
    assert read[1].params == SamplingParams(temperature=0.5, stop=("x",), **grammar)
    assert (read[2].params, read[2].id, read[2].tools, read[2].documents) == (base, 7, [{}], [])
    assert read[2].messages == tuple(messages) and read[0].id is None


def test_a_prompt_far_beyond_the_context_is_not_encoded():
    """Nor is one whose text is in messages."""
    fake = types.SimpleNamespace(longest_token=16, encode=len)
    size = 2 << 20
    messages = ({"role": "user", "content": "a" * size},)
    for given in ({"text": "a" * size}, {"messages": messages}):
        prompt = Prompt("prompt 1", SamplingParams(), **given)
        with pytest.raises(InputError, match=f"prompt 1 has {size} characters; the context of 99"):
            prompt.encode(fake, 99)
    assert Prompt("prompt 1", SamplingParams(), "a" * size).encode(fake, size // 16) == size


def test_a_mark_of_byte_order_is_no_text(tmp_path):
    source = tmp_path / "in.jsonl"
    line = '{"prompt": "A"}\n'
    source.write_bytes(b"\xef\xbb\xbf" + line.encode())
    (prompt,) = prompts.from_file(str(source), SamplingParams())
    assert prompt.text == "A"
    assert user_files.read_text(str(source), 99) == line
