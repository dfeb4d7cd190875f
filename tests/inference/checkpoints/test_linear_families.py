"""LFM2 and MiniMax-Text-01: what their files may say, and what is refused by name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.recurrent.linear_attention import LinearAttention
from configs.kinds.recurrent.short_conv import ShortConv
from configs.kinds.rope import Rope
from inference.checkpoints import mapped, resolve
from inference.checkpoints.hf import config_export, config_json
from inference.planner import weights
from layers import decoder, params

GOLDEN = Path(__file__).parents[2] / "golden"
LFM2, MINIMAX = "lfm2-mha-listed-untied-float32", "minimax-mha-window-tied-float32"
# The keys of the published file that say something about the mathematics.
LFM2_1_2B = {
    "architectures": ["Lfm2ForCausalLM"], "block_auto_adjust_ff_dim": True, "block_dim": 2048,
    "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
    "block_norm_eps": 1e-05, "block_use_swiglu": True, "conv_L_cache": 3, "conv_bias": False,
    "conv_dim": 2048, "conv_dim_out": 2048, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048, "max_position_embeddings": 128000, "norm_eps": 1e-05,
    "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "rope_theta": 1000000.0, "vocab_size": 65536,
}  # fmt: skip
MINIMAX_01 = {
    "architectures": ["MiniMaxForCausalLM"], "full_attn_alpha_factor": 3.5565588200778455,
    "full_attn_beta_factor": 1.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144,
    "intermediate_size": 9216, "layer_types": (["linear_attention"] * 7 + ["full_attention"]) * 10,
    "linear_attn_alpha_factor": 3.5565588200778455, "linear_attn_beta_factor": 1.0,
    "max_position_embeddings": 10240000, "mlp_alpha_factor": 3.5565588200778455,
    "mlp_beta_factor": 1.0, "num_attention_heads": 64, "num_experts_per_tok": 2,
    "num_hidden_layers": 80, "num_key_value_heads": 8, "num_local_experts": 32, "postnorm": True,
    "rms_norm_eps": 1e-05, "rope_theta": 10000000, "rotary_dim": 64, "shared_intermediate_size": 0,
    "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 200064,
}  # fmt: skip

# The same model as its makers published it.
MINIMAX_TEXT_01 = {
    "architectures": ["MiniMaxText01ForCausalLM"], "attention_dropout": 0.0,
    "attn_type_list": ([0] * 7 + [1]) * 10,
    "auto_map": {"AutoConfig": "configuration_minimax_text_01.MiniMaxText01Config"},
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144, "initializer_range": 0.02,
    "intermediate_size": 9216, "layernorm_full_attention_alpha": 3.5565588200778455,
    "layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_alpha": 3.5565588200778455,
    "layernorm_linear_attention_beta": 1.0, "layernorm_mlp_alpha": 3.5565588200778455,
    "layernorm_mlp_beta": 1.0, "max_position_embeddings": 10240000,
    "model_type": "minimax_text_01", "num_attention_heads": 64, "num_experts_per_tok": 2,
    "num_hidden_layers": 80, "num_key_value_heads": 8, "num_local_experts": 32,
    "output_router_logits": False, "postnorm": True, "rms_norm_eps": 1e-05,
    "rope_theta": 10000000, "rotary_dim": 64, "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid",
    "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 200064,
}  # fmt: skip


def parse(raw: dict, **changes):
    """A model by its keys, some of them changed."""
    return config_json.parse(raw | changes, Path("/models/tiny"))


def tiny(checkpoint: str, **changes):
    return parse(mapped.read_json(GOLDEN / checkpoint / "config.json"), **changes)


def load(directory: Path):
    found = resolve.resolve(str(directory)).open(None)
    loaded = params.flatten(found.load_params(decoder.param_infos(found.config), None))
    return {path: np.asarray(leaf) for path, leaf in loaded.items()}


def test_the_published_file_of_lfm2():
    model = parse(LFM2_1_2B)
    (attention,) = model.mixers(Attention)
    assert attention == Attention(32, 8, 64, Rope(1e6), qk_norm="head")
    assert model.mixers(ShortConv) == [ShortConv(2048)]
    attends = [n for n, each in enumerate(model.layers) if isinstance(each.mixer, Attention)]
    assert attends == [2, 5, 8, 10, 12, 14] and model.tied
    assert model.layers[0].ffn.width == 8192  # two thirds of 12288


def test_widths_of_feed_forwards_of_lfm2():
    def width(**changes):
        return parse(LFM2_1_2B, **{"block_ff_dim": None, "intermediate_size": 1000} | changes)

    widths = {
        768: {},  # 666 rounded up
        1000: {"block_auto_adjust_ff_dim": False},
        666: {"block_ffn_dim_multiplier": None},  # then nothing is rounded
        800: {"block_ffn_dim_multiplier": 1.2, "block_multiple_of": 10},  # 799
        1536: {"block_ff_dim": 2000},
    }
    for expected, changes in widths.items():
        assert width(**changes).layers[0].ffn.width == expected


def test_what_files_of_lfm2_leave_out():
    bare = parse({"architectures": ["Lfm2ForCausalLM"]})
    assert (bare.width, bare.num_layers, bare.vocab_size) == (2560, 32, 65536)
    assert all(isinstance(each.mixer, Attention) for each in bare.layers)
    assert bare.tied and not tiny(LFM2, tie_word_embeddings=True, tie_embedding=False).tied
    assert tiny(LFM2, head_dim=4).mixers(Attention)[0].head_width == 4


def test_the_published_file_of_minimax():
    model = parse(MINIMAX_01)
    (attention,), lightning = model.mixers(Attention), model.mixers(LinearAttention)
    assert attention == Attention(64, 8, 128, Rope(1e7, share=0.5))
    assert len(lightning) == 70  # each of which decays by a factor of its own
    assert lightning[0] == LinearAttention(64, 128, 128, decay=1.00001, has_gated_norm=True)
    assert lightning[-1].decay == pytest.approx(1 / 79, rel=1e-2)
    alpha = 3.5565588200778455
    assert {layer.factors for layer in model.layers} == {((alpha, 1.0), (alpha, 1.0))}
    assert weights.num_parameters(model) == pytest.approx(456e9, rel=0.01)
    bare = parse({"architectures": ["MiniMaxForCausalLM"]})
    assert [each.mixer.name for each in bare.layers[:3]] == [
        "attention", "linear_attention", "attention",
    ]  # fmt: skip
    assert bare.mixers(Attention)[0] == Attention(32, 8, 128, Rope(1e6))


def test_the_file_of_minimax_as_its_makers_published_it():
    """And of M1, whose tensors have the same names."""
    expected = parse(MINIMAX_01)
    assert parse(MINIMAX_TEXT_01) == expected
    assert parse(MINIMAX_TEXT_01, architectures=["MiniMaxM1ForCausalLM"]) == expected
    factors = parse(MINIMAX_TEXT_01, layernorm_mlp_beta=0.5).layers[7].factors
    assert factors == ((3.5565588200778455, 1.0), (3.5565588200778455, 0.5))
    for changes, cause in (
        ({"postnorm": None}, "postnorm=None is not supported; valid: True"),
        ({"attn_type_list": [0, 2] * 40}, "attn_type_list lists 0 .* or 1"),
        ({"attn_type_list": [0]}, "attn_type_list must list one kind for each of 80 layers"),
    ):
        with pytest.raises(InputError, match=cause):
            parse(MINIMAX_TEXT_01, **changes)


def test_lightning_attention_alone_is_written():
    model = tiny(MINIMAX, layer_types=["linear_attention"] * 2)
    raw = json.loads(json.dumps(config_export.of_model(model)))
    assert parse(raw).layers == model.layers


def test_decays_of_minimax_are_not_read(tmp_path):
    """They are those of the formula, rounded."""
    tensors = load_file(GOLDEN / MINIMAX / "model.safetensors")
    others = {name for name in tensors if name.endswith(("_decay", "slope_rate"))}
    assert len(others) == 4
    shutil.copy(GOLDEN / MINIMAX / "config.json", tmp_path)
    save_file({n: tensors[n] for n in tensors.keys() - others}, tmp_path / "model.safetensors")
    found, full = (load(directory) for directory in (tmp_path, GOLDEN / MINIMAX))
    np.testing.assert_equal(found, full)


def test_decays_elsewhere_are_refused(tmp_path):
    tensors = load_file(GOLDEN / LFM2 / "model.safetensors")
    tensors["model.layers.1.self_attn.slope_rate"] = np.zeros((3, 1, 1), np.float32)
    shutil.copy(GOLDEN / LFM2 / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="no place for: .*slope_rate"):
        load(tmp_path)


BAD = {
    "no norms": (MINIMAX, {"postnorm": False}, "postnorm=False is not supported"),
    "shared": (MINIMAX, {"shared_intermediate_size": 8}, "shared_intermediate_size=8 is not sup"),
    "another kind": (MINIMAX, {"layer_types": ["conv"] * 2}, "layer type 'conv' is not supported"),
    "alpha": (MINIMAX, {"mlp_alpha_factor": "1"}, "mlp_alpha_factor must be a number"),
    "positions": (MINIMAX, {"rotary_dim": 5}, "rope share .* not pairs"),
    "activation": (MINIMAX, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    "a kind": (LFM2, {"layer_types": ["conv", "mamba"]}, "layer type 'mamba' is not supported"),
    "kinds": (LFM2, {"layer_types": ["conv"]}, "must list one kind for each of 2 layers"),
    "numbers": (LFM2, {"layer_types": None, "full_attn_idxs": ["1"]}, "lists numbers of layers"),
    "a number": (LFM2, {"layer_types": None, "full_attn_idxs": [0, 2]},
                 "full_attn_idxs names layer 2 of 2; valid: 0 to 1"),
    "no gates": (LFM2, {"block_use_swiglu": False}, "block_use_swiglu=False is not .*valid: True"),
    "its activation": (LFM2, {"hidden_act": "relu"}, "hidden_act='relu' is not supported; valid"),
    "width": (LFM2, {"conv_dim": 20}, "conv_dim=20 is not supported; valid: 18"),
    "taps": (LFM2, {"conv_L_cache": 1}, "conv_width is at least 2"),
    "bias": (LFM2, {"conv_bias": "yes"}, "conv_bias must be true or false"),
    "factor": (LFM2, {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": -1},
               "block_ffn_dim_multiplier must be positive"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_changes_the_model_is_named(case):
    checkpoint, changes, cause = BAD[case]
    with pytest.raises(InputError, match=cause) as caught:
        tiny(checkpoint, **changes)
    assert "\n" not in str(caught.value)


QKV = "model.layers.0.self_attn.qkv_proj.weight"
TENSORS = {
    "no queries": (MINIMAX, QKV, None, "qkv_proj.weight' is missing"),
    "few queries": (MINIMAX, QKV, (18, 18), r"expected \[54, 18\]"),
    "no gate": (MINIMAX, "model.layers.0.self_attn.output_gate.weight", None, "gate.* is missing"),
    "softmax": (
        MINIMAX, "model.layers.0.self_attn.q_proj.weight", (18, 18), "no place for: .*q_proj",
    ),
    "bias of one without": (LFM2, "model.layers.0.conv.conv.bias", (18,), "no place for: .*bias"),
    "no taps": (LFM2, "model.layers.0.conv.conv.weight", None, "conv.conv.weight' is missing"),
    "flat taps": (LFM2, "model.layers.0.conv.conv.weight", (18, 4), r"expected \[18, 1, 4\]"),
    "no gates": (LFM2, "model.layers.0.conv.in_proj.weight", (18, 18), r"expected \[54, 18\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_named(case, tmp_path):
    checkpoint, name, shape, cause = TENSORS[case]
    tensors = load_file(GOLDEN / checkpoint / "model.safetensors")
    tensors.pop(name, None)
    if shape is not None:
        tensors[name] = np.zeros(shape, np.float32)
    shutil.copy(GOLDEN / checkpoint / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=cause):
        load(tmp_path)
