"""Layers of two mixers and of none: what is predicted of them is what is allocated and compiled."""

import dataclasses

import jax
import pytest

from configs import presets
from configs.engine import Config, EngineConfig
from configs.kinds.attention import Attention
from configs.kinds.combined import NoMixer, Parallel
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.recurrent.mamba import Mamba2
from configs.mesh import Mesh
from configs.model import LayerSpec, ModelConfig
from configs.weights import UNPUBLISHED, Preset
from inference.planner import cost, weights
from layers import kv_cache, params
from tests import fakes
from tests.inference.planner import test_compiled_cost

HYBRID = fakes.hybrid()


def _model(name: str, *pattern: LayerSpec) -> ModelConfig:
    return ModelConfig(name, "llama", 4096, 1024, len(pattern), 4096, pattern)


_STATE = Mamba2(32, 64, 32, num_groups=2, norm_width=1024, part_scales=(0.5, 0.6, 0.7, 0.8, 0.9))
_ROUTER = Router("sigmoid", has_offsets=True)
_PLAIN = Experts(16, 4, 512, _ROUTER, 1024, activation="relu2", is_gated=False)
_LATENT = dataclasses.replace(_PLAIN, latent_width=512, shared_bias=True)
_MODELS = {
    "parallel": _model(
        "parallel",
        LayerSpec(Parallel(Attention(8, 2, 128), _STATE), Gated(4096, gate_scale=0.8)),
    ),
    "one part": _model(
        "one part",
        LayerSpec(_STATE, None), LayerSpec(Attention(8, 2, 128, rope=None), None),
        LayerSpec(NoMixer(), Plain(4096, "relu2")), LayerSpec(NoMixer(), _PLAIN),
    ),
    "latent": _model("latent", LayerSpec(NoMixer(), _LATENT)),
}  # fmt: skip


@pytest.mark.quick_code
@pytest.mark.parametrize(
    "name, shape",
    [
        ("parallel", test_compiled_cost.DECODE), ("parallel", test_compiled_cost.PREFILL),
        ("one part", test_compiled_cost.DECODE), ("latent", test_compiled_cost.PREFILL),
    ],
    ids=["parallel-decode", "parallel-prefill", "one-part-decode", "latent-prefill"],
)  # fmt: skip
def test_a_step_is_what_the_compiler_says(name, shape, monkeypatch):
    monkeypatch.setitem(presets.NAMES, name, Preset(_MODELS[name], UNPUBLISHED))
    with fakes.no_draws():
        test_compiled_cost.check(name, shape)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(model=2), Mesh(model=2, expert=2)], ids=str)
def test_predicted_bytes_are_allocated(mesh):
    config = Config(HYBRID, EngineConfig.of(max_seqs=3, num_drafts=2), mesh)
    model = config.chip_model
    told = model, config.num_pages, config.page_tokens, 3, 2
    leaves = kv_cache.abstract(*told, num_snapshots=config.num_snapshots)
    assert config.pool_bytes == sum(leaf.size * leaf.dtype.itemsize for leaf in
                                    jax.tree.leaves(leaves))  # fmt: skip
    assert weights.weight_bytes(model) == params.num_bytes(model.parameters())


def test_a_cache_of_two_parts_is_divided_as_each():
    """Two heads of keys and values, of which more chips hold copies, and a state's four."""
    both = HYBRID.layers[0].mixer
    assert isinstance(both, Parallel)
    (pages, kv_heads), (states, heads) = both.cached(HYBRID)
    assert (kv_heads, heads) == (2, 4) and not pages.states and not states.elements_per_token
    alone = HYBRID.layers[1].mixer.cache(HYBRID).bytes_per_sequence()
    paged, kept = 100 * 2 * 2 * 8 * 4, states.bytes_per_sequence() + alone
    for chips in (1, 2, 4):
        num_bytes = cost.cache_bytes(HYBRID, 100, chips=chips)
        assert num_bytes == paged / min(chips, 2) + kept / chips
    assert cost.cache_bytes_per_token(HYBRID) == 2 * 2 * 8 * 4


def test_fields_of_both_mixers_are_changed_together():
    changed = HYBRID.with_kinds(num_groups=1, num_kv_heads=4, in_scales=(1.0, 1.0))
    both = changed.layers[0].mixer
    assert isinstance(both, Parallel) and both.in_scales == (1.0, 1.0)
    assert both.attention.num_kv_heads == 4
    assert [state.num_groups for state in changed.mixers(Mamba2)] == [1, 1]
    assert HYBRID.divided == {4, 12, 14, 36, 40}
    assert sorted(HYBRID.cached_heads) == [2, 4, 4]
