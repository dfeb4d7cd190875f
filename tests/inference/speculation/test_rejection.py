"""The rule row by row; that the distribution is the target's is shown in `test_exactness.py`."""

import functools

import chex
import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from inference.sampling import gumbel, sampler
from inference.sampling.gumbel import Purpose
from inference.speculation.acceptance import rejection
from tests import accelerators, compiling
from tests.inference.sampling.test_distribution import ASKED
from tests.inference.sampling.test_sampling import fill, peaked, softmax_rows

pytestmark = pytest.mark.quick_code

verify = compiling.jit(rejection.verify)
ROWS, DRAFTS, VOCAB = 60, 3, 9


def rows():
    """Arguments of `verify`: laws, seeds, positions, drafts from theirs, all of them given."""
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(ROWS, 1 + DRAFTS, VOCAB)) * 2.5
    law = softmax_rows(logits)
    draft_law = softmax_rows(logits[:, :DRAFTS] + rng.normal(size=(ROWS, DRAFTS, VOCAB)))
    drafts = [rng.choice(VOCAB, p=p) for p in draft_law.reshape(-1, VOCAB)]
    seeds = rng.integers(2**32, size=(ROWS, 2), dtype=np.uint32)
    position = rng.integers(9, 99, ROWS).astype(np.int32)
    return (
        law.astype(np.float32), seeds, position,
        np.array(drafts, np.int32).reshape(ROWS, DRAFTS), np.full(ROWS, DRAFTS, np.int32),
        draft_law.astype(np.float32),
    )  # fmt: skip


def one_hot(ids):
    return np.eye(VOCAB, dtype=np.float32)[ids]


@functools.partial(compiling.jit, static_argnames="purpose")
def uniform(seeds_Q2, position_Q, ids_QJ, *, purpose):
    return gumbel.uniform(gumbel.row_keys(seeds_Q2, position_Q, purpose), ids_QJ)


def noise(seed, position: int, purpose: Purpose, ids):
    found = uniform(np.array([seed]), np.array([position]), np.asarray(ids)[None], purpose=purpose)
    return np.asarray(found)[0].astype(np.float64)


@pytest.mark.parametrize("is_drawn", [True, False])
def test_rows_follow_the_rule(is_drawn):
    """Token by token in plain Python."""
    law, seeds, position, drafts, _, draft_law = rows()
    num_drafts = np.arange(ROWS, dtype=np.int32) % (1 + DRAFTS)
    given = draft_law if is_drawn else None
    found, num_found = map(np.asarray, verify(law, seeds, position, drafts, num_drafts, given))
    law_of_drafts = draft_law if is_drawn else one_hot(drafts)
    for r in range(ROWS):
        tokens, left = [], law[r, num_drafts[r]]
        for i in range(num_drafts[r]):
            q, p, d = law[r, i], law_of_drafts[r, i], drafts[r, i]
            if noise(seeds[r], position[r] + i, Purpose.ACCEPT, [0])[0] >= min(1, q[d] / p[d]):
                left = np.maximum(q - p, 0)
                break
            tokens.append(d)
        u = noise(seeds[r], position[r] + len(tokens), Purpose.RESIDUAL, np.arange(VOCAB))
        with np.errstate(divide="ignore"):
            tokens.append(np.argmax(np.log(left) - np.log(-np.log1p(-u))))
        assert num_found[r] == len(tokens)
        np.testing.assert_array_equal(found[r, : len(tokens)], tokens)
    assert len(set(num_found)) == 1 + DRAFTS, "every length is there"


def test_greedy_rows_accept_what_equals_the_argmax():
    """A draft's law may be anything then: greedy proposers and others."""
    law, seeds, position, drafts, num, draft_law = rows()
    best = law.argmax(-1)
    drafts[::2] = best[::2, :DRAFTS]
    equal = np.cumprod(drafts == best[:, :DRAFTS], axis=1).sum(1)
    for given in (None, one_hot(drafts), draft_law):
        tokens, emitted = map(
            np.asarray, verify(one_hot(best), seeds, position, drafts, num, given)
        )
        np.testing.assert_array_equal(emitted, 1 + equal)
        for r in range(ROWS):
            np.testing.assert_array_equal(tokens[r, : emitted[r]], best[r, : emitted[r]])
    assert set(equal) >= {0, DRAFTS}


def test_equal_laws_accept_everything():
    _, seeds, position, drafts, num, draft_law = rows()
    law = np.concatenate([draft_law, draft_law[:, :1]], axis=1)
    assert (np.asarray(verify(law, seeds, position, drafts, num, draft_law)[1]) == 1 + DRAFTS).all()


