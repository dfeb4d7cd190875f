"""Checkpoints of layers that correct states by the delta rule: every spelling, strict."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs import presets
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Latent
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.rope import Rope
from inference.checkpoints import mapped, resolve
from inference.checkpoints.hf import config_export, config_json
from inference.quantize import rotation
from layers import decoder, params

GOLDEN = Path(__file__).parents[2] / "golden"
NEXT, TEXT = "qwen3_next-gqa-shared-experts", "qwen3_5-gqa-sections"
MIXTURE = "qwen3_5_moe-gqa-stacked"
OLMO, KIMI = "olmo_hybrid-mha-rope", "kimi_linear-experts-groups"


def parse(checkpoint: str, **changes):
    """The model of a tiny checkpoint with some keys changed; None drops one."""
    raw = mapped.read_json(GOLDEN / checkpoint / "config.json") | changes
    return config_json.parse(raw, Path("/models") / checkpoint)


def load(folder: Path) -> dict[str, np.ndarray]:
    found = resolve.resolve(str(folder))
    loaded = found.open(None).load_params(decoder.param_infos(found.config), None)
    return {path: np.asarray(leaf) for path, leaf in params.flatten(loaded).items()}


def changed(folder: Path, checkpoint: str, change) -> Path:
    """A copy of a tiny checkpoint whose tensors were changed."""
    folder = Path(shutil.copytree(GOLDEN / checkpoint, folder / "changed", dirs_exist_ok=True))
    tensors = load_file(GOLDEN / checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def full_layers(config) -> list[int]:
    return [n for n, layer in enumerate(config.layers) if not isinstance(layer.mixer, DeltaNet)]


def test_what_is_fused_is_taken_apart_by_key_heads():
    """Of Qwen3-Next's rows each key head's query, key, values and gates follow one another."""
    loaded = load(GOLDEN / NEXT)
    stored = load_file(GOLDEN / NEXT / "model.safetensors")
    base = "model.layers.1.linear_attn"
    heads = stored[f"{base}.in_proj_qkvz.weight"].reshape(2, 8 + 8 + 12 + 12, 20)
    numbers = stored[f"{base}.in_proj_ba.weight"].reshape(2, 2 + 2, 20)
    parts = [heads[:, 16:28], heads[:, :8], heads[:, 8:16]]  # values, queries, keys
    expected = np.concatenate([part.reshape(-1, 20) for part in parts])
    np.testing.assert_array_equal(loaded["layers/1/mixer/in"], expected)
    parts = [heads[:, 28:], numbers[:, :2], numbers[:, 2:]]  # gates, betas, decays
    expected = np.concatenate([part.reshape(-1, 20) for part in parts])
    np.testing.assert_array_equal(loaded["layers/1/mixer/gates"], expected)
    taps = stored[f"{base}.conv1d.weight"][:, 0]
    np.testing.assert_array_equal(loaded["layers/1/mixer/conv"], np.roll(taps, 24, axis=0))


def test_qwen3_next_in_every_spelling():
    config = parse(NEXT)
    assert full_layers(config) == [2]
    listed = ["linear_attention", "linear_attention", "full_attention"]
    assert parse(NEXT, full_attention_interval=None, layer_types=listed) == config
    assert full_layers(parse(NEXT, full_attention_interval=None, num_hidden_layers=9)) == [3, 7]
    newer = {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"}
    assert parse(NEXT, rope_theta=None, rope_parameters=newer) == config
    assert parse(NEXT, partial_rotary_factor=None) == config  # a quarter, where none is stated
    (attention,), (linear,) = config.mixers(Attention), config.mixers(DeltaNet)
    assert attention.rope == Rope(1e4, share=0.25) and attention.has_output_gate
    assert linear == DeltaNet(4, 2, key_width=8, value_width=6)
    assert isinstance(config.layers[1].ffn, Gated)


@pytest.mark.parametrize(("checkpoint", "name"), [(TEXT, "Qwen3_5"), (MIXTURE, "Qwen3_5Moe")])
def test_the_text_of_a_model_that_sees(checkpoint, name, tmp_path, caplog):
    """Of Qwen3.5's published files, in which text is a part of the whole."""

    def whole(tensors: dict[str, np.ndarray]) -> None:
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        for name in ("model.visual.patch_embed.proj.weight", "mtp.fc.weight"):
            tensors[name] = np.ones((2, 3), np.float32)

    folder = changed(tmp_path, checkpoint, whole)
    text = mapped.read_json(GOLDEN / checkpoint / "config.json")
    raw = {
        "architectures": [f"{name}ForConditionalGeneration"], "model_type": name.lower(),
        "text_config": text | {"attn_output_gate": True, "architectures": None},
        "vision_config": {"hidden_size": 8}, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    found, expected = load(folder), load(GOLDEN / checkpoint)
    assert found.keys() == expected.keys()
    for path, value in found.items():
        np.testing.assert_array_equal(value, expected[path], path)
    assert "1 tensors for them, from model.visual.patch_embed.proj.weight on" in caplog.text


# The keys of Qwen3.6 35B A3B that say something about the mathematics, and some that do not.
PUBLISHED = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe",
    "image_token_id": 248056, "tie_word_embeddings": False, "vision_config": {"depth": 27},
    "text_config": {
        "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16",
        "eos_token_id": 248044, "full_attention_interval": 4, "head_dim": 256,
        "hidden_act": "silu", "hidden_size": 2048,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
        "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144, "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text", "moe_intermediate_size": 512,
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16, "num_experts": 256, "num_experts_per_tok": 8,
        "num_hidden_layers": 40, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True, "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default",
        },
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
        "use_cache": True, "vocab_size": 248320,
    },
}  # fmt: skip


