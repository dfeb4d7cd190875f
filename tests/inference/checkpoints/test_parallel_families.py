"""Families whose feed-forward reads beside attention, and their relatives with layer norms: what
their files may say, and what is refused by name.
"""

from pathlib import Path

import pytest

from configs.errors import InputError
from configs.kinds.params import leaves
from configs.kinds.rope import Linear, Rope
from inference.checkpoints import mapped
from inference.checkpoints.hf import config_json
from inference.families import families
from inference.families.shared.gguf_keys import GgufKeys

GOLDEN = Path(__file__).parents[2] / "golden"
# The keys of published files that say something about the mathematics, and billions of parameters.
PUBLISHED = {
    "command-r-v01": ({
        "architectures": ["CohereForCausalLM"], "attention_bias": False, "hidden_act": "silu",
        "hidden_size": 8192, "intermediate_size": 22528, "layer_norm_eps": 1e-05,
        "logit_scale": 0.0625, "max_position_embeddings": 8192, "model_max_length": 131072,
        "num_attention_heads": 64, "num_hidden_layers": 40, "num_key_value_heads": 64,
        "rope_theta": 8000000.0, "use_qk_norm": False, "vocab_size": 256000,
    }, 34.98),
    "command-r7b": ({
        "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "layer_norm_eps": 1e-05, "layer_switch": 4, "logit_scale": 0.25,
        "max_position_embeddings": 8192, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000,
        "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4,
        "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
        "use_parallel_embedding": True, "vocab_size": 256000,
    }, 8.028),
    "phi-2": ({
        "architectures": ["PhiForCausalLM"], "hidden_act": "gelu_new", "hidden_size": 2560,
        "intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "partial_rotary_factor": 0.4, "qk_layernorm": False, "rope_scaling": None,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 51200,
    }, 2.7797),
    "pythia-1.4b": ({
        "architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "hidden_size": 2048,
        "intermediate_size": 8192, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
        "num_attention_heads": 16, "num_hidden_layers": 24, "rotary_emb_base": 10000,
        "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True,
        "vocab_size": 50304,
    }, 1.4146),
    "gpt-neox-20b": ({
        "architectures": ["GPTNeoXForCausalLM"], "attention_probs_dropout_prob": 0,
        "hidden_act": "gelu_fast", "hidden_size": 6144, "intermediate_size": 24576,
        "layer_norm_eps": 1e-05, "max_position_embeddings": 2048, "num_attention_heads": 64,
        "num_hidden_layers": 44, "rotary_emb_base": 10000, "rotary_pct": 0.25,
        "tie_word_embeddings": False, "vocab_size": 50432,
    }, 20.555),
    "stablelm-2-12b": ({
        "architectures": ["StableLmForCausalLM"], "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 13824, "layer_norm_eps": 1e-05, "max_position_embeddings": 4096,
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8,
        "partial_rotary_factor": 0.25, "qk_layernorm": True, "rope_theta": 10000,
        "tie_word_embeddings": False, "use_parallel_residual": True, "use_qkv_bias": False,
        "vocab_size": 100352,
    }, 12.143),
    "stablelm-2-1.6b": ({
        "architectures": ["StableLmForCausalLM"], "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 5632, "layer_norm_eps": 1e-05, "max_position_embeddings": 4096,
        "num_attention_heads": 32, "num_hidden_layers": 24, "num_key_value_heads": 32,
        "partial_rotary_factor": 0.25, "rope_theta": 10000, "tie_word_embeddings": False,
        "use_qkv_bias": True, "vocab_size": 100352,
    }, 1.6445),
    "starcoder2-3b": ({
        "architectures": ["Starcoder2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 3072, "intermediate_size": 12288, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 16384, "mlp_type": "default", "norm_epsilon": 1e-05,
        "norm_type": "layer_norm", "num_attention_heads": 24, "num_hidden_layers": 30,
        "num_key_value_heads": 2, "rope_theta": 999999.4420358813, "sliding_window": 4096,
        "use_bias": True, "vocab_size": 49152,
    }, 3.0304),
    "falcon-7b": ({
        "alibi": False, "architectures": ["FalconForCausalLM"], "bias": False,
        "hidden_size": 4544, "layer_norm_epsilon": 1e-05, "multi_query": True,
        "new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32,
        "parallel_attn": True, "vocab_size": 65024,
    }, 6.9217),
    "falcon-40b": ({
        "alibi": False, "architectures": ["FalconForCausalLM"], "bias": False,
        "hidden_size": 8192, "layer_norm_epsilon": 1e-05, "new_decoder_architecture": True,
        "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8,
        "parallel_attn": True, "vocab_size": 65024,
    }, 41.303),
}  # fmt: skip


def parse(raw: dict, **changes):
    """A model by its keys, some of them changed."""
    return config_json.parse(raw | changes, Path("/models/tiny"))


def tiny(checkpoint: str, **changes):
    return parse(mapped.read_json(GOLDEN / checkpoint / "config.json"), **changes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    raw, billions = PUBLISHED[name]
    parameters = sum(info.elements for _, info in leaves(parse(raw).parameters()))
    assert parameters / 1e9 == pytest.approx(billions, rel=1e-3)


def test_windows_of_command_r7b():
    model = parse(PUBLISHED["command-r7b"][0])
    windows = [layer.mixer.window for layer in model.layers]
    assert windows == [4096, 4096, 4096, None] * 8
    assert [layer.mixer.rope is None for layer in model.layers] == [False, False, False, True] * 8
    assert parse(PUBLISHED["command-r7b"][0], sliding_window=None).layers[0].mixer.rope is None


def test_the_context_of_command_r():
    assert parse(PUBLISHED["command-r-v01"][0]).max_context == 131072


@pytest.mark.parametrize(
    "checkpoint, changes, message",
    [
        ("cohere2-gqa-window-tied", {"use_qk_norm": True}, "use_qk_norm=True is not supported"),
        ("cohere2-gqa-window-tied", {"rotary_pct": 0.5}, "rotary_pct=0.5 is not supported"),
        (
            "cohere2-gqa-window-tied",
            {"position_embedding_type": "rope_neox"},
            "position_embedding_type='rope_neox' is not supported",
        ),
        ("cohere-gqa-norms-tied", {"logit_scale": 0}, "logit_scale must be positive"),
        ("falcon-mqa-tied-float32", {"alibi": True}, "alibi=True is not supported"),
        ("phi-mha-untied", {"qk_layernorm": True}, "qk_layernorm=True is not supported"),
        (
            "phi-mha-untied",
            {"hidden_act": "relu"},
            "hidden_act='relu' is not supported; valid: gelu",
        ),
    ],
)
def test_what_is_refused(checkpoint, changes, message):
    with pytest.raises(InputError, match=message):
        tiny(checkpoint, **changes)


@pytest.mark.parametrize("architecture", ["phi2", "gptneox", "stablelm", "nemotron"])
def test_stretched_positions_of_a_gguf_file_keep_their_share(architecture):
    stated = {
        "attention.head_count": 4, "attention.head_count_kv": 4, "embedding_length": 32,
        "feed_forward_length": 48, "block_count": 1, "rope.dimension_count": 4,
        "rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "use_parallel_residual": True,
        "attention.layer_norm_epsilon": 1e-5, "rope.freq_base": 5000.0, "context_length": 64,
    }  # fmt: skip
    metadata = {f"{architecture}.{key}": value for key, value in stated.items()}
    _, reader = families.gguf_readers()[architecture]
    mixer = reader.build(GgufKeys(architecture, metadata))["pattern"][0].mixer
    assert mixer.rope == Rope(5000.0, Linear(4.0), share=0.5)
