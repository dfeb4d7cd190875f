"""Speculation by rejection says what the target says: chi-square tests over whole sequences."""

import dataclasses
import itertools
import zlib

import jax
import numpy as np
import pytest
from scipy import stats

from inference.planner.speculation import expected_tokens
from inference.sampling.gumbel import Purpose
from inference.speculation.acceptance import rejection
from tests.inference.speculation import tiny_pairs
from tests.inference.speculation.tiny_pairs import DRAFTS, FILTERS, PROPOSERS, chain, tree

pytestmark = pytest.mark.quick_code

TEMPERATURES = (0.5, 1.0, 1.5)
SAMPLES, FEW_SAMPLES = 1_000_000, 65_536
verify = jax.jit(rejection.verify)
LEAST = 1e-5  # p-value; among hundreds of tests, one in hundreds of runs is lower by chance


def p_value_of(name, asked, samples, pair=None, seed=0, run_pass=chain, **more) -> float:
    """The p-value of one pair, checked for having something to test."""
    pair = tiny_pairs.pair(name, asked) if pair is None else pair
    stream = zlib.crc32(f"{seed} {run_pass.__name__} {name} {asked}".encode())
    counts, emitted = tiny_pairs.count(pair, stream, samples, name, run_pass, **more)
    assert emitted[0] == 0 and (emitted[[1, 1 + DRAFTS]] > 0.005 * emitted.sum()).all()
    cells = tiny_pairs.expected_cells(asked, tiny_pairs.target_logits())
    assert cells.sum() == pytest.approx(1)
    return tiny_pairs.p_value(counts, cells)


@pytest.mark.parametrize(
    "run_pass, name, asked",
    [
        (chain, "ngram", (0.5, "top_k", False)),
        (chain, "draft", (1.5, "top_p", True)),
        (chain, "medusa", (1.0, "min_p", True)),
        (chain, "eagle", (1.0, "none", False)),
        (tree, "medusa", (1.5, "min_p", True)),
        (tree, "draft", (1.0, "top_p", True)),
    ],
)
def test_some_of_the_matrix(run_pass, name, asked):
    assert p_value_of(name, tiny_pairs.request(*asked), FEW_SAMPLES, run_pass=run_pass) > LEAST


def reordered(asked):
    """The target's law with top-p before the temperature."""
    first = tiny_pairs.law(tiny_pairs.target_logits(), dataclasses.replace(asked, temperature=1.0))
    weights = first ** np.float32(1 / asked.temperature)
    return weights / weights.sum(-1, keepdims=True)


PLANTED = {
    "top-p before temperature where drafts are weighed": lambda asked, law_WSV: np.stack(
        [reordered(asked)] * DRAFTS + [law_WSV[-1]]
    ),
    "top-p before temperature where all are accepted": lambda asked, law_WSV: np.stack(
        [*law_WSV[:-1], reordered(asked)]
    ),
    "a bonus token without filters": lambda asked, law_WSV: np.stack(
        [*law_WSV[:-1], tiny_pairs.raw_law(tiny_pairs.target_logits(), asked.temperature)]
    ),
}


def p_value_with(bug, run_pass, samples, *case) -> float:
    asked = tiny_pairs.request(*case)
    right = tiny_pairs.pair("draft", asked)
    wrong = dataclasses.replace(right, law_WSV=PLANTED[bug](asked, right.law_WSV))
    return p_value_of("draft", asked, samples, wrong, run_pass=run_pass)


@pytest.mark.parametrize("bug", PLANTED)
def test_bugs_of_the_target_s_law_are_found(bug):
    assert p_value_with(bug, chain, FEW_SAMPLES, 1.5, "top_p") < LEAST


def tilted(law_SV, seed: int, total_variation: float):
    """Another law of the last token, such that those of whole sequences differ by as much: each
    token a bit more or less likely, as even as can be.
    """
    is_last_S1 = tiny_pairs.POSITION[:, None] == tiny_pairs.POSITION.max()
    sign_SV = (
        np.where(np.random.default_rng(seed).random(law_SV.shape) < 0.5, -1.0, 1.0) * is_last_S1
    )
    law = law_SV.astype(np.float64)
    tilt_SV = law * (sign_SV - (law * sign_SV).sum(-1, keepdims=True) * is_last_S1)
    cells = tiny_pairs.cells_of(law)
    distance = lambda other: np.abs(tiny_pairs.cells_of(other) - cells).sum() / 2  # noqa: E731
    found = law + tilt_SV * total_variation / distance(law + tilt_SV)
    assert found.min() >= 0 and distance(found) == pytest.approx(total_variation)
    return found.astype(np.float32)


