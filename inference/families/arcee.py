"""Arcee's AFM (Arcee AI 2025): Llama with a plain feed-forward, relu(x) squared."""

from configs.kinds.feed_forward import Plain
from configs.model import LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields
from inference.families.shared import (
    export_fields,
    fields,
    gguf_names,
    gguf_rope,
    hf_names,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import YARN, GgufKeys


def _read_arcee(keys: Keys) -> ModelFields:
    rope = rope_keys.read(keys)
    keys.choice("hidden_act", {"relu2": "relu2"}, "relu2")
    ffn = fields.plain(keys, "relu2", keys.boolean("mlp_bias", False))
    return fields.model(keys, rope, fields.attention(keys, rope=rope), ffn, eps=1e-5)


def _write_arcee(config: ModelConfig) -> dict[str, object]:
    return export_fields.llama_fields(config) | {"hidden_act": "relu2"}


def _gguf_arcee(keys: GgufKeys) -> ModelFields:
    attention = keys.attention(keys.rope(has_yarn=True))
    return {"pattern": (LayerSpec(attention, Plain(keys.ffn_width, "relu2")),)}


FAMILIES = (
    Family(
        name="arcee",
        architecture="ArceeForCausalLM",
        read=_read_arcee,
        reads=("attention_bias", "mlp_bias"),
        write=_write_arcee,
        tensors=hf_names.PLAIN,
        gguf=Gguf(
            gguf_names.PLAIN,
            is_interleaved=True,
            readers={"arcee": GgufReader(_gguf_arcee, YARN)},
            writer=GgufWriter("arcee", gguf_rope.yarn_of),
        ),
    ),
)
