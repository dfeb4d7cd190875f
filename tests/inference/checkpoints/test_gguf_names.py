"""What llama.cpp calls our families and their tensors, by the package `gguf`."""

import re
from pathlib import Path

import gguf
import pytest

from inference.checkpoints import names
from inference.checkpoints.hf import config_json
from inference.families import families
from layers import decoder, params

GOLDEN = Path(__file__).parents[2] / "golden"


def test_every_family_of_llama_cpp_is_read():
    in_gguf = {name for name, family in families.ALL.items() if family.gguf}
    assert families.ALL.keys() - in_gguf == UNREAD
    architectures = {LLAMA_CPP.get(name, name) for name in in_gguf} | {"nemotron_h"}
    assert architectures == set(families.gguf_readers())


# Families that llama.cpp does not have (by this version of `gguf`), or calls by another's name:
# Solar Open is a GLM-4.5 there.
UNREAD = {
    "axk1", "bamba", "deepseek_v32", "deepseek_v4", "flex_olmo", "helium", "hy_v3", "laguna",
    "mellum", "minimax", "mistral_large3", "olmo_hybrid", "solar_open",
}  # fmt: skip
# What llama.cpp calls families that it has another name for.
LLAMA_CPP = {
    "gemma4_unified": "gemma4",
    "mistral": "llama", "ministral3": "mistral3", "mixtral": "llama", "olmo3": "olmo2",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe": "glm4moe", "gpt_oss": "gpt-oss", "glm4_moe_lite": "deepseek2",
    "minimax_m2": "minimax-m2", "falcon_h1": "falcon-h1", "falcon_mamba": "mamba",
    "granitemoehybrid": "granitehybrid", "nemotron_h": "nemotron_h_moe",
    "hunyuan_v1_dense": "hunyuan-dense", "hunyuan_v1_moe": "hunyuan-moe",
    "bailing_moe_v2": "bailingmoe2", "ernie4_5_moe": "ernie4_5-moe", "exaone_moe": "exaone-moe",
    "granitemoeshared": "granitemoe", "lfm2_moe": "lfm2moe",
    "qwen3_next": "qwen3next", "qwen3_5": "qwen35", "qwen3_5_moe": "qwen35moe",
    "glm": "chatglm", "mimo": "qwen2", "internlm3": "llama", "cohere": "command-r", "phi": "phi2",
    "gpt_neox": "gptneox", "youtu": "deepseek2", "kimi_linear": "kimi-linear",
    "glm_moe_dsa": "glm-dsa", "mimo_v2_flash": "mimo2", "step3p5": "step35",
}  # fmt: skip
# Where it takes the head for the embedding.
TIED = "cohere2", "command-r", "gemma", "gemma2", "lfm2moe", "starcoder2"
# How its converter renames and stacks tensors before it asks for their names.
MERGED = (
    (r"block_sparse_moe\.experts\.\d+\.", "mlp.experts."),
    (r"\.experts\.\d+\.", ".experts."),
    (r"\.experts\.w1\.", ".experts.gate_proj."),
    (r"\.experts\.w3\.", ".experts.up_proj."),
    (r"\.experts\.w2\.", ".experts.down_proj."),
    (r"\.experts\.gate_up_proj\.\d+\.(gate|up)", r".experts.\1_proj.weight"),
    (r"\.experts\.down_proj\.\d+", ".experts.down_proj.weight"),
    (r"\.experts\.down_proj_bias", ".experts.down_proj.bias"),
    (r"kv_b_proj\.\d+\.key", "k_b_proj.weight"),
    (r"kv_b_proj\.\d+\.value", "v_b_proj.weight"),
    (r"e_score_correction_bias(?:\.experts)?", "e_score_correction.bias"),
    (r"expert_bias$", "expert_bias.bias"),
    (r"\.sinks", ".sinks.weight"),
    (r"attention_sink_bias", "attention_sink_bias.weight"),
    (r"moe\.(\w+_proj)\.weight\.\d+", r"moe.\1.weight"),
    (r"moe\.router_bias", "moe.router_bias.bias"),
    (r"\.experts\.(\w+_proj)$", r".experts.\1.weight"),
    (r"layer_scalar", "layer_scalar.weight"),
    (r"in_proj_qkvz\.weight\.[vqk]$", "in_proj_qkv.weight"),
    (r"in_proj_qkvz\.weight\.z$", "in_proj_z.weight"),
    (r"(in_proj\.\w+|in_proj_\w+\.weight|conv1?d?\.weight)\.(?:[zxBCvqkba]|dt|taps)$", r"\1"),
    (r"\.dt_bias", ".dt_proj.bias"),
    (r"feed_forward\.experts\.", "mlp.experts."),
    (r"\.heads$", ""),
    (r"query_key_value\.(weight|bias)\.[qkv]", r"query_key_value.\1"),
    (r"layernorm\.norms\.\d+\.", "layernorm."),
    (r"attention\.wqkv\.(weight|bias)\.([qkv])", r"self_attn.\2_proj.\1"),
    (r"backbone\.(layers\.\d+)\.mixer\.experts\.", r"model.\1.mlp.experts."),
)
# Tensors that it names itself.
OWN_NAMES = {"ffn/router_norm": "ffn_gate_inp.scale", "ffn/router_factors": "ffn_down_exps.scale"}
CHECKPOINTS = sorted(
    path.parent.name
    for path in GOLDEN.glob("*/expected.npz")
    if families.ALL[path.parent.name.split("-")[0]].gguf
)


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_names_in_gguf_are_those_the_library_gives(checkpoint):
    """What `gguf` makes of each name in a Hugging Face checkpoint."""
    config = config_json.read_model(GOLDEN / checkpoint)
    family = LLAMA_CPP.get(config.family, config.family)
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[family]
    library = gguf.get_tensor_name_map(architecture, config.num_layers)
    for path in params.flatten(decoder.param_infos(config)):
        if path == "head/table" and family in TIED:
            continue  # always tied there
        if family in ("qwen2moe", "qwen3moe", "qwen3next") and path.endswith(
            ("/ffn/gate_up", "/ffn/down")
        ):
            continue  # no layer is dense there
        if family in ("granitehybrid", "granitemoe") and path.endswith(
            ("gate_up", "ffn/down", "shared/down")
        ):
            continue  # its converter names what it cuts there itself (`test_gguf_states.py`)
        is_one_stack = family in ("gemma4", "mistral4") and path.endswith("experts/gate_up")
        if is_one_stack or path.endswith("/curve"):
            continue  # read part by part, and from the metadata (`test_gguf_converted.py`)
        own = OWN_NAMES.get(path.split("/", 2)[-1])
        if own is not None:
            assert names.gguf(config)(path).names == (f"blk.{path.split('/')[1]}.{own}",)
            continue
        stored = names.huggingface(config)(path).names
        if stored[0].endswith("gate_up_proj_bias.ordered"):
            stored = [
                stored[0].replace("gate_up_proj_bias.ordered", f"{part}_proj.bias")
                for part in ("gate", "up")
            ]
        for pattern, merged in MERGED:
            stored = [re.sub(pattern, merged, name) for name in stored]
        found = [library.get_name(name, try_suffixes=(".weight", ".bias")) for name in stored]
        ours = [re.sub(r"_exps\.\d+\.", "_exps.", name) for name in names.gguf(config)(path).names]
        ours = [re.sub(r"((?:ssm_\w+|attn_qkv)\.\w+)\.\w+$", r"\1", name) for name in ours]
        assert list(dict.fromkeys(found)) == list(dict.fromkeys(ours))
