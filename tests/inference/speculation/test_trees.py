"""Walks through trees, node by node in plain Python; that the law is the target's is shown in
`test_exactness.py`.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from inference.sampling.gumbel import Purpose
from inference.speculation.acceptance import rejection
from inference.speculation.acceptance import trees as acceptance
from tests import compiling
from tests.inference.sampling.test_sampling import softmax_rows
from tests.inference.speculation.test_rejection import noise

pytestmark = pytest.mark.quick_code

ROWS, NODES, VOCAB, WIDTH = 48, 32, 4, 4
coupled = compiling.jit(acceptance.coupled, static_argnames="width")
by_rejection = compiling.jit(acceptance.by_rejection, static_argnames="width")
typical = compiling.jit(acceptance.typical, static_argnames="width")


def trees():
    """Tokens and parents of random trees, some deeper than WIDTH, with equal siblings and nodes
    that are not used.
    """
    rng = np.random.default_rng(1)
    parents = [
        [-1, *(rng.integers(max(0, n - 9), n) for n in range(1, NODES))] for _ in range(ROWS)
    ]
    parents = np.where(rng.random((ROWS, NODES)) < 0.2, -1, np.array(parents, np.int32))
    return rng.integers(VOCAB, size=(ROWS, NODES)).astype(np.int32), parents


def laws(nodes: int = NODES):
    """The target's after each node, seeds, positions."""
    rng = np.random.default_rng(2)
    law = softmax_rows(rng.normal(size=(ROWS, nodes, VOCAB)) * 1.5).astype(np.float32)
    seeds = rng.integers(2**32, size=(ROWS, 2), dtype=np.uint32)
    return law, seeds, rng.integers(9, 99, ROWS).astype(np.int32)


def drawn_trees():
    """Three children of the root and two of each of those, drawn without replacement; and the laws
    from which each node's children are drawn, of which some have two tokens only.
    """
    rng = np.random.default_rng(3)
    parents = np.array([-1, 0, 0, 0, 1, 1, 2, 2, 3, 3], np.int32)
    law = softmax_rows(rng.normal(size=(ROWS, len(parents), VOCAB)) * 1.5)
    law[::3, :, 2:] = 0
    law /= law.sum(-1, keepdims=True)
    tokens = np.zeros((ROWS, len(parents)), np.int32)
    for r in range(ROWS):
        for parent in range(4):
            own = np.flatnonzero(parents == parent)
            drawn = rng.choice(VOCAB, VOCAB, False, p=law[r, parent] * 0.999 + 0.001 / VOCAB)
            likely = law[r, parent, drawn] > 0  # what cannot be drawn fills up
            tokens[r, own] = np.concatenate([drawn[likely], drawn[~likely]])[: len(own)]
    return tokens, parents, law.astype(np.float32)


def walked(law, seed, position, tokens, parents, draft_law):
    """The path, and weights of the token after it."""
    path = [0]
    while True:
        q, p = law[path[-1]].astype(np.float64), None
        p = None if draft_law is None else draft_law[path[-1]].astype(np.float64)
        own = np.flatnonzero(parents == path[-1]) if len(path) < WIDTH else []
        for n in own:
            one_hot = np.eye(VOCAB)[tokens[n]]
            drafted = one_hot if p is None else p
            if drafted[tokens[n]] == 0:
                continue
            u = noise(seed, position + len(path) - 1, Purpose.ACCEPT, [n])[0]
            if u < q[tokens[n]] / drafted[tokens[n]]:
                path.append(int(n))
                break
            q = np.maximum(q - drafted, 0)
            q /= q.sum()
            if p is not None:
                p = p * (1 - one_hot)
                p = p / p.sum() if p.any() else p
        else:
            return path, q


def likely(law, seed, position, tokens, parents, draft_law):
    """As `walked`, by typical acceptance: all branches."""
    open_paths, found = [[0]], []
    while open_paths:
        path = open_paths.pop()
        found.append(path)
        q = law[path[-1]].astype(np.float64)
        least = min(0.09, 0.3 * np.exp((q * np.log(q)).sum()))
        for n in np.flatnonzero(parents == path[-1]) if len(path) < WIDTH else []:
            if q[tokens[n]] > least:
                open_paths.append([*path, int(n)])
    path = max(found, key=lambda path: (len(path), -path[-1]))
    return path, law[path[-1]]


