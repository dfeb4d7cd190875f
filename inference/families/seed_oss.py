"""Seed-OSS (ByteDance 2025): Llama with biases of queries, keys and values."""

from configs.model import ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields
from inference.families.shared import export_fields, fields, gguf_names, hf_names, rope_keys
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys


def _read_seed_oss(keys: Keys) -> ModelFields:
    rope = rope_keys.read(keys)
    stated = {"qkv": keys.boolean("attention_bias", True)}
    stated |= {"out": keys.boolean("attention_out_bias", False)}
    biases = tuple(part for part, has_bias in stated.items() if has_bias)
    attention = fields.attention(keys.with_defaults({"head_dim": 128}), rope=rope, biases=biases)
    return fields.model(keys, rope, attention)


def _write_seed_oss(config: ModelConfig) -> dict[str, object]:
    attention, _ = export_fields.first(config)
    return export_fields.llama_fields(config) | {
        "attention_bias": "qkv" in attention.biases,
        "attention_out_bias": "out" in attention.biases,
    }


def _gguf_seed_oss(keys: GgufKeys) -> ModelFields:
    biases = ("qkv",) if keys.has_tensor("blk.0.attn_q.bias") else ()
    return {"pattern": (keys.layer(keys.rope(), biases=biases),)}


FAMILIES = (
    Family(
        name="seed_oss",
        architecture="SeedOssForCausalLM",
        read=_read_seed_oss,
        reads=("attention_bias", "mlp_bias"),
        write=_write_seed_oss,
        tensors=hf_names.LLAMA,
        gguf=Gguf(
            gguf_names.POST_NORMED,
            readers={"seed_oss": GgufReader(_gguf_seed_oss)},
            writer=GgufWriter("seed_oss"),
        ),
    ),
)
