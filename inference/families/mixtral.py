"""Mixtral (Jiang et al. 2024, arXiv 2401.04088)."""

from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.model import LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufWriter, ModelFields, Table
from inference.families.shared import (
    fields,
    gguf_mixtures,
    gguf_names,
    hf_names,
    mixtures,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys


def _read_mixtral(keys: Keys) -> ModelFields:
    rope = rope_keys.read(keys, 1_000_000.0)
    attention = fields.attention(keys, rope=rope, window=keys.optional_integer("sliding_window"))
    experts = mixtures.experts(keys, "num_local_experts", 8, 2, keys.integer("intermediate_size"))
    return fields.model(keys, rope, attention, experts, eps=1e-5)


def write(config: ModelConfig) -> dict[str, object]:
    """Returns the keys of a `config.json`."""
    experts = mixtures.mixture(config)
    return mixtures.with_heads(config) | {
        "sliding_window": mixtures.attention(config).window,
        "intermediate_size": experts.width,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
    }


def gguf_experts(keys: GgufKeys) -> ModelFields:
    """Returns the fields of a file of the architecture llama with experts."""
    experts = gguf_mixtures.read_experts(keys, Router(), width=keys.ffn_width)
    return {"family": "mixtral", "pattern": (LayerSpec(keys.attention(keys.rope()), experts),)}


TENSORS: Table = {**hf_names.LLAMA, **hf_names.SPARSE_BLOCK}
FAMILIES = (
    Family(
        name="mixtral",
        architecture="MixtralForCausalLM",
        read=_read_mixtral,
        reads=("num_local_experts",),
        write=write,
        feed_forwards=(Gated, Experts),
        tensors=TENSORS,
        gguf=Gguf(
            gguf_names.EXPERTS, is_interleaved=True, writer=GgufWriter("llama")
        ),  # llama's reader has it
    ),
)
