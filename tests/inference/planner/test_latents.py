"""Latent attention beside what it replaces."""

from configs import presets
from inference.planner import latents

_V2 = presets.get("deepseek-v2").config


def _elements(config) -> int:
    return config.cache_specs[0].elements_per_token


def test_caches_of_the_same_heads():
    """DeepSeek-V2 (arXiv 2405.04434, section 2.1.4): as much as GQA with 2.25 groups."""
    kept = _elements(_V2)
    assert kept == 512 + 64
    assert _elements(latents.with_attention(_V2, 128)) == 2 * 128 * 128
    assert f"{2 * 128 * 128 / kept:.4g}" == "56.89"
    assert _elements(latents.with_attention(_V2, 8)) / kept * 2.25 == 8
    assert latents.with_attention(_V2, 8).layers[3].ffn == _V2.layers[3].ffn
