"""Models have the sizes that were published; planned ones are refused by what runs models."""

import dataclasses

import jax
import pytest

from configs import presets
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.model import LayerSpec
from configs.recipes import smaller_caches
from inference.checkpoints import resolve
from inference.planner import cost, weights
from layers import kv_cache

# Totals and active parameters as their authors print them, in billions.
_PUBLISHED = {
    "mixtral-8x7b": (46.7, 12.9),
    "qwen1.5-moe-a2.7b": (14.3, 2.7),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "olmoe-1b-7b": (6.92, 1.28),
    "deepseek-v2": (236, 21),
    "deepseek-v2-lite": (15.7, 2.4),
    "deepseek-v3": (671, 37),
    "glm-4.5-air": (106.85, 12.8),
    "gpt-oss-20b": (20.91, 3.61),
    "gpt-oss-120b": (116.83, 5.13),
    "deepseek-v3.2": (671, 37),
    "hunyuan-large": (389, 52),
    "granite4-h-small": (32.2, 9),
    "mamba2-2.7b": (2.7, 2.7),
}


@pytest.mark.parametrize("name", _PUBLISHED)
def test_a_mixture_or_a_planned_model_has_the_published_parameters(name):
    """Of active ones, some count the embedding."""
    config = presets.get(name).config
    total, active = _PUBLISHED[name]
    assert config.name == name
    assert weights.num_parameters(config) == pytest.approx(total * 1e9, rel=0.004)
    counted = weights.num_active_parameters(config)
    tables = (0, config.vocab_size * config.width)
    assert any(counted + table == pytest.approx(active * 1e9, rel=0.025) for table in tables)


def test_every_planned_model_is_counted():
    assert presets.PLANNED.keys() - {"character-ai"} <= _PUBLISHED.keys()  # whose sizes are not
    assert presets.get("hunyuan-large").config.tied
    assert weights.num_parameters(presets.get("mamba2-2.7b").config) == 2_702_599_680


@pytest.mark.parametrize("name", presets.PLANNED)
def test_a_planned_model_can_be_timed_and_has_no_weights_to_fetch(name):
    resolved = resolve.resolve(name)
    assert resolved.config == presets.get(name).config  # with random weights it can be timed
    with pytest.raises(InputError, match=f"{name} can be planned .* not run: .* smollm2-135m"):
        resolved.open(lambda *_: None)


def test_latent_attention_caches_576_elements_a_layer():
    """Of 2 x 128 heads x 128 elements: 56.9 times less (DeepSeek-V2, section 2.1)."""
    config = presets.get("deepseek-v2").config
    assert {spec.elements_per_token for spec in config.cache_specs} == {576}
    assert round(2 * 128 * 128 / 576, 1) == 56.9
    assert cost.cache_bytes_per_token(config) == 60 * 576 * 2


def test_character_ais_stack_takes_a_small_part_of_mha():
    """What is predicted is allocated; its article claims more than 20 times less."""
    config = presets.get("character-ai").config
    owners = [spec.owner for spec in config.cache_specs]
    assert sum(owner is None for owner in owners) == 18 and owners[6] == 0 and owners[7] == 5
    plain = dataclasses.replace(config, pattern=(LayerSpec(Attention(40, 40, 128), None),))
    token = 2 * 128 * 2  # bytes of one head's key and value
    assert cost.cache_bytes(plain, 8192) == 36 * 8192 * 40 * token
    assert cost.cache_bytes(config, 8192) == (3 * 8192 + 15 * 1024) * token
    assert cost.cache_bytes(plain, 8192) / cost.cache_bytes(config, 8192) > 295
    grouped = smaller_caches.with_kv_heads(plain, 8)
    assert cost.cache_bytes(grouped, 8192) / cost.cache_bytes(config, 8192) > 59
    engine_config = Config(config, EngineConfig.of(max_seqs=2, cache_bytes=1 << 30))
    leaves = kv_cache.abstract(config, engine_config.num_pages, engine_config.page_tokens, 2, 0)
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(leaves)]
    assert sum(sizes) == engine_config.pool_bytes and len(sizes) == 18
    tokens = [engine_config.num_pages[group] * engine_config.page_tokens for group in (0, 1)]
    assert sum(sizes) == (3 * tokens[0] + 15 * tokens[1]) * token


def test_caches_of_the_other_kinds():
    per_token = {name: cost.cache_bytes_per_token(presets.get(name).config)
                 for name in presets.NAMES | presets.PLANNED}  # fmt: skip
    assert per_token["mixtral-8x7b"] == 32 * 2 * 8 * 128 * 2
    assert per_token["deepseek-v3.2"] == 61 * (576 + 128) * 2  # with the indexer's keys
    assert per_token["hunyuan-large"] == 32 * 2 * 8 * 80 * 2  # of every second layer
    assert per_token["granite4-h-small"] == 4 * 2 * 8 * 128 * 2
    assert per_token["mamba2-2.7b"] == 0
    mamba = presets.get("mamba2-2.7b").config
    assert cost.cache_bytes(mamba, 1) == cost.cache_bytes(mamba, 100_000)
    assert cost.cache_bytes(mamba, 1) == 64 * 4 * (5120 * 128 + 3 * (5120 + 2 * 128))
