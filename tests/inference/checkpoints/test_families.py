"""Each preset equals what its published `config.json` says; what is not served is named."""

import dataclasses
from pathlib import Path

import pytest

from configs import presets
from configs.errors import InputError
from configs.kinds.rope import Dynamic, Linear, LongRope, Rope, Yarn
from inference.checkpoints import mapped
from inference.checkpoints.hf import config_export, config_json

GOLDEN = Path(__file__).parents[2] / "golden"

MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
    "quant_method": "mxfp4",
}  # fmt: skip
# The keys of the published files that say something about the mathematics, as they stand there.
PUBLISHED = {
    "gpt2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"],
        "layer_norm_epsilon": 1e-05, "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "vocab_size": 50257,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "qwen2.5-0.5b": {
        "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896,
        "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 21,
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3072,
        "max_position_embeddings": 40960, "max_window_layers": 28, "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "smollm3-3b": {
        "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536, "mlp_bias": False, "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "gemma2-2b": {
        "architectures": ["Gemma2ForCausalLM"], "attention_bias": False,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304, "intermediate_size": 9216, "max_position_embeddings": 8192,
        "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
        "sliding_window": 4096, "vocab_size": 256000,
    },
    "phi3-mini": {
        "architectures": ["Phi3ForCausalLM"], "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "hidden_act": "silu",
        "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False,
        "vocab_size": 32064,
    },
    "olmo2-1b": {
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 8192, "max_position_embeddings": 4096,
        "num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000,
        "tie_word_embeddings": False, "vocab_size": 100352,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "qwen1.5-moe-a2.7b": {
        "architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_act": "silu",
        "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192,
        "max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 16, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3-235b-a22b": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 12288, "max_position_embeddings": 40960, "max_window_layers": 94,
        "mlp_only_layers": [], "moe_intermediate_size": 1536, "norm_topk_prob": True,
        "num_attention_heads": 64, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 94, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "olmoe-1b-7b": {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024,
        "max_position_embeddings": 4096, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "rms_norm_eps": 1e-05, "rope_scaling": None,
        "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 50304,
    },
    "deepseek-v2": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"}, "ep_size": 1,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 5120,
        "intermediate_size": 12288, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 1536, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_attention_heads": 128, "num_experts_per_tok": 6, "num_hidden_layers": 60,
        "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 16.0, "scoring_func": "softmax",
        "tie_word_embeddings": False, "topk_group": 3, "topk_method": "group_limited_greedy",
        "v_head_dim": 128, "vocab_size": 102400,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"}, "ep_size": 1,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy",
        "v_head_dim": 128, "vocab_size": 102400,
    },
    # But for `quantization_config`: it is published in FP8, which is refused.
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekConfig"}, "ep_size": 1,
        "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "v_head_dim": 128, "vocab_size": 129280,
    },
    "glm-4.5-air": {
        "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True,
        "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 10944, "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96,
        "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "quantization_config": MXFP4, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "vocab_size": 201088,
    },
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 18,
        "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "num_local_experts": 128,
        "quantization_config": MXFP4, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
            "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "sliding_window": 128, "swiglu_limit": 7.0,
        "tie_word_embeddings": False, "vocab_size": 201088,
    },
    "olmo3-7b": {
        "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 11008,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
        "max_position_embeddings": 65536, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
            "factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
        "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False,
        "vocab_size": 100278,
    },
    # But for `quantization_config` (FP8 by blocks of 128 x 128).
    "minimax-m2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0,
        "attn_type_list": [1] * 62, "auto_map": {
            "AutoConfig": "configuration_minimax_m2.MiniMaxM2Config",
            "AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM",
        },
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
        "intermediate_size": 1536, "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_beta": 1.0,
        "max_position_embeddings": 196608, "mlp_intermediate_size": 8192,
        "mtp_transformer_layers": 1, "num_attention_heads": 48, "num_experts_per_tok": 8,
        "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
        "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06,
        "rope_theta": 5000000, "rotary_dim": 64, "router_jitter_noise": 0.0,
        "scoring_func": "sigmoid", "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid",
        "sliding_window": None, "tie_word_embeddings": False, "use_mtp": True,
        "use_qk_norm": True, "use_routing_bias": True, "vocab_size": 200064,
    },
}  # fmt: skip


