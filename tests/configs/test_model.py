"""Parts of a model that contradict each other are refused in one line."""

import dataclasses

import pytest

from configs.errors import InputError
from configs.kinds import params
from configs.kinds.attention import Attention
from configs.kinds.combined import Parallel
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.kind import Mixer
from configs.kinds.latent import Indexer, Latent
from configs.kinds.layer_inputs import LayerInputs
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.selective import Mamba
from configs.kinds.recurrent.short_conv import ShortConv
from configs.kinds.rope import Dynamic, Linear, Llama3, LongRope, Proportional, Rope, Yarn
from configs.kinds.temperature import Temperature
from configs.model import LayerSpec, ModelConfig

_LAYER = LayerSpec(Attention(4, 2, 6), Gated(20))
_STILL = LayerSpec(Attention(4, 2, 6, rope=None), Gated(20))
_NORMED = LayerSpec(Attention(4, 2, 6, qk_norm="head"), Gated(20))
_RECURRENT = LayerSpec(Mamba2(2, 4, 4), None)
_BAD_MODELS = {
    "norm": ({"norm": "batch"}, "'layer' or 'layer_unbiased' or 'layer_bare', not 'batch'"),
    "parallel parts": (
        {
            "pattern": (dataclasses.replace(_LAYER, parallel_norms=1),),
            "pre_norms": False,
            "post_norms": True,
        },
        "parallel_norms go with model.pre_norms that a mixer reads",
    ),
    "no norms": ({"pre_norms": False}, "pre_norms, model.post_norms or both"),
    "offset": ({"norm": "layer_bare", "norm_offset": 1.0}, "'layer_bare' goes with no norm_offset"),
    "bare": (
        {"norm": "layer_bare", "layer_inputs": LayerInputs(4)},
        "norms without weights stand around",
    ),
    "head norms": ({"norm": "layer", "pattern": (_NORMED,)}, "qk_norm='head' goes with model.norm"),
    "logits": ({"logit_cap": float("inf")}, "model.logit_cap is a finite number"),
    "factors": (
        {
            "pre_norms": False,
            "post_norms": True,
            "pattern": (dataclasses.replace(_LAYER, factors=((1.0, 1.0), (1.0, 1.0))),),
        },
        "a layer with factors goes on from norms of what its parts read",
    ),
    "two attentions": (
        {"pattern": (LayerSpec(Parallel(Attention(4, 2, 6), Attention(4, 2, 6)), None),)},
        "parallel recurrent is a mixer with states alone, not attention",
    ),
    "residuals": ({"residual_scale": 0.0}, "model.residual_scale is a finite number above 0"),
    "scaled logits": ({"logit_scale": -1.0}, "model.logit_scale is a finite number above 0"),
    "positions": ({"learned_positions": 9, "pattern": (_STILL,)}, "max_context=64 exceeds the 9"),
    "heads of an owner": (
        {"pattern": (_LAYER, LayerSpec(Attention(4, 4, 6, owner=0), None))},
        "num_kv_heads=4 and head_width=6 reads layer 0's cache, which holds something else",
    ),
    "width of an owner": (
        {"pattern": (_LAYER, LayerSpec(Attention(4, 2, 8, owner=0), None))},
        "head_width=8 reads",
    ),
    "window of an owner": (
        {"pattern": (_LAYER, LayerSpec(Attention(4, 2, 6, window=3, owner=0), None))},
        "window=3 is layer 0's to say, whose cache is read: None",
    ),
    "rope of an owner": (
        {"pattern": (_LAYER, LayerSpec(Attention(4, 2, 6, Rope(500.0), owner=0), None))},
        r"attention with rope=Rope\(theta=500.0, .* reads keys that were rotated by Rope\(",
    ),
    "latents of an owner": (
        {
            "pattern": (
                LayerSpec(Latent(4, 16, 8, 8, 8), None),
                LayerSpec(Latent(4, 12, 8, 8, 8, owner=0), None),
            )
        },
        "latent with rank=12 and rope_width=8 reads layer 0's cache, which holds something else",
    ),
    "state of an owner": (
        {"pattern": (_RECURRENT, LayerSpec(Attention(4, 2, 6, owner=0), None))},
        "something else",
    ),
    "both": ({"learned_positions": 64}, "learned positions go with layers without rope"),
}
_BAD_KINDS = {
    "qk norm": (lambda: Attention(4, 2, 6, qk_norm="none"), "'plain' or 'each', not 'none'"),
    "scaled values of others": (
        lambda: Attention(4, 2, 6, value_scale=0.5, owner=0),
        "value_scale: leave it out with owner",
    ),
    "narrow gated values": (
        lambda: Attention(4, 2, 6, value_width=4, has_output_gate=True),
        "goes without has_output",
    ),
    "temperature": (lambda: Temperature(0.1, 0), "temperature length is at least 1, not 0"),
    "cold": (lambda: Temperature(-0.1, 8), "temperature scale is a finite number above 0"),
    "rotates": (lambda: Attention(4, 2, 6, rotates_first=True), "goes with a qk_norm and a rope"),
    "heads": (lambda: Attention(3, 2, 6), "num_heads=3 is not a multiple of num_kv_heads=2"),
    "no heads": (lambda: Attention(0, 2, 6), "attention num_heads is at least 1, not 0"),
    "bias": (lambda: Attention(4, 2, 6, biases=("q",)), "names each of qkv, out at most once"),
    "bias twice": (lambda: Attention(4, 2, 6, biases=("out", "out")), "at most once"),
    "cap": (lambda: Attention(4, 2, 6, score_cap=0.0), "score_cap is a finite number above 0"),
    "pairs": (lambda: Attention(4, 2, 5), "head_width is even where attention rotates, not 5"),
    "activation": (lambda: Gated(20, "relu"), "gated activation is 'silu' or 'gelu_tanh', not"),
    "width": (lambda: Plain(0), "plain width is at least 1, not 0"),
    "experts": (lambda: Experts(4, 5, 8), "experts top_k is at most num_experts=4, not 5"),
    "shared": (lambda: Experts(4, 2, 8, shared_width=-1), "shared_width is at least 1, not -1"),
    "shared gate": (lambda: Experts(4, 2, 8, has_shared_gate=True), "goes with a shared_width"),
    "norms": (lambda: Experts(4, 2, 8, has_norms=True), "has_norms goes with a shared_width"),
    "limit": (lambda: Experts(4, 2, 8, limit=-1.0), "experts limit is a finite number above 0"),
    "one by one": (
        lambda: Router(jitter=0.02),
        "router jitter goes with softmax scores alone, not",
    ),
    "scores": (lambda: Router("relu"), "router scores is 'softmax' or 'sigmoid' or "),
    "top groups": (lambda: Router(top_groups=2), "top_groups is at most num_groups=1, not 2"),
    "groups": (lambda: Experts(4, 2, 8, Router(num_groups=3)), "num_groups=3 does not divide num"),
    "group best": (
        lambda: Experts(4, 1, 8, Router(num_groups=2, group_best=3)),
        "group_best=3 exceeds the 2 experts of a group",
    ),
    "few groups": (
        lambda: Experts(4, 3, 8, Router(num_groups=2, has_offsets=True)),
        "top_k=3 exceeds the 2 experts of top_groups=1",
    ),
    "most": (lambda: Gated(1 << 25), "gated width is at most 16777216, not 33554432"),
    "indexer": (lambda: Indexer(3, 24, 0), "indexer top_k is at least 1, not 0"),
    "query rank": (lambda: Latent(4, 9, 8, 8, 8, query_rank=0), "query_rank is at least 1, not 0"),
    "rank": (lambda: Latent(4, 0, 8, 8, 8), "latent rank is at least 1, not 0"),
    "latent pairs": (lambda: Latent(4, 16, 7, 8, 8), "head_width is even where attention rotates"),
    "one tap": (lambda: ShortConv(8, 1), "short_conv conv_width is at least 2: one tap keeps noth"),
    "no taps": (lambda: ShortConv(8, 0), "short_conv conv_width is at least 1, not 0"),
    "one factor": (
        lambda: dataclasses.replace(_LAYER, factors=((1.0, 1.0),)),
        "a layer's factors are its mixer's and its ffn's, not",
    ),
    "state": (lambda: Mamba2(2, 4, 0), "mamba2 state_width is at least 1, not 0"),
    "steps": (lambda: Mamba2(2, 4, 4, step_limits=(0.5, 0.5)), "step_limits are at least 0 and"),
    "endless": (lambda: Mamba2(2, 4, 4, step_limits=(0.0, float("inf"))), "step_limits are at"),
    "parts": (lambda: Mamba2(2, 4, 4, part_scales=(1.0,)), "part_scales are five finite numbers"),
    "of a part": (lambda: Mamba2(2, 4, 4, part_scales=(0.0,) * 5), "part_scales are five finite"),
    "keys": (lambda: Attention(4, 2, 6, key_scale=0.0), "key_scale is a finite number above 0"),
    "gates": (lambda: Gated(20, gate_scale=-1.0), "gated gate_scale is a finite number above 0"),
    "squares": (lambda: Gated(20, "relu2"), "gated activation is 'silu' or 'gelu_tanh', not"),
    "other squares": (lambda: Experts(4, 2, 8, activation="relu2"), "experts activation is 'silu'"),
    "two kinds of limits": (
        lambda: Experts(4, 2, 8, limit=1.0, late_limits=(2.0, None)),
        "experts late_limits go with no limit and no up_offset",
    ),
    "late limits": (
        lambda: Experts(4, 2, 8, late_limits=(-1.0, None)),
        r"late_limits are finite numbers above 0 or None, not \(-1.0, None\)",
    ),
    "no gate": (lambda: Experts(4, 2, 8, is_gated=False, limit=1.0), "go with is_gated=True"),
    "bias of none": (lambda: Experts(4, 2, 8, shared_bias=True), "goes with a shared_width or a"),
    "latent": (lambda: Experts(4, 2, 8, latent_width=-1), "latent_width is at least 1, not -1"),
    "latent norms": (
        lambda: Experts(4, 2, 8, latent_width=4, shared_width=8, has_norms=True),
        "has_norms goes with no latent_width",
    ),
    "sharer": (
        lambda: Parallel(Attention(4, 2, 6, owner=0), Mamba2(2, 4, 4)),
        "parallel attention reads its own cache: leave owner out",
    ),
    "both scales": (
        lambda: Parallel(Attention(4, 2, 6), Mamba2(2, 4, 4), out_scales=(1.0, 0.0)),
        "parallel out_scales are finite numbers above 0",
    ),
    "channels": (lambda: Mamba(0, 4, 2), "mamba channels is at least 1, not 0"),
    "bias of states": (
        lambda: Mamba(8, 4, 2, biases=("dt",)),
        "names each of in, conv, out at most",
    ),
    "norms of states": (lambda: Mamba(8, 4, 2, norms="rms"), "norms is None or 'plain' or 'weight"),
    "no norms": (lambda: Mamba(8, 4, 2, norm_eps=1e-6), "goes with norms, not with norms=None"),
    "inputs": (lambda: LayerInputs(0), "layer_inputs width is at least 1, not 0"),
    "gate of inputs": (lambda: LayerInputs(6, "quick_gelu"), "layer_inputs activation is 'silu'"),
    "turning pairs": (lambda: Proportional(1.5), "rope share is at most 1, not 1.5"),
    "none turning": (lambda: Proportional(0.0), "rope share is a finite number above 0, not 0.0"),
    "no mixer": (lambda: LayerSpec("attention", Gated(20)), "mixer is one of .*attention.*, not"),
    "swapped": (lambda: LayerSpec(Gated(20), Attention(4, 2, 6)), "a layer's mixer is one of"),
    "no ffn": (lambda: LayerSpec(Attention(4, 2, 6), "gated"), "ffn is one of .*gated.* or None"),
}
_BAD_ROPES = {
    "linear": (lambda: Linear(0.0), "rope factor is a finite number above 0, not 0.0"),
    "llama3": (lambda: Llama3(8.0, 4.0, 1.0), "low_freq_factor=4.0 is at most high_freq_fac"),
    "dynamic": (lambda: Dynamic(0.5, 64), "at least 1 for dynamic scaling, not 0.5"),
    "yarn": (lambda: Yarn(4.0, 64, attention_factor=-1.0), "attention_factor is a finite number"),
    "lengths": (lambda: LongRope((1.0,), (1.0, 2.0), 64), "1 short and 2 long factors"),
    "factors": (lambda: LongRope((1.0,), (0.0,), 64), "longrope factors are finite numbers"),
    "theta": (lambda: Rope(float("nan")), "rope theta is a finite number above 0"),
    "yarn's base": (lambda: Rope(1.0, Yarn(4.0, 64)), "yarn needs a theta above 1"),
    "share": (lambda: Rope(share=0.0), "rope share is above 0 and at most 1, not 0.0"),
    "pairs": (lambda: Rope(share=0.5).rotating(6), "rope share 0.5 of a head of 6 is 3: not pairs"),
    "divisors": (
        lambda: Rope(scaling=LongRope((1.0,), (2.0,), 64)).rotating(8),
        "longrope has 1 factors for 4 rotating pairs",
    ),
}


