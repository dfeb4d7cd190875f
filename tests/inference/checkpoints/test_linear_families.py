"""LFM2: what its files may say, and what is refused by name."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.rope import Rope
from configs.kinds.short_conv import ShortConv
from inference.checkpoints import mapped, resolve
from inference.checkpoints.hf import hf_directory
from layers import decoder

GOLDEN = Path(__file__).parents[2] / "golden"
LFM2 = "lfm2-mha-listed-untied-float32"
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


def parse(raw: dict, **changes):
    """A model by its keys, some of them changed."""
    return hf_directory.parse_config(raw | changes, Path("/models/tiny"))


def tiny(checkpoint: str, **changes):
    return parse(mapped.read_json(GOLDEN / checkpoint / "config.json"), **changes)


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


BAD = {
    "a kind": (LFM2, {"layer_types": ["conv", "mamba"]}, "layer type 'mamba' is not supported"),
    "kinds": (LFM2, {"layer_types": ["conv"]}, "must list one kind for each of 2 layers"),
    "numbers": (LFM2, {"layer_types": None, "full_attn_idxs": ["1"]}, "lists numbers of layers"),
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


TENSORS = {
    "bias of one without": (LFM2, "model.layers.0.conv.conv.bias", (18,), "no place for: .*bias"),
    "no taps": (LFM2, "model.layers.0.conv.conv.weight", None, "conv.conv.weight' is missing"),
    "flat taps": (LFM2, "model.layers.0.conv.conv.weight", (18, 4), r"expected \[18, 1, 4\]"),
    "no gates": (LFM2, "model.layers.0.conv.in_proj.weight", (18, 18), r"expected \[54, 18\]"),
}


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
        found = resolve.resolve(str(tmp_path)).open(None)
        found.load_params(decoder.param_infos(found.config), None)
