"""What more chips gain by the planner's word."""

import pytest

from configs import presets
from configs.hardware import catalog
from inference.planner.deployment import Deployment
from scripts.reports import more_chips

_LLAMA = presets.get("llama3-8b").config
_COUNTS = [2**n for n in range(9)]


@pytest.mark.parametrize("chip", ["h200", "v5e"])
def test_a_load_on_more_chips(chip):
    """Steps get shorter by less than the chips, for what all of them read and exchange."""
    hardware = catalog.get(chip)
    points = more_chips.strong(_LLAMA, hardware, 64, 4096, _COUNTS)
    assert points[0].chips == {"h200": 1, "v5e": 4}[chip] and points[-1].chips == 256
    for few, many in zip(points, points[1:], strict=False):
        assert many.step_s < few.step_s and few.tok_s < many.tok_s <= 2.01 * few.tok_s
    for point in points:
        assert point.mesh.num_chips == point.chips and point.mesh.model <= hardware.linked_chips
        placed = Deployment(_LLAMA, hardware, mesh=point.mesh)
        assert placed.row(64, 4096).fits and placed.step_seconds(64, 4096) == point.step_s
        assert (point.exposed_s > 0) == (point.mesh.model > 1)


def test_a_load_that_grows_with_the_chips():
    """Once groups are as fast as they get, more of them take as long for as much each."""
    points = more_chips.weak(_LLAMA, catalog.get("h200"), 16, 4096, _COUNTS)
    assert [point.batch for point in points] == [16 * n for n in _COUNTS]
    assert points[-1].step_s == pytest.approx(points[3].step_s)
    assert all(point.batch / point.step_s == point.tok_s for point in points)


def test_nothing_is_said_of_chips_that_do_not_hold_it():
    large = presets.get("llama3-70b").config
    points = more_chips.strong(large, catalog.get("h200"), 64, 4096, [1, 2, 3, 8])
    assert [point.chips for point in points] == [2, 8]  # and three get unequal parts