def test_a_preset_is_what_was_published():
    config = presets.get("qwen3.6-35b-a3b").config
    raw = config_json.text_part(PUBLISHED)
    assert config_json.parse(raw, Path("/models") / config.name) == config
    sparse = raw | {"layer_types": None, "num_experts": None, "moe_intermediate_size": None}
    assert config_json.parse(sparse, Path("/models") / config.name) == config  # as by default
    assert config_export.of_model(config)["layer_types"] == raw["layer_types"]


def test_experts_of_a_layer_in_one_tensor_are_read_as_those_apart(tmp_path):
    """Both are published: matrices in blocks of FP8 have a tensor each."""

    def apart(tensors: dict[str, np.ndarray]) -> None:
        for base in [name.removesuffix(".down_proj") for name in tensors if "s.down_proj" in name]:
            stack = tensors.pop(f"{base}.gate_up_proj")
            for expert, down in enumerate(tensors.pop(f"{base}.down_proj")):
                gate, up = np.split(stack[expert], 2)
                tensors |= {
                    f"{base}.{expert}.{part}_proj.weight": np.ascontiguousarray(values)
                    for part, values in (("gate", gate), ("up", up), ("down", down))
                }

    found, expected = load(changed(tmp_path, MIXTURE, apart)), load(GOLDEN / MIXTURE)
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, path)


_STACK = "model.layers.0.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda t: t.update({_STACK: t[_STACK][:4]}), r"\[4, 12, 20\]; .* each of 5 experts"),
        (lambda t: t.update({_STACK: t[_STACK][:, :11]}), r"\[5, 11, 20\]; .* each of 5 experts"),
        (
            lambda t: t.update({_STACK: t[_STACK].swapaxes(0, 1).copy()}),
            r"\[12, 5, 20\]; .* 5 experts, \[5, 12, 20\] or \[5, 20, 12\]",
        ),
        (lambda t: t.pop(_STACK), "tensor 'model.layers.0.mlp.experts.0.gate_proj.weight' is mis"),
        (
            lambda t: t.update({f"{_STACK[:-12]}3.up_proj.weight": t[_STACK][0]}),
            "no place for: 'model.layers.0.mlp.experts.3.up_proj.weight'",
        ),
    ],
)
def test_unsound_stacks_of_experts_are_named(change, cause, tmp_path):
    with pytest.raises(InputError, match=cause) as caught:
        load(changed(tmp_path, MIXTURE, change))
    assert "\n" not in str(caught.value)


