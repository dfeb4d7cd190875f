"""What a model writes by itself, and which tokens are frequent in it."""

import numpy as np
import pytest

from configs.errors import InputError
from inference.checkpoints import tokenizer_files
from inference.training import own_samples
from tests.scripts import apps

pytestmark = pytest.mark.quick_code


def test_a_chat_model_is_given_the_opening_of_a_users_turn():
    tokenizer = tokenizer_files.load_tokenizer(apps.TINY, 32000)
    start = own_samples.opening(tokenizer)
    asked = tokenizer.chat_text([{"role": "user", "content": "Hello"}])
    assert start and asked.startswith(tokenizer.decode(start, skip_special=False))
    tokenizer.template = None
    assert own_samples.opening(tokenizer) == tokenizer.encode("")


def test_without_any_first_token_text_is_asked_for(monkeypatch):
    tokenizer = tokenizer_files.load_tokenizer(apps.TINY, 32000)
    monkeypatch.setattr(tokenizer, "encode", lambda *args, **named: [])
    tokenizer.template = tokenizer.eos_id = None
    with pytest.raises(InputError, match="no token that a text begins with: give --text"):
        own_samples.opening(tokenizer)


def test_windows_are_of_equal_length():
    asked = []

    def generate(openings, num_tokens):
        asked.append((openings, num_tokens))
        return [[nth] * num_tokens for nth in range(len(openings))]

    found = own_samples.write(generate, [7, 8], 3, 6)
    assert asked == [([[7, 8]] * 3, 4)]
    assert found.reshape(3, 6).tolist() == [[7, 8, n, n, n, n] for n in range(3)]


def test_the_most_frequent_tokens():
    tokens = np.array([5, 5, 5, 9, 9, 1, 1, 1, 1, 30])
    assert own_samples.most_frequent(tokens, 2) == (1, 5)
    assert own_samples.most_frequent(tokens, 9) == (1, 5, 9, 30)
