"""Solar Open (Upstage 2025): Llama's attention, GLM-4.5's mixture in every layer."""

from configs.kinds.experts import Experts
from configs.model import ModelConfig
from inference.families.family import Family, ModelFields
from inference.families.shared import fields, hf_names, mixtures, rope_keys
from inference.families.shared.config_keys import Keys


def _read_solar_open(keys: Keys) -> ModelFields:
    keys.require_neutral(
        first_k_dense_replace=(0, None),
        use_qk_norm=(False, None),
        partial_rotary_factor=(1, None),
    )
    rope = rope_keys.read(keys, 1_000_000.0)
    biases = ("qkv",) if keys.boolean("attention_bias", False) else ()
    attention = fields.attention(keys, 128, rope=rope, biases=biases)
    router = mixtures.offset_router(keys, 1.0, 1, 1)
    experts = mixtures.sharing_experts(keys, 128, 8, router, width=1280)
    return fields.model(keys, rope, attention, experts, eps=1e-5)


def _write_solar_open(config: ModelConfig) -> dict[str, object]:
    return mixtures.with_heads(config) | mixtures.routed(config) | {
        "attention_bias": "qkv" in mixtures.attention(config).biases,
    }  # fmt: skip


FAMILIES = (
    Family(
        name="solar_open",
        architecture="SolarOpenForCausalLM",
        read=_read_solar_open,
        reads=("attention_bias",),
        write=_write_solar_open,
        feed_forwards=(Experts,),
        tensors=hf_names.SHARED_EXPERTS,
    ),
)