def check(found, law, seeds, position, tokens, parents, draft_law=None, walk=walked) -> set[int]:
    parents = np.broadcast_to(parents, tokens.shape)
    found = acceptance.Accepted(*map(np.asarray, found))
    for r in range(ROWS):
        own = None if draft_law is None else draft_law[r]
        path, weights = walk(law[r], seeds[r], position[r], tokens[r], parents[r], own)
        u = noise(seeds[r], position[r] + len(path) - 1, Purpose.RESIDUAL, np.arange(VOCAB))
        with np.errstate(divide="ignore"):
            last = np.argmax(np.log(weights) - np.log(-np.log1p(-u)))
        assert found.num_emitted_R[r] == len(path)
        np.testing.assert_array_equal(found.path_RW[r], path + [-1] * (WIDTH - len(path)))
        np.testing.assert_array_equal(found.tokens_RW[r, : len(path)], [*tokens[r, path[1:]], last])
    return set(found.num_emitted_R.tolist())


def test_given_children_follow_the_rule():
    arguments = *laws(), *trees()
    assert check(by_rejection(*arguments, width=WIDTH), *arguments) == {1, 2, 3, WIDTH}


def test_likely_children_are_kept():
    arguments = *laws(), *trees()
    found = typical(*arguments, width=WIDTH)
    assert check(found, *arguments, walk=likely) == {1, 2, 3, WIDTH}


def test_drawn_children_follow_the_rule():
    law, seeds, position = laws(10)
    arguments = law, seeds, position, *drawn_trees()
    found = by_rejection(*arguments[:5], WIDTH, arguments[5])
    assert check(found, *arguments) == {1, 2, 3}


def test_coupled_walks_go_where_the_target_goes():
    tokens, parents = trees()
    tokens //= 2
    sampled = np.random.default_rng(4).integers(2, size=tokens.shape).astype(np.int32)
    found = acceptance.Accepted(*map(np.asarray, coupled(sampled, tokens, parents, width=WIDTH)))
    for r in range(ROWS):
        path, own = [0], [0]
        while len(path) < WIDTH and len(own):
            own = np.flatnonzero((parents[r] == path[-1]) & (tokens[r] == sampled[r, path[-1]]))
            path += own[:1].tolist()
        np.testing.assert_array_equal(found.path_RW[r], path + [-1] * (WIDTH - len(path)))
        np.testing.assert_array_equal(found.tokens_RW[r, : len(path)], sampled[r, path])
    np.testing.assert_array_equal(found.num_emitted_R, (found.path_RW >= 0).sum(1))
    assert set(found.num_emitted_R.tolist()) == {1, 2, 3, WIDTH}


@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_chain_is_a_tree(is_drawn):
    """Given the same noise for acceptance: of laws that need none."""
    law, seeds, position = laws(WIDTH)
    best = law.argmax(-1).astype(np.int32)
    law = np.eye(VOCAB, dtype=np.float32)[best]
    rng = np.random.default_rng(5)
    drafts = np.where(rng.random((ROWS, WIDTH - 1)) < 0.7, best[:, :-1], 0).astype(np.int32)
    draft_law = softmax_rows(rng.normal(size=law.shape)).astype(np.float32) if is_drawn else None
    tokens = np.pad(drafts, ((0, 0), (1, 0)))
    found = by_rejection(law, seeds, position, tokens, np.arange(-1, WIDTH - 1), WIDTH, draft_law)
    num = np.full(ROWS, WIDTH - 1, np.int32)
    own = None if draft_law is None else draft_law[:, :-1]
    expected, num_expected = compiling.call(
        rejection.verify, law, seeds, position, drafts, num, own
    )
    walked_by_equals = coupled(best, tokens, np.arange(-1, WIDTH - 1), width=WIDTH)
    np.testing.assert_array_equal(found.num_emitted_R, num_expected)
    for r, n in enumerate(np.asarray(num_expected)):
        np.testing.assert_array_equal(found.tokens_RW[r, :n], expected[r, :n])
    np.testing.assert_array_equal(found.path_RW, walked_by_equals.path_RW)


def test_chips_that_divide_the_vocabulary_say_the_same():
    law, seeds, position = map(jnp.asarray, laws(10))
    tokens, parents, draft_law = map(jnp.asarray, drawn_trees())

    def once(law_RNV, draft_law_RNV):
        return acceptance.by_rejection(
            law_RNV, seeds, position, tokens, parents, WIDTH, draft_law_RNV
        )

    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    divided = jax.shard_map(
        once, mesh=mesh, in_specs=P(None, None, "model"), out_specs=P(), check_vma=False
    )
    said, said_there = (compiling.call(f, law, draft_law) for f in (once, divided))
    chex.assert_trees_all_equal(said_there, said)


def test_a_row_of_nan_harms_no_other():
    arguments = *laws(), *trees()
    healthy = map(np.asarray, by_rejection(*arguments, width=WIDTH))
    arguments[0][3] = np.nan
    broken = acceptance.Accepted(*map(np.asarray, by_rejection(*arguments, width=WIDTH)))
    assert 0 <= broken.tokens_RW[3, 0] < VOCAB and broken.num_emitted_R[3] == 1
    for found, expected in zip(broken, healthy, strict=True):
        np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(expected, 3, 0))