def test_olmo_hybrid_in_every_spelling():
    config = parse(OLMO)
    linear, full = config.layers
    assert full.is_post_normed and not linear.is_post_normed and config.pre_norms
    assert full.mixer.rope == Rope(1e4) and full.mixer.qk_norm == "all"
    assert linear.mixer == DeltaNet(4, 2, 6, 4, most_beta=2.0, norm_eps=1e-5)
    assert parse(OLMO, rope_parameters=None) == config  # transformers' base
    for without in ({"rope_parameters": {"rope_theta": None}}, {"rope_parameters": None}):
        bare = parse(OLMO, rope_theta=None, **without)
        assert [layer.mixer.rope for layer in bare.layers[1:]] == [None]
    derived = dict.fromkeys(("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"))
    found = parse(OLMO, **{f"linear_{name}": None for name in derived}).layers[0].mixer
    assert (found.num_heads, found.num_key_heads) == (4, 4)
    assert (found.key_width, found.value_width) == (4, 8)  # 0.75 x 24 / 4
    assert full_layers(parse(OLMO, layer_types=None)) == [1]
    assert full_layers(parse(OLMO, layer_types=None, num_hidden_layers=9)) == [3, 7]
    with pytest.raises(InputError, match="norms of what they add"):
        rotation.untied(config)


def test_norms_of_olmo_hybrid_by_either_name(tmp_path):
    """Published files name those before a part otherwise than transformers' own modules."""

    def rename(tensors: dict[str, np.ndarray]) -> None:
        base = "model.layers.0"
        for old, new in (("attention_layer_norm", "input_layernorm"),
                         ("feedforward_layer_norm", "post_attention_layernorm")):  # fmt: skip
            tensors[f"{base}.{new}.weight"] = tensors.pop(f"{base}.{old}.weight")

    found, expected = load(changed(tmp_path, OLMO, rename)), load(GOLDEN / OLMO)
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, path)

    def twice(tensors: dict[str, np.ndarray]) -> None:
        name = "model.layers.0.attention_layer_norm.weight"
        tensors["model.layers.0.input_layernorm.weight"] = tensors[name]

    with pytest.raises(InputError, match="no place for: model.layers.0.input_layernorm.weight"):
        load(changed(tmp_path, OLMO, twice))


def test_kimi_linear_in_every_spelling():
    config = parse(KIMI)
    assert full_layers(config) == [1] and config.max_context == 256
    linear, full = config.layers[0].mixer, config.layers[1].mixer
    assert linear == DeltaNet(4, 4, 6, 6, decay_rank=6, gate_rank=6, gate="sigmoid")
    assert full == Latent(3, 8, 4, 6, 5, rope=None)
    ffn = config.layers[1].ffn
    assert (ffn.num_experts, ffn.top_k, ffn.width, ffn.shared_width) == (4, 2, 8, 16)
    assert (ffn.router.num_groups, ffn.router.scale) == (2, 2.446)
    spelled = {
        "num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts", "num_expert_group": "n_group",
        "moe_renormalize": "norm_topk_prob", "model_max_length": "max_position_embeddings",
    }  # fmt: skip
    raw = mapped.read_json(GOLDEN / KIMI / "config.json")
    for published, attribute in spelled.items():
        assert parse(KIMI, **{published: None, attribute: raw[published]}) == config, published
    apart = {"linear_num_heads": 4, "linear_head_dim": 6, "linear_conv_kernel_dim": 4}
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    assert parse(KIMI, linear_attn_config=None, layer_types=kinds, **apart) == config
    found = parse(KIMI, linear_attn_config=None, num_hidden_layers=10, **apart)
    assert full_layers(found) == [4, 8]
    assert parse(KIMI, mlp_layer_types=["dense", "sparse", "sparse"]) == config
    assert parse(KIMI, first_k_dense_replace=None) == config  # one, where none is stated


def test_layers_that_predict_a_second_token_are_left_out(tmp_path):
    extra = {"mtp.fc.weight": np.ones((2, 3), np.float32)}
    folder = changed(tmp_path, NEXT, lambda tensors: tensors.update(extra))
    expected = load(GOLDEN / NEXT)
    for path, value in load(folder).items():
        np.testing.assert_array_equal(value, expected.pop(path), path)
    assert not expected