def num_found(run_pass, seeds, samples) -> int:
    """In how many planted runs a total variation of 0.02 is found."""
    asked = tiny_pairs.request()
    right = tiny_pairs.pair("draft", asked)
    laws = [tilted(right.law_WSV[0], seed, 0.02) for seed in seeds]
    pairs = [dataclasses.replace(right, law_WSV=np.stack([law] * (1 + DRAFTS))) for law in laws]
    values = [
        p_value_of("draft", asked, samples, pair, seed, run_pass)
        for seed, pair in zip(seeds, pairs, strict=True)
    ]
    print(f"\n{run_pass.__name__}: largest p of {len(values)} planted runs {max(values):.2g}")
    return sum(value < LEAST for value in values)


def test_a_total_variation_of_a_fiftieth_is_found():
    assert num_found(chain, range(1), 4 * FEW_SAMPLES) == 1


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run_pass", [chain, tree])
def test_a_total_variation_of_a_fiftieth_is_found_in_99_of_100_runs(run_pass):
    """With a quarter of the matrix's samples."""
    assert num_found(run_pass, range(100), SAMPLES // 4) >= 99


@pytest.mark.long
@pytest.mark.parametrize("run_pass", [chain, tree])
@pytest.mark.parametrize("bug", PLANTED)
@pytest.mark.parametrize("penalties", [False, True])
def test_bugs_are_found_on_every_path(bug, run_pass, penalties):
    assert p_value_with(bug, run_pass, SAMPLES // 4, 1.5, "top_p", penalties) < LEAST


@pytest.mark.long
@pytest.mark.parametrize("run_pass", [chain, tree])
def test_bugs_of_a_proposer_are_found(run_pass):
    """Drafts of another law than it says, and noise that the verifier uses too."""
    asked = tiny_pairs.request(1.5)
    right = tiny_pairs.pair("draft", asked)
    other = tiny_pairs.proposer_laws("draft", tiny_pairs.request(1.3))
    wrong = dataclasses.replace(right, drawn_law_kSV=other)
    assert p_value_of("draft", asked, SAMPLES // 4, wrong, run_pass=run_pass) < LEAST
    for purpose in (Purpose.ACCEPT, Purpose.RESIDUAL):
        same = p_value_of("draft", asked, SAMPLES // 4, run_pass=run_pass, purpose=purpose)
        assert same < LEAST


@pytest.mark.long
def test_a_choosy_proposer_is_found():
    pair = tiny_pairs.pair("draft", tiny_pairs.request())
    assert p_value_of("choosy", tiny_pairs.request(), SAMPLES // 4, pair) < LEAST


def test_tokens_of_a_pass_follow_the_law_of_speed():
    """Laws of which a share a is common at every position."""
    rows, k = 1 << 15, 5
    num_drafts_R = np.array([1, 3, 5, 5], np.int32)[np.arange(rows) % 4]
    rng = np.random.default_rng(6)
    q, other = np.zeros((2, tiny_pairs.VOCAB))
    q[:4], other[4:] = rng.dirichlet(np.ones(4), 2)
    seeds = rng.integers(2**32, size=(rows, 2), dtype=np.uint32)
    for a in (0.3, 0.6, 0.8, 0.95):
        p = a * q + (1 - a) * other
        law, draft_law = (
            np.broadcast_to(x.astype(np.float32), (rows, n, x.size))
            for x, n in ((q, k + 1), (p, k))
        )
        drafts = rng.choice(p.size, size=(rows, k), p=p).astype(np.int32)
        emitted = np.asarray(
            verify(law, seeds, np.zeros(rows, np.int32), drafts, num_drafts_R, draft_law)[1]
        )
        for drafted in (1, 3, 5):
            expected = (1 - a ** (drafted + 1)) / (1 - a)
            assert expected_tokens(a, drafted) == pytest.approx(expected)
            assert emitted[num_drafts_R == drafted].mean() == pytest.approx(expected, rel=0.02)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run_pass", [chain, tree])
@pytest.mark.parametrize("name", PROPOSERS)
def test_the_matrix(name, run_pass):
    """And p-values of right laws are uniform."""
    found = {}
    for case in itertools.product(TEMPERATURES, FILTERS, (False, True)):
        asked = tiny_pairs.request(*case)
        found[case] = p_value_of(name, asked, SAMPLES, run_pass=run_pass)
    values = np.array(list(found.values()))
    uniform = stats.kstest(values, "uniform").pvalue
    print(
        f"\n{run_pass.__name__}, {name}: {len(values)} laws, "
        f"least p {values.min():.2g}, uniform p {uniform:.2g}"
    )
    assert values.min() > LEAST and uniform > 1e-3, found


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_other_seeds_agree(seed):
    asked = tiny_pairs.request(1.0, "top_p", True)
    found = {
        (name, run_pass.__name__): p_value_of(name, asked, SAMPLES, seed=seed, run_pass=run_pass)
        for name in PROPOSERS for run_pass in (chain, tree)
    }  # fmt: skip
    print(f"\nseed {seed}: p {' '.join(f'{p:.2g}' for p in found.values())}")
    assert min(found.values()) > LEAST, found
