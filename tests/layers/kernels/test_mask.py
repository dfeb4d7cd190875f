"""The mask of attention against matrices written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.kernels.attention.mask import mask_bounds, visible
from layers.ragged import Rectangle


def _seen(rectangle: Rectangle, window: int | None, num_positions: int, **more) -> np.ndarray:
    """bool[Y, W, S] of every KV position."""
    bounds = jax.tree.map(lambda x_YW: x_YW[:, :, None], mask_bounds(rectangle, window, **more))
    return np.asarray(visible(jnp.arange(num_positions), *bounds))


def _rectangle(position_YW, valid_YW=None, **masks) -> Rectangle:
    position_YW = jnp.asarray(position_YW)
    valid_YW = jnp.ones(position_YW.shape, bool) if valid_YW is None else jnp.asarray(valid_YW)
    return Rectangle(jnp.zeros(len(position_YW), jnp.int32), position_YW, valid_YW, (), **masks)


_CAUSAL = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
_WINDOW_2 = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]


def test_a_tree_has_no_more_tokens_than_bits():
    def see(width):
        ancestors_YW = jnp.ones((1, width), jnp.uint32)
        return mask_bounds(_rectangle(jnp.arange(width)[None], ancestors_YW=ancestors_YW), None)

    assert see(32).tree_bits_YW.shape == (1, 32)
    with pytest.raises(ValueError, match="at most 32 tokens"):
        see(33)


@pytest.mark.parametrize(
    ("window", "expected"), [(None, _CAUSAL), (2, _WINDOW_2), (1, np.eye(5)), (5, _CAUSAL)]
)
def test_what_came_before_and_a_window_of_it(window, expected):
    chain_YW = (jnp.uint32(2) << jnp.arange(5, dtype=jnp.uint32))[None] - 1
    for ancestors_YW in (None, chain_YW):
        rectangle = _rectangle([[0, 1, 2, 3, 4]], ancestors_YW=ancestors_YW)
        np.testing.assert_array_equal(_seen(rectangle, window, 5)[0], np.array(expected, bool))


_CHUNKS_OF_2 = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
_FIRST_AND_2 = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 0, 1, 1]]


@pytest.mark.parametrize(
    ("more", "expected"),
    [({"chunked": True}, _CHUNKS_OF_2), ({"first_tokens": 1}, _FIRST_AND_2)],
)
def test_chunks_and_first_tokens(more, expected):
    chain_YW = (jnp.uint32(2) << jnp.arange(5, dtype=jnp.uint32))[None] - 1
    for ancestors_YW in (None, chain_YW):
        rectangle = _rectangle([[0, 1, 2, 3, 4]], ancestors_YW=ancestors_YW)
        np.testing.assert_array_equal(_seen(rectangle, 2, 5, **more)[0], np.array(expected, bool))


# The root at position 3, two drafts after it, and two after the first of them.
#
#     3 -+- 4 -+- 5
#        |     +- 5
#        +- 4
_TREE = {"position_YW": [[3, 4, 4, 5, 5]], "ancestors_YW": [[0b1, 0b11, 0b101, 0b1011, 0b10011]]}
_TREE_SEES = [
    [1, 1, 1, 1, 0, 0, 0, 0, 0],
    [1, 1, 1, 1, 1, 0, 0, 0, 0],
    [1, 1, 1, 1, 0, 1, 0, 0, 0],
    [1, 1, 1, 1, 1, 0, 1, 0, 0],
    [1, 1, 1, 1, 1, 0, 0, 1, 0],
]
_TREE_SEES_3 = [  # positions p - 2 to p
    [0, 1, 1, 1, 0, 0, 0, 0, 0],
    [0, 0, 1, 1, 1, 0, 0, 0, 0],
    [0, 0, 1, 1, 0, 1, 0, 0, 0],
    [0, 0, 0, 1, 1, 0, 1, 0, 0],
    [0, 0, 0, 1, 1, 0, 0, 1, 0],
]
_TREE_SEES_2 = [  # and p - 1: the root no more, though its KV position is near
    [0, 0, 1, 1, 0, 0, 0, 0, 0],
    [0, 0, 0, 1, 1, 0, 0, 0, 0],
    [0, 0, 0, 1, 0, 1, 0, 0, 0],
    [0, 0, 0, 0, 1, 0, 1, 0, 0],
    [0, 0, 0, 0, 1, 0, 0, 1, 0],
]


def _tree(**changes) -> Rectangle:
    arrays = {**_TREE, **changes}
    ancestors_YW = jnp.asarray(arrays.pop("ancestors_YW"), jnp.uint32)
    return _rectangle(**arrays, ancestors_YW=ancestors_YW)


@pytest.mark.parametrize(
    ("window", "expected"), [(None, _TREE_SEES), (3, _TREE_SEES_3), (2, _TREE_SEES_2)]
)
def test_a_tree_lies_in_the_order_of_its_tokens(window, expected):
    assert _tree().kv_position_YW.tolist() == [[3, 4, 5, 6, 7]]
    np.testing.assert_array_equal(_seen(_tree(), window, 9)[0], np.array(expected, bool))


def test_a_trees_first_tokens_are_known_by_their_positions():
    """Of branches that lie behind the first tokens, and yet stand among them."""
    star = _tree(
        position_YW=[[0, 1, 1, 1, 2, 3]], ancestors_YW=[[1, 3, 5, 9, 0b11001, 0b111001]]
    )  # a root, three drafts after it, and two after the last of these
    found = _seen(star, 1, 6, first_tokens=2)[0]
    assert found[4].tolist() == [True, False, False, True, True, False]
    assert found[5].tolist() == [True, False, False, True, False, True]


def test_a_tree_of_32_uses_every_bit():
    """A star: the root and 31 drafts after it."""
    ancestors_W = np.uint32(1) | (np.uint32(1) << np.arange(32, dtype=np.uint32))
    position_YW = [[70] + [71] * 31]
    seen_WS = _seen(_tree(position_YW=position_YW, ancestors_YW=ancestors_W[None]), None, 128)[0]
    expected = np.zeros((32, 128), bool)
    expected[:, :71], expected[np.arange(32), 70 + np.arange(32)] = True, True
    np.testing.assert_array_equal(seen_WS, expected)


def test_rows_of_a_canvas_see_each_other():
    """The first row is one, of three tokens and padding; the second is causal."""
    rectangle = _rectangle(
        [[2, 3, 4, 6], [3, 4, 5, 6]],
        [[1, 1, 1, 0], [1, 1, 1, 1]],
        causal_Y=jnp.array([False, True]),
    )
    expected = np.zeros((2, 4, 8), bool)
    expected[0, :, :5] = True
    for w in range(4):
        expected[1, w, : 4 + w] = True
    np.testing.assert_array_equal(_seen(rectangle, None, 8)[:, :3], expected[:, :3])


def test_padding_widens_no_range():
    tree = _tree(
        position_YW=[[3, 4, 4, 9, 9], [9, 9, 9, 9, 9]], ancestors_YW=[[1, 3, 5, 0, 0], [0] * 5],
        valid_YW=[[1, 1, 1, 0, 0], [0] * 5],
    )  # fmt: skip
    assert tree.kv_position_YW[0].tolist() == [3, 4, 5, 9, 9]
    assert mask_bounds(tree, None).last_YW[:, 0].tolist() == [5, 0]