def parse(name: str, **changes):
    """The published configuration with some keys changed."""
    return config_json.parse(PUBLISHED[name] | changes, Path("/models") / name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_what_was_published(name):
    assert parse(name) == presets.get(name).config


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_exported_is_what_was_published(name):
    """Key by key, but for windows that are stated and not used."""
    raw, published = config_export.of_model(presets.get(name).config), PUBLISHED[name]
    unused = set() if published.get("use_sliding_window", True) else {"sliding_window"}
    for key in (raw.keys() & published.keys()) - unused:
        own, stated = raw[key], published[key]
        if isinstance(own, dict):
            assert {k: own[k] for k in own.keys() & stated.keys()} == {
                k: stated[k] for k in own.keys() & stated.keys()
            }, key
        else:
            assert own == stated, key


def test_windows_in_every_spelling():
    def windows(name, **changes):
        return [spec.window for spec in parse(name, num_hidden_layers=4, **changes).cache_specs]

    assert windows("mistral-7b", sliding_window=None) == [None] * 4
    used = {"use_sliding_window": True, "sliding_window": 9}
    assert windows("qwen2.5-0.5b", **used, max_window_layers=3) == [None, None, None, 9]
    assert windows("qwen2.5-0.5b", **used, max_window_layers=0) == [9] * 4
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows("qwen3-0.6b", **used, layer_types=kinds) == [9, None, 9, None]
    assert windows("qwen3-0.6b", sliding_window=9, layer_types=kinds) == [None] * 4
    assert windows("gemma2-2b", sliding_window=9) == [9, None, 9, None]
    assert windows("phi3-mini", sliding_window=None) == [None] * 4
    by_rope = {"layer_types": None, "no_rope_layers": None, "no_rope_layer_interval": 2}
    assert windows("smollm3-3b", **used, **by_rope) == [None, 9, None, 9]
    unused = used | {"use_sliding_window": False}
    assert windows("smollm3-3b", **unused, **by_rope) == [None] * 4
    listed = unused | by_rope | {"layer_types": kinds}  # transformers masks by what is listed
    assert windows("smollm3-3b", **listed) == [9, None, 9, None]


def test_gemma3_stores_a_cap_of_scores_that_transformers_never_applies():
    gemma3 = config_json.read_model(GOLDEN / "gemma3-mqa")
    raw = mapped.read_json(GOLDEN / "gemma3-mqa" / "config.json")
    capped = raw | {"attn_logit_softcapping": 50.0}
    assert config_json.parse(capped, GOLDEN / "gemma3-mqa") == gemma3


def test_biases_are_read():
    both = {"attention_bias": True, "mlp_bias": True}
    layer = parse("smollm3-3b", **both).layers[0]
    assert layer.mixer.biases == ("qkv", "out") and layer.ffn.has_bias
    layer = parse("olmo2-1b", attention_bias=True).layers[0]
    assert layer.mixer.biases == ("qkv", "out") and not layer.ffn.has_bias


def test_stretched_positions():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    found = parse("qwen2.5-0.5b", rope_scaling=yarn)
    assert found.layers[0].mixer.rope == Rope(1e6, Yarn(4.0, 32768))
    assert found.max_context == 4 * 32768
    scales = yarn | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16, "truncate": False}
    expected = Yarn(4.0, 32768, 16.0, attention_factor=1.0, truncate=False)
    assert parse("qwen2.5-0.5b", rope_scaling=scales).layers[0].mixer.rope.scaling == expected
    found = parse("olmo2-1b", rope_scaling={"type": "dynamic", "factor": 2})
    assert found.layers[0].mixer.rope == Rope(5e5, Dynamic(2.0, 4096)) and found.max_context == 8192


