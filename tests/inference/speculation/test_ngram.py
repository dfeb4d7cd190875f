"""What prompt lookup proposes, beside a search in plain Python."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from inference.speculation import ngram
from tests import compiling

pytestmark = pytest.mark.quick_code

BY_HAND = [
    ([1, 2, 3, 9, 1, 2], [3, 9, 1, 2, 3]),  # text that repeats itself goes on so
    ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2, 4, 1]),  # the latest
    ([7, 1, 2, 3, 6, 1, 2, 4, 7, 1, 2], [3, 6, 1, 2, 4]),  # the longest
    ([5, 5, 5], [5] * 5),
    ([1, 2, 3, 4, 2], [-1] * 5),  # one token is an accident
    ([1], [-1] * 5),
]


def looked_up(tokens, num_drafts):
    """By the longest suffix of 4 to 2 tokens that occurred before, the latest of several."""
    for length in (4, 3, 2):
        for end in range(len(tokens) - 2, length - 2, -1):
            if tokens[end - length + 1 : end + 1] == tokens[-length:]:
                after = tokens[end + 1 :]
                return [after[n % len(after)] for n in range(num_drafts)]
    return [-1] * num_drafts


def test_drafts_are_what_followed_before():
    rng = np.random.default_rng(0)
    history_YS = rng.integers(0, 3, (200, 24)).astype(np.int32)
    newest_Y = rng.integers(0, 24, 200)
    for row, (tokens, expected) in enumerate(BY_HAND):
        assert looked_up(tokens, 5) == expected
        history_YS[row, : len(tokens)], newest_Y[row] = tokens, len(tokens) - 1
    drafts_Yk = compiling.call(ngram.continuation, history_YS, newest_Y, num_drafts=5).tolist()
    for history, newest, drafts in zip(history_YS.tolist(), newest_Y, drafts_Yk, strict=True):
        assert drafts == looked_up(history[: newest + 1], 5)


def test_what_a_step_emitted_is_known_by_its_position():
    """Of a row that emits all, of one that emits some of it, of padding, and at the end."""
    state = jnp.full((4, 12), -1).at[1, 6].set(3)
    fed = types.SimpleNamespace(
        sampled_YW=jnp.array([[7, 8, 9], [5, 6, 0], [1, 1, 1], [2, 4, 0]]),
        num_emitted_Y=jnp.array([3, 2, 0, 1]),
        newest_Y=jnp.array([9, 4, 2, 11]),
        slot_Y=jnp.array([1, 0, 3, 2]),
    )
    expected = np.full((4, 12), -1)
    expected[1, 6:10], expected[0, 3:5], expected[2, 11] = (3, 7, 8, 9), (5, 6), 2
    _, history = ngram.NGramProposer(1, 1).observe({}, None, state, fed)
    np.testing.assert_array_equal(history, expected)
