"""Hunyuan (Tencent 2025), dense: Llama whose queries and keys rotate before their norms."""

from configs.kinds.rope import Rope
from configs.model import ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import export_fields, fields, hf_names, rope_keys
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys


def _read_dense(keys: Keys) -> ModelFields:
    keys.require_neutral(use_qk_norm=(True, None), use_cla=(False, None))
    keys = keys.with_defaults({"head_dim": keys.raw.get("attention_head_dim")})
    turning = rope(keys)
    attention = fields.attention(keys, rope=turning, qk_norm="head", rotates_first=True)
    return fields.model(keys, turning, attention, eps=1e-5)


def rope(keys: Keys) -> Rope:
    """Reads the positions. A stated `alpha` stretches the base once for all lengths, by its power
    d / (d - 2) with heads of d elements, whatever else "dynamic" scaling states.
    """
    stated = rope_keys.described(keys)
    if stated is None or not stated.raw.get("alpha"):
        return rope_keys.read(keys)
    stated.choice("type" if stated.raw.get("rope_type") is None else "rope_type",
                  {"dynamic": "dynamic"}, "dynamic")  # fmt: skip
    width = fields.attention(keys).head_width
    theta = stated.number("rope_theta", keys.number("rope_theta", 10_000.0))
    return Rope(theta * stated.number("alpha") ** (width / max(width - 2, 1)))


def _write_dense(config: ModelConfig) -> dict[str, object]:
    return export_fields.llama_fields(config) | {"use_qk_norm": True, "use_cla": False}


def _gguf_dense(keys: GgufKeys) -> ModelFields:
    return {"pattern": (keys.layer(keys.rope(), qk_norm="head", rotates_first=True),)}


NORMS: Table = {
    "mixer/q_norm": ("self_attn.query_layernorm.weight",),
    "mixer/k_norm": ("self_attn.key_layernorm.weight",),
}
FAMILIES = (
    Family(
        name="hunyuan_v1_dense",
        architecture="HunYuanDenseV1ForCausalLM",
        read=_read_dense,
        reads=("attention_bias",),
        write=_write_dense,
        tensors={**hf_names.LLAMA, **NORMS},
        gguf=Gguf(
            readers={"hunyuan-dense": GgufReader(_gguf_dense)}, writer=GgufWriter("hunyuan-dense")
        ),
    ),
)
