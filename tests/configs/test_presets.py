"""Planned models have the sizes that were published, and are refused by what runs models."""

import pytest

from configs import presets
from configs.errors import InputError
from inference.checkpoints import resolve
from inference.planner import cost, weights
from layers import decoder

# Totals and active parameters as their authors print them, in billions.
_PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9),
    "deepseek-v2": (236, 21),
    "deepseek-v3.2": (671, 37),
    "hunyuan-large": (389, 52),
    "granite4-h-small": (32.2, 9),
    "mamba2-2.7b": (2.7, 2.7),
}


@pytest.mark.parametrize("name", presets.PLANNED)
def test_a_planned_model_has_the_published_parameters(name):
    config = presets.get(name).config
    total, active = _PUBLISHED[name]
    assert config.name == name
    assert weights.num_parameters(config) == pytest.approx(total * 1e9, rel=0.004)
    assert weights.num_active_parameters(config) == pytest.approx(active * 1e9, rel=0.025)


def test_parameters_that_are_published_to_the_last():
    counts = {name: weights.num_parameters(presets.get(name).config) for name in presets.PLANNED}
    assert counts["mixtral-8x7b"] == 46_702_792_704
    assert counts["deepseek-v2"] == 235_741_434_880
    assert presets.get("hunyuan-large").config.tied
    assert counts["mamba2-2.7b"] == 2_702_599_680


@pytest.mark.parametrize("name", presets.PLANNED)
def test_a_planned_model_is_refused_before_anything_is_fetched(name):
    with pytest.raises(InputError, match=f"{name} can be planned .* not run yet: .* smollm2-135m"):
        resolve.resolve(name)
    with pytest.raises(InputError, match="the (mixer|ffn) '.*' is planned but does not run"):
        decoder.param_infos(presets.get(name).config)


def test_latent_attention_caches_576_elements_a_layer():
    """Of 2 x 128 heads x 128 elements: 56.9 times less (DeepSeek-V2, section 2.1)."""
    config = presets.get("deepseek-v2").config
    assert {spec.elements_per_token for spec in config.cache_specs} == {576}
    assert round(2 * 128 * 128 / 576, 1) == 56.9
    assert cost.cache_bytes_per_token(config) == 60 * 576 * 2


def test_caches_of_the_other_kinds():
    per_token = {name: cost.cache_bytes_per_token(presets.get(name).config)
                 for name in presets.PLANNED}  # fmt: skip
    assert per_token["mixtral-8x7b"] == 32 * 2 * 8 * 128 * 2
    assert per_token["deepseek-v3.2"] == 61 * (576 + 128) * 2  # with the indexer's keys
    assert per_token["hunyuan-large"] == 32 * 2 * 8 * 80 * 2  # of every second layer
    assert per_token["granite4-h-small"] == 4 * 2 * 8 * 128 * 2
    assert per_token["mamba2-2.7b"] == 0
    mamba = presets.get("mamba2-2.7b").config
    assert cost.cache_bytes(mamba, 1) == cost.cache_bytes(mamba, 100_000)
    assert cost.cache_bytes(mamba, 1) == 64 * 4 * (5120 * 128 + 3 * (5120 + 2 * 128))
