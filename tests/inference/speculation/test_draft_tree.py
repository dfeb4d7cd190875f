"""Trees of drafts, by hand and beside a list of all branches."""

import heapq
import itertools
import math

import pytest

from inference.speculation import draft_tree
from inference.speculation.draft_tree import DraftTree

pytestmark = pytest.mark.quick_code


def test_a_tree_by_hand():
    tree = DraftTree((0, 0, 1, 1, 2, 3))
    assert (tree.num_nodes, tree.levels) == (7, 3)
    assert tree.depth == (0, 1, 1, 2, 2, 2, 3) and tree.rank == (0, 1, 0, 1, 0, 0)
    assert [tree.level(depth) for depth in range(5)] == [(0,), (1, 2), (3, 4, 5), (6,), ()]
    assert [tree.num_ranks(depth) for depth in (1, 2, 3)] == [2, 2, 1]


@pytest.mark.parametrize("num_drafts, levels, branches", [
    (1, 1, 1), (2, 2, 2), (3, 2, 3), (4, 3, 2), (7, 4, 2), (8, 5, 2), (31, 5, 7),
])  # fmt: skip
def test_sizes_of_trees_that_shape_themselves(num_drafts, levels, branches):
    expected = {"tree_levels": levels, "tree_branches": branches}
    assert draft_tree.sizes(num_drafts) == expected


@pytest.mark.parametrize("num_drafts, most_levels", [(5, 1), (7, 2), (13, 3), (20, 4)])
def test_no_tree_of_as_many_is_likelier(num_drafts, most_levels):
    """A child of rank n is right 0.45 / (1 + n)^1.5 times as often as its parent."""
    chances = [0.45 / (1 + rank) ** 1.5 for rank in range(num_drafts)]
    best = heapq.nlargest(num_drafts, (
        math.prod(branch) for length in range(1, 1 + most_levels)
        for branch in itertools.product(chances, repeat=length)
    ))  # fmt: skip
    tree = DraftTree(draft_tree.likeliest(num_drafts, most_levels))
    taken = [1.0]
    for parent, rank in zip(tree.parents, tree.rank, strict=True):
        taken.append(taken[parent] * chances[rank])
    assert sum(taken[1:]) == pytest.approx(sum(best), rel=1e-9)
    assert list(tree.parents) == sorted(tree.parents) and tree.levels <= most_levels