def test_laws_a_rounding_apart_leave_a_law():
    """A draft that only rounding rejects, where q <= p everywhere: the residual is nothing."""
    law, draft_law = np.full((1, 4), 0.25, np.float32), np.full((1, 4), 0.2500001, np.float32)
    np.testing.assert_array_equal(compiling.call(rejection.residual, law, draft_law), law)


def test_without_drafts_there_is_one_token():
    law, seeds, position, drafts, *_ = rows()
    none = np.zeros(ROWS, np.int32)
    tokens, emitted = verify(law, seeds, position, drafts, none)
    alone, one = verify(law[:, :1], seeds, position, drafts[:, :0], none)
    np.testing.assert_array_equal(emitted, 1)
    np.testing.assert_array_equal(one, 1)
    np.testing.assert_array_equal(np.asarray(tokens)[:, 0], np.asarray(alone)[:, 0])


def test_a_row_of_nan_harms_no_other():
    arguments = rows()
    healthy = [np.asarray(x) for x in verify(*arguments)]
    arguments[0][3], arguments[5][3] = np.nan, np.nan
    tokens, emitted = map(np.asarray, verify(*arguments))
    assert 0 <= tokens[3, 0] < VOCAB and emitted[3] == 1
    for found, expected in zip((tokens, emitted), healthy, strict=True):
        np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(expected, 3, 0))


def test_a_broken_proposer_harms_nothing():
    law, seeds, position, drafts, num, draft_law = rows()
    plain = verify(law, seeds, position, drafts, num * 0, draft_law)
    tokens, emitted = verify(law, seeds, position, drafts, num, draft_law * np.float32(np.nan))
    np.testing.assert_array_equal(emitted, plain[1])
    np.testing.assert_array_equal(np.asarray(tokens)[:, 0], np.asarray(plain[0])[:, 0])


def test_purposes_are_independent():
    ids, seed = np.arange(20_000), np.array([3, 4], np.uint32)
    u = [noise(seed, position, purpose, ids) for position in (5, 6) for purpose in Purpose]
    correlation = np.corrcoef(u)
    assert len(correlation) == 8
    assert np.abs(correlation - np.eye(8)).max() < 4.5 / np.sqrt(ids.size)


def test_chips_that_divide_the_vocabulary_say_the_same():
    rng = np.random.default_rng(4)
    x, draft_x = (peaked(rng, len(ASKED), 300, 1.0) for _ in range(2))
    x, own, position, counts, masks = fill(x, ASKED)
    draft_x = fill(draft_x, ASKED)[0] + x * 0.8
    best = draft_x.argmax(-1).astype(np.int32)

    def once(x_QV, draft_x_QV):
        law_QV, draft_law_QV = (
            sampler.distribution(logits, own, position, counts, masks)
            for logits in (x_QV, draft_x_QV)
        )
        laws_RWV = law_QV.reshape(-1, 2, law_QV.shape[1])
        return law_QV, rejection.verify(
            laws_RWV, own.seed[::2] + position[::2, None].astype(np.uint32), position[::2],
            best[::2, None], np.ones_like(position[::2]), draft_law_QV[::2, None],
        )  # fmt: skip

    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    divided = jax.shard_map(
        once, mesh=mesh, in_specs=P(None, "model"), out_specs=(P(None, "model"), P()),
        check_vma=False,
    )  # fmt: skip
    (law, said), (law_there, said_there) = (compiling.call(f, x, draft_x) for f in (once, divided))
    np.testing.assert_allclose(law_there, law, rtol=1e-5, atol=1e-9)
    chex.assert_trees_all_equal(said_there, said)
    assert 0 < (np.asarray(said[1]) == 2).mean() < 1


@pytest.mark.parametrize("platform", accelerators.KINDS)
def test_accelerators_run_it_without_a_branch_and_a_loop(platform):
    logits, own, position, counts, masks = fill(np.zeros((3, 300), np.float32), ASKED[:3])

    def once(logits_QV):
        law_RWV = sampler.distribution(logits_QV, own, position, counts, masks).reshape(-1, 2, 300)
        num_R = np.ones(len(law_RWV), np.int32)
        return rejection.verify(
            law_RWV, own.seed[::2], position[::2], num_R[:, None], num_R, law_RWV[:, 1:]
        )

    found = accelerators.primitives(once, logits, platform=platform)
    assert not found & {"cond", "while", "scan", "sort", "top_k"}
