"""The law of acceptance, the best number of drafts, and the curve through published rates."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs import presets
from configs.hardware import catalog
from configs.mesh import Mesh
from inference.planner import acceptance, speculation
from inference.planner.deployment import Deployment
from inference.planner.speculation import Speculation
from scripts.reports.lecture import drafts


def test_the_table_of_the_notes():
    """Target q = (.3, .7), draft p = (.5, .5): A is kept with .6, B always, B replaces A."""
    target, draft = (0.3, 0.7), (0.5, 0.5)
    assert drafts.acceptance_of(target, draft) == pytest.approx(0.8)
    assert drafts.residual(target, draft) == [0, 1]
    assert drafts.output_distribution(target, draft) == pytest.approx([0.3, 0.7])


_SHARES = st.lists(st.floats(0, 1), min_size=4, max_size=4).filter(lambda x: sum(x) > 0.01)


@given(_SHARES, _SHARES)
def test_the_output_distribution_is_the_targets(target, draft):
    target, draft = ([x / sum(law) for x in law] for law in (target, draft))
    assert drafts.output_distribution(target, draft) == pytest.approx(target)
    assert 0 <= drafts.acceptance_of(target, draft) <= 1 + 1e-12
    assert sum(drafts.residual(target, draft)) == pytest.approx(1)


def test_tokens_and_speed_of_the_notes():
    found = Speculation(4, 0.8, 0.11)
    assert round(found.tokens_per_step, 2) == 3.36 and round(found.speedup, 2) == 2.33
    assert speculation.expected_tokens(1, 4) == 5 and speculation.expected_tokens(0, 4) == 1


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_best_number_of_drafts(accepted, cost):
    best = drafts.best_drafts(accepted, cost)
    gain = Speculation(best, accepted, cost).speedup
    assert gain >= 1
    assert all(gain >= Speculation(k, accepted, cost).speedup for k in range(33))
    assert best == 0 or accepted > cost  # Leviathan et al. 2023, corollary 3.9


def test_the_curve_lies_among_what_was_published():
    assert {o.sampled for o in acceptance.OBSERVED if o.target == "LaMDA"} == {0.57, 0.71, 0.74}
    for greedy in (False, True):
        curve = acceptance.fitted(greedy)
        rates = [o.greedy if greedy else o.sampled for o in acceptance.OBSERVED]
        misses = [abs(curve(o.size) - r) for o, r in zip(acceptance.OBSERVED, rates, strict=True)]
        assert max(misses) < 0.2 and curve.error < 0.1
        assert curve.slope > 0 and curve(1e-9) == curve(1e-6) < curve(0.01)
        assert curve(0.01) < curve(0.1) == curve(1) < 1
        # Least squares: no other line through the logarithms is nearer.
        for miss, slope in ((1.05, 1), (0.95, 1), (1, 1.1), (1, 0.9)):
            other = dataclasses.replace(curve, miss=curve.miss * miss, slope=curve.slope * slope)
            assert _squares(other, rates) > _squares(curve, rates)


def _squares(curve, rates):
    from math import log

    pairs = zip(acceptance.OBSERVED, rates, strict=True)
    return sum((log(1 - curve(o.size)) - log(1 - rate)) ** 2 for o, rate in pairs)


def test_no_size_is_tried_that_was_not_observed():
    sizes = [o.size for o in acceptance.OBSERVED]
    assert acceptance.SIZES[0] == min(sizes) and acceptance.SIZES[-1] == max(sizes)
    assert list(acceptance.SIZES) == sorted(acceptance.SIZES)


def test_a_draft_exchanges_for_each_of_its_layers():
    chip = dataclasses.replace(catalog.get("h100"), overhead_s=1e-5)
    placed = Deployment(presets.get("llama2-70b").config, chip, mesh=Mesh(model=8))
    found, usual = acceptance.best(placed, 1, 512), placed.decode_time(1, 512)
    assert found is not None and usual.collective_s > 0.05 * usual.total_s
    local_s = usual.total_s - usual.overhead_s - usual.collective_s
    draft_s = 1e-5 + found.size * local_s + found.size ** (1 / 3) * usual.collective_s
    assert found.cost * usual.total_s == pytest.approx(draft_s)


def test_the_best_drafts_of_a_deployment():
    config = presets.get("llama2-13b").config
    placed = Deployment(config, catalog.get("h100"))
    few, many = (acceptance.best(placed, batch, 512) for batch in (1, 64))
    assert few is not None and few.drafts > 2 and 0 < few.size < 0.1
    assert many is None or many.drafts < few.drafts  # arithmetic is dearer where there is more
    with_few = dataclasses.replace(placed, speculation=few)
    assert with_few.row(1, 512).output_tok_s > 1.5 * placed.row(1, 512).output_tok_s
    greedy = acceptance.best(placed, 1, 512, greedy=True)
    assert greedy is not None and greedy.tokens_per_step > few.tokens_per_step
    full = dataclasses.replace(
        catalog.get("h100"), memory_bytes=placed.weight_bytes + placed.cache_bytes(512)
    )
    assert acceptance.best(dataclasses.replace(placed, hardware=full), 1, 512) is None