def test_of_two_spellings_transformers_takes_the_older():
    newer = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5.0}
    older = {"rope_type": None, "type": "linear", "factor": 8.0}
    both = {"rope_parameters": newer, "rope_scaling": older}
    assert parse("qwen3-0.6b", **both).layers[0].mixer.rope == Rope(1e6, Linear(8.0))
    assert parse("qwen3-0.6b", **both | {"rope_scaling": {}}).layers[0].mixer.rope == Rope(
        5.0, Dynamic(2.0, 40960)
    )
    factors = {"type": "su", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    found = parse("phi3-mini", rope_scaling=factors, rope_parameters=newer).layers[0].mixer.rope
    assert isinstance(found.scaling, LongRope) and found.theta == 10_000


@pytest.mark.parametrize("kind", ["su", "yarn", "longrope"])
def test_longrope_by_its_names(kind):
    short, long = [1.0] * 36, [2.0] * 36
    scaling = {"type": kind, "short_factor": short, "long_factor": long}
    found = parse("phi3-mini", rope_scaling=scaling, max_position_embeddings=131072,
                  partial_rotary_factor=0.75)  # fmt: skip
    rule = found.layers[0].mixer.rope
    assert isinstance(rule.scaling, LongRope) and rule.share == 0.75
    assert rule.scaling.attention_factor == pytest.approx(1.1902380714)  # sqrt(1 + 5 / 12)
    assert dataclasses.replace(rule.scaling, attention_factor=1.0) == LongRope(
        tuple(short), tuple(long), 4096
    )


BAD = {
    "scale": ("gpt2", {"scale_attn_weights": 1}, "scale_attn_weights must be true or false"),
    "odd heads": ("gpt2", {"n_head": 7}, "n_embd=768 is not a multiple of n_head=7"),
    "gelu": ("gpt2", {"activation_function": "gelu"}, "valid: gelu_pytorch_tanh, gelu_new"),
    "Ministral": ("mistral-7b", {"layer_types": ["full_attention"] * 32}, "layer_types=.* is not"),
    "biases": ("mistral-7b", {"attention_bias": True}, "attention_bias=True is not supported"),
    "window": ("mistral-7b", {"sliding_window": 0}, "sliding_window must be an integer from 1"),
    "kind": ("qwen2.5-0.5b", {"layer_types": ["conv"] * 24}, "layer type 'conv' is not supported"),
    "use": ("qwen3-0.6b", {"use_sliding_window": 1}, "use_sliding_window must be true or false"),
    "count": ("smollm3-3b", {"no_rope_layers": [1]}, "no_rope_layers must list one .* of 36"),
    "turning": ("smollm3-3b", {"no_rope_layers": ["a"] * 36}, "no_rope_layers lists 1 for a layer"),
    "cap": ("gemma2-2b", {"attn_logit_softcapping": -1}, "attn_logit_softcapping must be positive"),
    "both ways": ("gemma2-2b", {"use_bidirectional_attention": True}, "use_bidirectional"),
    "factors": (
        "phi3-mini", {"rope_scaling": {"type": "longrope", "short_factor": 1}},
        "rope_scaling: long_factor must be a list|short_factor must be a list of at most",
    ),
    "number of factors": (
        "phi3-mini",
        {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}},
        "longrope has 1 factors for 48 rotating pairs",
    ),
    "millions of factors": (
        "phi3-mini",
        {"rope_scaling": {"type": "su", "short_factor": [1.0] * 2_000_000, "long_factor": [1.0]}},
        "short_factor must be a list of at most 65536 numbers",
    ),
    "rope of each kind": (
        "qwen3-0.6b", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
        "rope_parameters: full_attention=.* is not supported",
    ),
    "digits": ("olmo2-1b", {"rope_theta": 10**400}, "rope_theta must be .* a number of 1329 bits"),
    "a long value": ("olmo2-1b", {"hidden_size": "x" * 10**6}, "not 'x{79}[.]{3}$"),
    "a long kind": ("gemma2-2b", {"layer_types": ["x" * 10**6] * 26}, "layer type 'x{79}[.]{3} is"),
    "no activation": ("olmo2-1b", {"hidden_act": 0}, "hidden_act=0 is not supported"),
    "share": ("phi3-mini", {"partial_rotary_factor": 2}, "rope share is above 0 and at most 1"),
    "factor": (
        "olmo2-1b", {"rope_scaling": {"type": "dynamic", "factor": 1e300}},
        "rope factor 1e\\+300 stretches the context too far",
    ),
    "experts": (
        "mixtral-8x7b", {"num_local_experts": 1 << 20},
        "experts num_experts is at most 4096, not 1048576",
    ),
    "heads": ("deepseek-v2", {"num_attention_heads": 1 << 20}, "latent num_heads is at most 4096"),
    "FP8": (
        "deepseek-v3", {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config=.* is not supported",
    ),
    "clipped": ("olmoe-1b-7b", {"clip_qkv": "8"}, "clip_qkv must be a number"),
    "layers": ("qwen3-30b-a3b", {"mlp_only_layers": "all"}, "mlp_only_layers lists numbers"),
    "groups": ("glm-4.5-air", {"n_group": 3}, "n_group=3 does not divide n_routed_experts=128"),
    "choice": ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not"),
    "more experts than there are": (
        "mixtral-8x7b", {"num_experts_per_tok": 9},
        "num_experts_per_tok=9 is more than num_local_experts=8$",
    ),
    "more than there are by default": (
        "qwen3-30b-a3b", {"num_experts": None, "num_experts_per_tok": 129},
        "num_experts_per_tok=129 is more than num_experts=128$",
    ),
    "no experts": ("olmoe-1b-7b", {"num_experts": 0}, "num_experts must be an integer from 1"),
    "groups of experts": (
        "deepseek-v3", {"n_group": 7}, "n_group=7 does not divide n_routed_experts=256$",
    ),
    "groups that are chosen": (
        "deepseek-v2", {"topk_group": 9}, "topk_group=9 is more than n_group=8$",
    ),
    "groups of few": (
        "deepseek-v3", {"n_group": 256}, "router group_best=2 exceeds the 1 experts of a group",
    ),
    "too few in the groups": (
        "deepseek-v3", {"n_group": 128, "topk_group": 2},
        "experts top_k=8 exceeds the 4 experts of top_groups=2",
    ),
    "choice of experts": (
        "deepseek-v2", {"topk_method": "noaux_tc"},
        "topk_method='noaux_tc' is not supported; valid: greedy, group_limited_greedy$",
    ),
    "another choice": (
        "deepseek-v3", {"topk_method": "greedy"}, "topk_method='greedy' is not .*; valid: noaux_tc",
    ),
    "scores of experts": (
        "deepseek-v3", {"scoring_func": "softmax"}, "scoring_func='softmax' .*; valid: sigmoid",
    ),
    "scores": ("deepseek-v2", {"scoring_func": "tanh"}, "scoring_func='tanh' .*; valid: softmax"),
    "choice in GLM": (
        "glm-4.5-air", {"topk_method": "greedy"}, "topk_method='greedy' .*; valid: noaux_tc",
    ),
    "scores in GLM": ("glm-4.5-air", {"scoring_func": 7}, "scoring_func=7 .*; valid: sigmoid"),
    "packed otherwise": (
        "gpt-oss-20b", {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config: quant_method='fp8' is not supported; valid: mxfp4",
    ),
    "packed elsewhere": (
        "mixtral-8x7b", {"quantization_config": MXFP4}, "quantization_config=.* is not supported",
    ),
    "other rope": ("olmo2-1b", {"rope_scaling": {"type": "axial"}}, "valid: default, linear, dyn"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_is_not_served_is_named(case):
    name, changes, cause = BAD[case]
    with pytest.raises(InputError, match=cause) as caught:
        parse(name, **changes)
    assert "\n" not in str(caught.value) and f"/models/{name}/config.json" in str(caught.value)


def relative(checkpoint: str, **changes):
    """The model of a tiny checkpoint with some keys changed; None drops one."""
    raw = mapped.read_json(GOLDEN / checkpoint / "config.json") | changes
    return config_json.parse(raw, Path("/models") / checkpoint)


def test_relatives_in_every_spelling():
    dots1, minimax = "dots1-gqa-window", "minimax_m2-gqa-partial"
    assert relative(dots1, scoring_func="noaux_tc") == relative(dots1)
    assert [spec.window for spec in relative(dots1, sliding_window=None).cache_specs] == [None] * 3
    older = {"rope_parameters": None, "rope_theta": 1e4, "rotary_dim": 8}
    assert relative(minimax, **older) == relative(minimax)
    whole = relative(minimax, rope_parameters=None).layers[0].mixer.rope
    assert whole == Rope(5e6)  # transformers' default
    lite = relative("glm4_moe_lite-mha-listed", mlp_layer_types=None)
    assert [layer.ffn.name for layer in lite.layers] == ["gated", "experts", "experts"]


@pytest.mark.parametrize(
    ("checkpoint", "changes", "cause"),
    [
        ("dots1-gqa-window", {"scoring_func": "softmax"}, "scoring_func='softmax' is not"),
        ("dots1-gqa-window", {"n_shared_experts": None}, "n_shared_experts must be an integer"),
        ("glm4_moe_lite-mha-listed", {"mlp_layer_types": ["moe"] * 3}, "'dense' or 'sparse'"),
        ("glm_moe_dsa-mha-listed", {"indexer_types": ["shared", "full", "full"]}, "first layer is"),
        ("glm_moe_dsa-mha-listed", {"indexer_types": ["full", "part", "full"]}, "or 'shared' for"),
        ("deepseek_v32-mha-yarn", {"index_topk": 0}, "index_topk must be an integer from 1"),
        ("deepseek_v32-mha-yarn", {"index_head_dim": 6}, "head_width=6 is at least rope_width=8"),
        ("minimax_m2-gqa-partial", {"qk_norm_type": "per_head"}, "qk_norm_type='per_head' is not"),
        ("minimax_m2-gqa-partial", {"attn_type_list": [1, 0]}, "attn_type_list with a layer"),
        ("minimax_m2-gqa-partial", {"use_routing_bias": False}, "use_routing_bias=False is not"),
    ],
)
def test_what_relatives_are_not_is_named(checkpoint, changes, cause):
    with pytest.raises(InputError, match=cause):
        relative(checkpoint, **changes)
