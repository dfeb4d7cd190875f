"""What a search takes for the size of a shape, and for what it loses."""

import numpy as np
import pytest

from configs.errors import InputError
from configs.hardware import catalog
from inference.prune import axes, search, shapes
from inference.prune.budget import Budget
from inference.prune.watch import Aggregate, ImportanceWatch
from tests.inference.prune import children
from tests.inference.prune.children import GOLDEN
from tests.inference.prune.test_shapes import RandomImportance
from tests.inference.quantize import models

pytestmark = pytest.mark.quick_code

CHIP = catalog.get("h100")


class Scores(RandomImportance):
    """Scores that are all the same, but of layers that do nothing, and of depth."""

    def layer(self, index):
        scores = {name: np.ones_like(array) for name, array in super().layer(index).items()}
        return {name: array * (index > 0) for name, array in scores.items()}

    def depth(self):
        return np.array([-3.0, 1, 1, 1])


def candidates(config, importance, **budget):
    budget = Budget(CHIP, **budget)
    return search.candidates(importance, config, budget, {}, False, lambda *shape: True)


def test_channels_of_experts_meet_a_budget_where_they_hold_most_parameters():
    config = children.opened(GOLDEN / "deepseek_v3-mha-groups-yarn").config
    assert {"ffn_width", "expert_width"} <= shapes.sizes(config).keys()
    matches = candidates(config, RandomImportance(config), params=0.6)
    assert any("expert_width" in match.widths for match in matches)
    assert not any("ffn_width" in match.widths for match in matches)


def test_what_does_nothing_costs_nothing():
    config = models.llama(num_layers=4)
    matches = candidates(config, Scores(config), params=0.75)
    assert all(np.isfinite(match.importance) for match in matches)
    assert matches[0].layers == (1, 2, 3)  # without the first the loss is less
    assert matches[0].importance < 0.05  # of a few channels
    lost = search._lost({"kv_heads": 3}, [{"kv_heads": np.ones(2)}, {"kv_heads": np.ones(4)}])
    assert lost == pytest.approx(0.125)  # the narrower layer stays as it is


def test_a_model_within_the_budget_is_said():
    config = models.llama(num_layers=4)
    with pytest.raises(InputError, match="target_latency_ms=9000: tiny meets it as it is"):
        Budget(CHIP, latency_s=9).check(config)


@pytest.mark.parametrize("name", ["mean", "l2"])
def test_channels_matter_alike_whatever_reads_them(name):
    Y, W, D = 3, 4, 5
    x_XD = np.random.default_rng(0).normal(size=(Y * W, D)).astype(np.float32)
    layer, paths = models.mixture().layers[0], frozenset(["ffn/up"])
    watch = ImportanceWatch(paths, layer, paths, Aggregate(name, name), False, 1e-6)
    weight = np.ones((2, 6, D), np.float32)
    whole = watch.of_product("ffn/up", weight[0], x_XD, None, (Y, W))[axes.WIDTH]
    sizes_E = np.array([7, 5], np.int32)  # the same tokens, in the order of their experts
    stacked = watch.of_product("ffn/up", weight, x_XD[::-1], sizes_E, (Y, W))[axes.WIDTH]
    if name == "mean":
        np.testing.assert_allclose(stacked, whole, rtol=1e-5)
    else:
        np.testing.assert_allclose(np.sqrt(stacked), np.sqrt(whole), rtol=1e-5)
