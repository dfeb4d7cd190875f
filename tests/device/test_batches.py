"""The batches of the device's tests, where there is no device: all of them can be drawn, and the
reference passes.
"""

import pytest

from tests.device import batches
from tests.device.test_attention import SEEDS, check
from tests.layers import paged_case


@pytest.mark.parametrize("case", batches.CASES)
def test_every_batch_fits_the_pool(case):
    page_tokens = batches.CASES[case].page_tokens
    held = {seed: sum(-(-n // page_tokens) for n in batches.lengths(case, seed)) for seed in SEEDS}
    fullest = max(held, key=lambda seed: held[seed])
    assert held[fullest] > 0.5 * paged_case.POOL_TOKENS // page_tokens
    drawn, _, asked_YW = batches.draw(case, fullest)
    assert (drawn.table_YP > 0).sum() == held[fullest]
    assert (asked_YW <= drawn.valid_YW).all() and asked_YW.any(1).sum() == drawn.valid_YW.any(
        1
    ).sum()


@pytest.mark.parametrize("case", ["odd group, cap", "a tree", "a canvas", "first tokens", "chunks"])
def test_the_reference_passes(case):
    check("reference", case, SEEDS[-1:])
