"""Writes the weights and the tokenizer of a GGUF file as a Hugging Face directory.

The rounding rule, shared by the references and by what they are compared with: every tensor is
dequantized to float32 by `gguf.dequantize`, brought to the layout and the convention of the Hugging
Face checkpoint in float32, then rounded to bfloat16, norm weights included. Two conventions differ
between the formats:

* GGUF files of the `llama` architecture store the rows of the query and key projections in an order
  in which neighbouring rows rotate together; Hugging Face rotates rows H/2 apart. Gemma 3's rows
  are not permuted.
* GGUF files of `gemma3` store norm weights as the factor 1 + w that is applied; Hugging Face
  stores w.
"""

import json
import pathlib

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import save_file

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_COMMON = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = {
    "llama": _COMMON | {"ffn_norm": "post_attention_layernorm"},
    "gemma3": _COMMON
    | {
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}


class _Metadata:
    """The key-value pairs of a GGUF file; `own` adds the architecture's prefix to a key."""

    def __init__(self, reader: gguf.GGUFReader):
        self._fields = reader.fields
        self.architecture = self["general.architecture"]

    def __getitem__(self, key: str):
        return self._fields[key].contents()

    def own(self, key: str):
        return self[f"{self.architecture}.{key}"]


def write_hf(source: pathlib.Path, directory: pathlib.Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer's files."""
    reader = gguf.GGUFReader(source)
    metadata = _Metadata(reader)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(_state(reader, metadata), directory / "model.safetensors", metadata={"format": "pt"})
    config = {"llama": _llama_config, "gemma3": _gemma3_config}[metadata.architecture](metadata)
    ids = {k: metadata[f"tokenizer.ggml.{k}"] for k in ("bos_token_id", "eos_token_id")}
    ids["pad_token_id"] = metadata["tokenizer.ggml.padding_token_id"]
    for name, content in (("config", config | ids), ("generation_config", ids)):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    _tokenizer(source, metadata).save_pretrained(directory)


def load(directory: pathlib.Path) -> tuple[torch.nn.Module, transformers.PreTrainedTokenizerBase]:
    """The model in float32 arithmetic on the stored bfloat16 weights, and the tokenizer."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    return model, transformers.AutoTokenizer.from_pretrained(directory)


def _state(reader: gguf.GGUFReader, metadata: _Metadata) -> dict[str, torch.Tensor]:
    """All tensors under their Hugging Face names, bfloat16."""
    llama = metadata.architecture == "llama"
    heads = {"attn_q": metadata.own("attention.head_count")}
    heads["attn_k"] = metadata.own("attention.head_count_kv")
    state = {}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight")
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name in _TOP:
            target = _TOP[name]
        else:
            _, layer, name = name.split(".")
            target = f"model.layers.{layer}.{_LAYER[metadata.architecture][name]}"
        if llama and name in heads:
            weight = _unpermute(weight, heads[name])
        if not llama and name.endswith("_norm"):
            weight = weight - np.float32(1)
        contiguous = torch.from_numpy(np.ascontiguousarray(weight))
        state[f"{target}.weight"] = contiguous.to(torch.bfloat16)
    return state


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows from (H/2 pairs of neighbours) per head to (first halves, then second halves)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


def _widths(metadata: _Metadata) -> dict:
    """What both families' config.json say."""
    return {
        "hidden_size": metadata.own("embedding_length"),
        "intermediate_size": metadata.own("feed_forward_length"),
        "num_hidden_layers": metadata.own("block_count"),
        "num_attention_heads": metadata.own("attention.head_count"),
        "num_key_value_heads": metadata.own("attention.head_count_kv"),
        "vocab_size": len(metadata["tokenizer.ggml.tokens"]),
        "max_position_embeddings": metadata.own("context_length"),
        "rope_theta": metadata.own("rope.freq_base"),
        # The file holds a float32; its shortest decimal is what the model was published with.
        "rms_norm_eps": float(f"{metadata.own('attention.layer_norm_rms_epsilon'):.6g}"),
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }


def _llama_config(metadata: _Metadata) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_widths(metadata),
        "hidden_act": "silu",
        "mlp_bias": False,
    }


def _gemma3_config(metadata: _Metadata) -> dict:
    """Gemma 3 270M's; the file says neither the local RoPE base, the pattern nor the scale."""
    head_width = metadata.own("attention.key_length")
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **_widths(metadata),
        "head_dim": head_width,
        "query_pre_attn_scalar": head_width,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_local_base_freq": 10000.0,
        "sliding_window": metadata.own("attention.sliding_window"),
        "sliding_window_pattern": 6,
    }


def _tokenizer(source: pathlib.Path, metadata: _Metadata) -> transformers.PreTrainedTokenizerBase:
    """What transformers rebuilds from the file, with one repair.

    transformers ignores `tokenizer.ggml.pre`. 'smollm' means, in llama.cpp too, that every digit is
    isolated before the byte-level split; without it, white space before a digit splits differently.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if metadata["tokenizer.ggml.pre"] == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Digits(individual_digits=True),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return tokenizer
