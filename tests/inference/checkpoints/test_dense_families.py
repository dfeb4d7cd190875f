"""Dense relatives of Llama: what their files may say, and what is refused by name."""

import math
from pathlib import Path

import pytest

from configs.errors import InputError
from configs.kinds.params import leaves
from configs.kinds.rope import Llama3, Rope
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
    "seed-oss-36b": ({
        "architectures": ["SeedOssForCausalLM"], "attention_bias": True,
        "attention_out_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 27648, "max_position_embeddings": 524288, "mlp_bias": False,
        "num_attention_heads": 80, "num_hidden_layers": 64, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0,
        "tie_word_embeddings": False, "vocab_size": 155136,
    }, 36.15),
    "exaone4-32b": ({
        "architectures": ["Exaone4ForCausalLM"], "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 5120, "intermediate_size": 27392, "max_position_embeddings": 131072,
        "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 1000000, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": False, "vocab_size": 102400,
    }, 32.00),
    "exaone4-1.2b": ({
        "architectures": ["Exaone4ForCausalLM"], "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 4096, "layer_types": ["full_attention"] * 30,
        "max_position_embeddings": 65536, "num_attention_heads": 32, "num_hidden_layers": 30,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
        "sliding_window": None, "sliding_window_pattern": None, "tie_word_embeddings": True,
        "vocab_size": 102400,
    }, 1.279),
    "afm-4.5b": ({
        "architectures": ["ArceeForCausalLM"], "attention_bias": False, "head_dim": 128,
        "hidden_act": "relu2", "hidden_size": 2560, "intermediate_size": 18432,
        "max_position_embeddings": 65536, "mlp_bias": False, "num_attention_heads": 20,
        "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "type": "yarn",
        },
        "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 128004,
    }, 4.62),
    "glm4-9b-0414": ({
        "architectures": ["Glm4ForCausalLM"], "attention_bias": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13696,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 151552,
    }, 9.40),
    "glm4-32b-0414": ({
        "architectures": ["Glm4ForCausalLM"], "attention_bias": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 23040,
        "max_position_embeddings": 32768, "num_attention_heads": 48, "num_hidden_layers": 61,
        "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 151552,
    }, 32.57),
    "glm-4-9b-chat-hf": ({
        "architectures": ["GlmForCausalLM"], "attention_bias": True, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13696,
        "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "vocab_size": 151552,
    }, 9.40),
    "gemma-2b": ({
        "architectures": ["GemmaForCausalLM"], "attention_bias": False, "head_dim": 256,
        "hidden_act": "gelu", "hidden_activation": None, "hidden_size": 2048,
        "intermediate_size": 16384, "max_position_embeddings": 8192, "num_attention_heads": 8,
        "num_hidden_layers": 18, "num_key_value_heads": 1, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000,
    }, 2.506),
    "gemma-7b": ({
        "architectures": ["GemmaForCausalLM"], "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072, "intermediate_size": 24576,
        "max_position_embeddings": 8192, "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
        "vocab_size": 256000,
    }, 8.538),
    "mimo-7b-rl": ({
        "architectures": ["MiMoForCausalLM"], "attention_bias": True,
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 32768, "max_window_layers": 36, "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 640000, "sliding_window": 32768,
        "tie_word_embeddings": False, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151680,
    }, 7.625),
    "helium-1-2b": ({
        "architectures": ["HeliumForCausalLM"], "attention_bias": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 7040,
        "max_position_embeddings": 4096, "mlp_bias": False, "num_attention_heads": 20,
        "num_hidden_layers": 24, "num_key_value_heads": 20, "rms_norm_eps": 1e-08,
        "rope_theta": 100000.0, "tie_word_embeddings": False, "vocab_size": 48000,
    }, 2.173),
    "internlm2-7b": ({
        "architectures": ["InternLM2ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_internlm2.InternLM2Config"}, "bias": False,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 1.0, "type": "dynamic"}, "rope_theta": 1000000,
        "tie_word_embeddings": False, "vocab_size": 92544,
    }, 7.738),
    "olmo-7b-0424": ({
        "architectures": ["OlmoForCausalLM"], "attention_bias": False, "clip_qkv": 8.0,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "rope_scaling": None, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "vocab_size": 50304,
    }, 6.888),
    "minitron-4b": ({
        "architectures": ["NemotronForCausalLM"], "attention_bias": False, "head_dim": 128,
        "hidden_act": "relu2", "hidden_size": 3072, "intermediate_size": 9216,
        "max_position_embeddings": 4096, "mlp_bias": False, "norm_eps": 1e-05,
        "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5, "rope_theta": 10000, "tie_word_embeddings": False,
        "vocab_size": 256000,
    }, 4.191),
    "internlm3-8b": ({
        "architectures": ["InternLM3ForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_internlm3.InternLM3Config"}, "bias": False,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10240,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 48,
        "num_key_value_heads": 2, "qkv_bias": False, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "rope_theta": 50000000,
        "tie_word_embeddings": False, "vocab_size": 128512,
    }, 8.804),
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


def test_positions_of_apertus_are_stretched_where_nothing_is_said():
    stated = tiny("apertus-gqa-rope3", rope_theta=None, rope_scaling=None).layers[0].mixer.rope
    assert stated == Rope(1.2e7, Llama3(8.0, 1.0, 4.0, 8192))
    assert tiny("apertus-gqa-rope3", rope_scaling=None).layers[0].mixer.rope == Rope(500.0)


def test_windows_by_letters_and_by_a_period():
    def windows(**changes):
        model = tiny("exaone4-gqa-window", layer_types=None, num_hidden_layers=5, **changes)
        return [layer.mixer.window for layer in model.layers]

    assert windows() == windows(sliding_window_pattern=3) == [24, 24, None, 24, 24]
    assert windows(sliding_window_pattern=None) == [24, 24, 24, None, 24]
    assert windows(sliding_window=None) == [None] * 5
    larger = parse(PUBLISHED["exaone4-32b"][0]).layers
    assert [layer.mixer.rope is None for layer in larger] == [False, False, False, True] * 16
    assert all(layer.mixer.rope for layer in parse(PUBLISHED["exaone4-1.2b"][0]).layers)


def test_biases_of_internlm3_have_two_keys():
    def biases(**changes):
        layer = tiny("internlm3-gqa-linear-rope", **changes).layers[0]
        return layer.mixer.biases, layer.ffn.has_bias

    assert biases() == ((), False)
    assert biases(qkv_bias=True) == (("qkv",), False)
    assert biases(bias=True, qkv_bias=None, attention_bias=True) == (("out",), True)


REFUSED = {
    "activations": ("gemma-gqa-tied", {"hidden_activation": "gelu"}, "hidden_activation='gelu' is"),
    "no biases": ("mimo-gqa-predicting", {"attention_bias": False}, "attention_bias=False is not"),
    "letters": (
        "exaone4-gqa-window",
        {"layer_types": None, "sliding_window_pattern": "LXG"},
        "sliding_window_pattern has letters L and G, or is a period, not 'LXG'",
    ),
    "no norms of heads": (
        "apertus-gqa-rope3",
        {"qk_norm": False},
        "qk_norm=False is not supported",
    ),
    "activation": ("arcee-gqa-yarn", {"hidden_act": "silu"}, "hidden_act='silu' is not supported"),
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
