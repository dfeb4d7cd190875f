"""Parts of a model that contradict each other are refused in one line."""

import pytest

from configs.errors import InputError
from configs.kinds.rope import Dynamic, Linear, Llama3, LongRope, Rope, Yarn
from configs.model import LayerSpec, ModelConfig

_STILL = (LayerSpec(rope=None),)
_BAD_MODELS = {
    "norm": ({"norm": "batch"}, "model.norm is 'rms' or 'layer', not 'batch'"),
    "qk norm": ({"qk_norm": "none"}, "qk_norm is None or 'head' or 'all', not 'none'"),
    "activation": ({"activation": "relu"}, "'silu' or 'gelu_tanh', not 'relu'"),
    "bias": ({"biases": ("q",)}, "model.biases names each of qkv, out, ffn at most once"),
    "bias twice": ({"biases": ("ffn", "ffn")}, "at most once"),
    "no norms": ({"pre_norms": False}, "pre_norms, model.post_norms or both"),
    "offset": ({"norm": "layer", "norm_offset": 1.0}, "no norm_offset and no qk_norm"),
    "head norms": ({"norm": "layer", "qk_norm": "head"}, "no norm_offset and no qk_norm"),
    "cap": ({"score_cap": 0.0}, "model.score_cap is a finite number above 0, not 0.0"),
    "logits": ({"logit_cap": float("inf")}, "model.logit_cap is a finite number"),
    "positions": ({"learned_positions": 9, "pattern": _STILL}, "max_context=64 exceeds the 9"),
    "both": ({"learned_positions": 64}, "learned positions go with layers without rope"),
}
_BAD_ROPES = {
    "linear": (lambda: Linear(0.0), "rope factor is a finite number above 0, not 0.0"),
    "llama3": (lambda: Llama3(8.0, 4.0, 1.0), "low_freq_factor=4.0 is below high_freq_factor=1.0"),
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
        ModelConfig("m", "llama", 31, 12, 20, 2, 4, 2, 6, max_context=64, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", _BAD_ROPES)
def test_unsound_rope_is_refused(case):
    make, cause = _BAD_ROPES[case]
    with pytest.raises(InputError, match=cause) as caught:
        make()
    assert "\n" not in str(caught.value)