_FUSED = "model.layers.0.linear_attn.in_proj_qkvz.weight"
_TAPS = "model.layers.0.linear_attn.conv1d.weight"


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda t: t.pop(_FUSED), f"tensor '{_FUSED}' is missing"),
        (lambda t: t.update({_FUSED: t[_FUSED][:-1]}), r"is \[79, 20\]; expected \[80, 20\]"),
        (lambda t: t.update({_TAPS: t[_TAPS][:, 0]}), r"is \[56, 4\]; expected \[56, 1, 4\]"),
        (lambda t: t.update({f"{_FUSED}.v": t[_TAPS]}), "has no place|no place for"),
        (lambda t: t.update({"mtpx.weight": t[_TAPS]}), "no place for: mtpx.weight"),
        (
            lambda t: t.update({"model.layers.0.linear_attn.dt_bias": np.ones(5, np.float32)}),
            r"dt_bias' is \[5\]; expected \[4\]",
        ),
    ],
)
def test_tensors_are_read_strictly(tmp_path, change, cause):
    with pytest.raises(InputError, match=cause) as caught:
        load(changed(tmp_path, NEXT, change))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("checkpoint", "changes", "cause"),
    [
        (NEXT, {"layer_types": ["mamba"] * 3}, "layer type 'mamba' is not .*; valid: linear_atte"),
        (NEXT, {"layer_types": ["full_attention"]}, "layer_types must list one .* of 3 layers"),
        (NEXT, {"full_attention_interval": 0}, "full_attention_interval must be an integer from"),
        (NEXT, {"linear_num_value_heads": 5}, "num_heads=5 is not a multiple of num_key_heads=2"),
        (NEXT, {"linear_conv_kernel_dim": 1}, "conv_width is at least 2, not 1"),
        (NEXT, {"linear_key_head_dim": "8"}, "linear_key_head_dim must be an integer from 1"),
        (NEXT, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; valid: silu"),
        (NEXT, {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype='bfloat16' .*; valid: 'float32'"),
        (TEXT, {"attn_output_gate": False}, "attn_output_gate=False is not supported; valid: True"),
        (TEXT, {"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is .*: 'swish', 'silu"),
        (TEXT, {"mamba_ssm_dtype": "float16"}, "mamba_ssm_dtype='float16' is not supported"),
        (TEXT, {"layer_types": ["full_attention"]}, "layer_types must list one kind for each of"),
        (MIXTURE, {"norm_topk_prob": False}, "norm_topk_prob=False is not supported; valid: True"),
        (OLMO, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; valid: silu"),
        (OLMO, {"linear_use_gate": False}, "linear_use_gate=False is not supported; valid: True"),
        (KIMI, {"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; valid: silu"),
        (
            KIMI,
            {"linear_attn_config": {"full_attn_layers": [2]}},
            "linear_attn_config: kda_layers and full_attn_layers list each of the layers 1 to 3",
        ),
        (
            KIMI,
            {"linear_attn_config": {"kda_layers": [1, 2, 3], "full_attn_layers": "none"}},
            "linear_attn_config: kda_layers and full_attn_layers list each of the layers 1 to 3",
        ),
        (TEXT, {"partial_rotary_factor": "half"}, "partial_rotary_factor must be a number"),
        (OLMO, {"linear_allow_neg_eigval": 1}, "linear_allow_neg_eigval must be true or false"),
        (OLMO, {"mlp_bias": True}, "mlp_bias=True is not supported"),
        (KIMI, {"tie_word_embeddings": True}, "tie_word_embeddings=True is not supported"),
        (KIMI, {"mla_use_nope": False}, "mla_use_nope=False is not supported"),
        (KIMI, {"moe_router_activation_func": "softmax"}, "moe_router_activation_func='softmax'"),
        (KIMI, {"n_group": 4}, "num_expert_group=2 and n_group=4 name the same"),
        (
            KIMI,
            {"num_key_value_heads": 1},
            "num_key_value_heads is num_attention_heads=3, .* not 1",
        ),
        (
            KIMI,
            {"linear_attn_config": {"kda_layers": [1, 2], "full_attn_layers": [2]}},
            "linear_attn_config: kda_layers and full_attn_layers list each of the layers 1 to 3",
        ),
        (KIMI, {"linear_attn_config": {"head_dim": 0}}, "linear_attn_config: head_dim must be"),
        (KIMI, {"linear_attn_config": [1]}, "linear_attn_config must be an object"),
        (NEXT, {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be"),
    ],
)
def test_what_is_not_served_is_named(checkpoint, changes, cause):
    with pytest.raises(InputError, match=cause) as caught:
        parse(checkpoint, **changes)
    assert "\n" not in str(caught.value) and "config.json" in str(caught.value)