@pytest.mark.parametrize("case", _BAD_MODELS)
def test_contradictory_parts_are_refused(case):
    changes, cause = _BAD_MODELS[case]
    with pytest.raises(InputError, match=cause) as caught:
        ModelConfig("m", "llama", 31, 12, 2, **{"max_context": 64, "pattern": (_LAYER,)} | changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", _BAD_KINDS)
def test_unsound_kinds_are_refused_where_they_are_written(case):
    make, cause = _BAD_KINDS[case]
    with pytest.raises(InputError, match=cause) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_two_kinds_do_not_share_a_name():
    with pytest.raises(InputError, match="Attention is named 'attention' already"):

        class Other(Mixer, name="attention"):
            pass


@pytest.mark.parametrize("case", _BAD_ROPES)
def test_unsound_rope_is_refused(case):
    make, cause = _BAD_ROPES[case]
    with pytest.raises(InputError, match=cause) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_on_a_tpu_indexes_stay_integers():
    matrix = params.ParamInfo((4, 64), "bfloat16", (None, None))
    norm = params.ParamInfo((64,), "bfloat16", (None,))
    parts = params.with_formats({"w": matrix}, {"w": ("llm_int8",)})["w"]
    formats = {name: params.device_format(part, "tpu") for name, part in parts.items()}
    assert formats == {"int8": "w8a8", "outliers": "bfloat16", "features": "int32"}
    assert params.device_format(norm, "tpu") == "float32"
