"""Dense relatives of Llama, as `tiny_cases` has the other families."""

import json
import pathlib
import re
from collections.abc import Callable

import torch
from safetensors.torch import load_file, save_file
from tiny_families import TIED, UNTIED, Case, layers, rope, widths

_Tensors = dict[str, torch.Tensor]


def _stored_as(keys: dict, renamed: Callable[[_Tensors], _Tensors]) -> Callable:
    """Writes a checkpoint once more as code that transformers has not stores the same model, with
    other keys (None removes one) and tensors.
    """

    def rewritten(directory: pathlib.Path) -> None:
        path = directory / "config.json"
        config = json.loads(path.read_text()) | keys
        config = {key: value for key, value in config.items() if value is not None}
        path.write_text(json.dumps(config, indent=2) + "\n")
        path = directory / "model.safetensors"
        save_file(renamed(load_file(path)), path, metadata={"format": "pt"})

    return rewritten


# What InternLM2's code calls Llama's tensors.
_INTERNLM2 = {
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _internlm2(heads: int, kv_heads: int, head_width: int):
    """Packs queries, keys and values: each key head's queries, the key, the value."""

    def renamed(tensors: _Tensors) -> _Tensors:
        packed, others = {}, {}
        for name, tensor in tensors.items():
            match = re.fullmatch(r"(.*)\.self_attn\.([qkv])_proj\.(weight|bias)", name)
            if match:
                prefix, part, kind = match.groups()
                groups = tensor.reshape(kv_heads, -1, head_width, *tensor.shape[1:])
                packed.setdefault(f"{prefix}.attention.wqkv.{kind}", {})[part] = groups
                continue
            for theirs, ours in _INTERNLM2.items():
                name = name.replace(theirs, ours)
            others[name] = tensor
        for name, groups in packed.items():
            whole = torch.cat([groups[part] for part in "qkv"], dim=1)
            shape = (heads + 2 * kv_heads) * head_width, *whole.shape[3:]
            others[name] = whole.reshape(shape).contiguous()
        return others

    return renamed


def _with_mtp(tensors: _Tensors) -> _Tensors:
    """Adds a layer that predicts a second token."""
    extra = {"input_proj": (40, 80), "token_layernorm": (40,), "mlp.down_proj": (40, 28)}
    kind = next(iter(tensors.values())).dtype
    return tensors | {
        f"model.mtp_layers.0.{name}.weight": torch.ones(shape, dtype=kind)
        for name, shape in extra.items()
    }


def _internlm_keys(**keys) -> dict:
    return {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2"} | keys


CASES = (
    # The base is stretched once for all lengths: 16 ** (10 / 8) is 32.
    Case(
        "hunyuan_v1_dense-gqa-alpha",
        widths(36, 2, 4, 2, 10)
        | UNTIED
        | rope("dynamic", alpha=16.0, factor=1.0, beta_fast=32, beta_slow=1, mscale=1.0),
        seed=601,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "hunyuan_v1_dense-mha-bias-tied-float32",
        widths(30, 2, 3, 3, 8) | TIED | {"attention_bias": True},
        seed=602,
        dtype=torch.float32,
    ),
    Case(
        "seed_oss-gqa-qkv-bias",
        widths(36, 2, 4, 2, 10) | UNTIED | rope("default", 1e6),
        seed=611,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "seed_oss-mha-out-bias-tied-float32",
        widths(30, 2, 3, 3, 8)
        | TIED
        | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
        seed=612,
        dtype=torch.float32,
    ),
    # Layers without a window do not rotate; where no layer has one, all rotate.
    Case(
        "exaone4-gqa-window",
        widths(40, 3, 4, 2)
        | UNTIED
        | {"sliding_window": 24, "layer_types": layers("ssf")}
        | rope(
            "llama3",
            1e6,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        seed=621,
        version_4_keys=True,
        rewrites={"sliding_window_pattern": "LLG"},
        greedy=True,
    ),
    Case(
        "exaone4-mha-tied-float32",
        widths(30, 2, 3, 3) | TIED | {"sliding_window": None, "layer_types": layers("ff")},
        seed=622,
        dtype=torch.float32,
    ),
    Case(
        "arcee-gqa-yarn",
        widths(36, 2, 4, 2, 10)
        | UNTIED
        | rope("yarn", 500.0, factor=4.0, original_max_position_embeddings=64, mscale=1.0),
        seed=631,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "arcee-mha-bias-tied-float32",
        widths(30, 2, 3, 3, 8) | TIED | {"attention_bias": True, "mlp_bias": True},
        seed=632,
        dtype=torch.float32,
    ),
    Case(
        "apertus-gqa-rope3",
        widths(40, 2, 4, 2)
        | UNTIED
        | rope(
            "llama3",
            500.0,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        seed=731,
        version_4_keys=True,
        rewrites={"mlp_bias": False, "post_norm": False, "qk_norm": True},
        greedy=True,
    ),
    Case(
        "apertus-mha-bias-tied-float32",
        widths(36, 2, 3, 3) | TIED | {"attention_bias": True} | rope("default", 1e4),
        seed=732,
        dtype=torch.float32,
    ),
    # Half of each head rotates, in pairs side by side.
    Case(
        "glm4-gqa-sandwich",
        widths(40, 2, 4, 2, 12) | UNTIED | {"attention_bias": False} | rope("default", 1e5),
        seed=641,
        version_4_keys=True,
        greedy=True,
    ),
    Case("glm4-mha-bias-tied-float32", widths(30, 2, 3, 3, 8) | TIED, seed=642,
         dtype=torch.float32),
    Case("glm-gqa-bias", widths(40, 2, 4, 2, 12) | UNTIED, seed=651, version_4_keys=True,
         greedy=True),
    Case(
        "glm-mha-tied-float32",
        widths(30, 2, 3, 3, 8) | TIED | {"attention_bias": False},
        seed=652,
        dtype=torch.float32,
    ),
    Case(
        "gemma-gqa-tied",
        widths(40, 2, 4, 2, 12) | TIED,
        seed=661,
        version_4_keys=True,
        rewrites={"hidden_act": "gelu"},
        greedy=True,
    ),
    Case(
        "gemma-mha-bias-untied-float32",
        widths(30, 2, 3, 3, 8) | UNTIED | {"attention_bias": True},
        seed=662,
        dtype=torch.float32,
    ),
    Case(
        "mimo-gqa-predicting",
        widths(40, 2, 4, 2) | UNTIED | rope("default", 6.4e5),
        seed=671,
        version_4_keys=True,
        rewritten=_stored_as(
            {
                "architectures": ["MiMoForCausalLM"],
                "model_type": "mimo",
                "attention_bias": True,
                "num_nextn_predict_layers": 1,
                "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
                "layer_types": None,
            },
            _with_mtp,
        ),
        greedy=True,
    ),
    Case(
        "mimo-mha-tied-float32",
        widths(36, 2, 3, 3) | TIED,
        seed=672,
        dtype=torch.float32,
        rewritten=_stored_as({"architectures": ["MiMoForCausalLM"], "model_type": "mimo"}, dict),
    ),
    Case(
        "helium-gqa-neighbors",
        widths(40, 2, 4, 2, 10) | UNTIED | {"attention_bias": True, "mlp_bias": True},
        seed=681,
        version_4_keys=True,
        rewrites={"head_dim": 10},
        greedy=True,
    ),
    Case("helium-mha-tied-float32", widths(24, 2, 3, 3, 8) | TIED, seed=682, dtype=torch.float32),
    Case(
        "internlm2-gqa-packed",
        widths(40, 2, 4, 2) | UNTIED | rope("default", 1e6) | {"attention_bias": True},
        seed=691,
        version_4_keys=True,
        rewritten=_stored_as(
            _internlm_keys(bias=True, attention_bias=None, mlp_bias=None,
                           auto_map={"AutoConfig": "configuration_internlm2.InternLM2Config"}),
            _internlm2(4, 2, 10),
        ),
        greedy=True,
    ),
    Case(
        "internlm2-mha-tied-float32",
        widths(36, 2, 3, 3) | TIED,
        seed=692,
        dtype=torch.float32,
        rewritten=_stored_as(_internlm_keys(bias=False), _internlm2(3, 3, 12)),
    ),
    Case(
        "internlm3-gqa-linear-rope",
        widths(40, 2, 4, 2, 14) | UNTIED | rope("linear", 1e6, factor=4.0),
        seed=701,
        version_4_keys=True,
        rewrites={"architectures": ["InternLM3ForCausalLM"], "attention_bias": None,
                  "mlp_bias": None, "qkv_bias": False, "bias": False},
        greedy=True,
    ),
    Case(
        "internlm3-mha-bias-tied-float32",
        widths(36, 2, 3, 3, 8) | TIED | {"attention_bias": True, "mlp_bias": True},
        seed=702,
        dtype=torch.float32,
        rewrites={"architectures": ["InternLM3ForCausalLM"]},
    ),
    # Norms without weights; a limit that bites.
    Case(
        "olmo-gqa-limit",
        widths(40, 2, 4, 2) | UNTIED | {"clip_qkv": 1.5} | rope("default", 1e5),
        seed=711,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "olmo-mha-bias-tied-float32",
        widths(36, 2, 3, 3) | TIED | {"attention_bias": True},
        seed=712,
        dtype=torch.float32,
    ),
    Case(
        "nemotron-gqa-partial",
        widths(40, 2, 4, 2, 12) | UNTIED,
        seed=721,
        version_4_keys=True,
        greedy=True,
    ),
    Case(
        "nemotron-mha-bias-tied-float32",
        widths(30, 2, 3, 3, 8)
        | TIED
        | {"attention_bias": True, "mlp_bias": True}
        | rope("default", 1e5, partial_rotary_factor=0.25),
        seed=722,
        dtype=torch.float32,
    ),
)  # fmt: skip
