"""Dense relatives of Llama: what their files may say, and what is refused by name."""

import math
from pathlib import Path

import pytest

from configs.errors import InputError
from configs.kinds.params import leaves
from configs.kinds.rope import Rope
from inference.checkpoints import mapped
from inference.checkpoints.hf import config_json

GOLDEN = Path(__file__).parents[2] / "golden"
# The keys of published files that say something about the mathematics, and billions of parameters.
PUBLISHED = {
    "hunyuan-7b": ({
        "architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": False,
        "attention_head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "type": "dynamic",
        },
        "rope_theta": 10000.0, "tie_word_embeddings": True, "use_cla": False, "use_qk_norm": True,
        "vocab_size": 128167,
    }, 7.505),
}  # fmt: skip


def parse(raw: dict, **changes):
    """A model by its keys, some of them changed."""
    return config_json.parse(raw | changes, Path("/models/tiny"))


def tiny(checkpoint: str, **changes):
    return parse(mapped.read_json(GOLDEN / checkpoint / "config.json"), **changes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_has_its_parameters(name):
    raw, billions = PUBLISHED[name]
    count = sum(math.prod(info.shape) for _, info in leaves(parse(raw).parameters()))
    assert count / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_base_is_stretched_once():
    rope = parse(PUBLISHED["hunyuan-7b"][0]).layers[0].mixer.rope
    assert rope == Rope(10_000.0 * 1000.0 ** (128 / 126))
    assert tiny("hunyuan_v1_dense-gqa-alpha").layers[0].mixer.rope == Rope(320_000.0)


REFUSED = {
    "cross-layer attention": ("hunyuan_v1_dense-gqa-alpha", {"use_cla": True}, "use_cla=True is"),
    "kind of alpha": (
        "hunyuan_v1_dense-gqa-alpha",
        {"rope_scaling": {"type": "yarn", "alpha": 4.0}},
        "rope_scaling: type='yarn' is not supported; valid: dynamic",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_named(case):
    checkpoint, changes, cause = REFUSED[case]
    with pytest.raises(InputError, match=cause):
        tiny(checkpoint, **changes)
