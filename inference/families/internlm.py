"""InternLM2 (Cai et al. 2024, arXiv 2403.17297), whose queries, keys and values are one matrix, and
InternLM3 (2025): both compute what Llama computes.
"""

from collections.abc import Mapping

import numpy as np

from configs.kinds.attention import Attention
from configs.model import LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import export_fields, fields, gguf_rope, hf_names, parts, rope_keys
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys

_READS = ("attention_bias", "mlp_bias")


def _read_internlm2(keys: Keys) -> ModelFields:
    keys = keys.updated({"attention_bias": keys.raw.get("bias", True), "mlp_bias": None})
    rope = rope_keys.read(keys)
    return fields.model(keys, rope, fields.attention(keys, rope=rope))


def _read_internlm3(keys: Keys) -> ModelFields:
    """Reads InternLM3, which has a key for biases of queries, keys and values, and one for others;
    transformers has other names for both.
    """
    stated = {"qkv": ("qkv_bias", "attention_bias"), "out": ("bias", "mlp_bias")}
    biases = tuple(
        part
        for part, (key, other) in stated.items()
        if keys.boolean(key if key in keys.raw else other, False)
    )
    keys = keys.updated({"mlp_bias": "out" in biases}).with_defaults({"head_dim": 128})
    rope = rope_keys.read(keys)
    return fields.model(keys, rope, fields.attention(keys, rope=rope, biases=biases), eps=1e-5)


def _write_internlm2(config: ModelConfig) -> dict[str, object]:
    raw = export_fields.llama_fields(config)
    return raw | {"bias": raw["attention_bias"]}


def _write_internlm3(config: ModelConfig) -> dict[str, object]:
    attention, ffn = export_fields.first(config)
    biases = {"qkv_bias": "qkv" in attention.biases, "bias": ffn.has_bias}
    return export_fields.llama_fields(config) | biases


def _packed(prefix: str, layer: LayerSpec, width: int, tensors: Table) -> parts.Parts:
    """Splits the matrix of queries, keys and values: the rows of each key and value head follow
    those of its queries.
    """
    mixer = layer.mixer
    assert isinstance(mixer, Attention)
    N, K, H = mixer.num_heads, mixer.num_kv_heads, mixer.head_width
    rows_KGH = np.arange((N + 2 * K) * H).reshape(K, N // K + 2, H)
    rows: Mapping[str, np.ndarray] = {
        "q": rows_KGH[:, :-2], "k": rows_KGH[:, -2], "v": rows_KGH[:, -1],
    }  # fmt: skip
    name = f"{prefix}.attention.wqkv"
    yield from parts.gathered(f"{name}.weight", ((N + 2 * K) * H, width), rows)
    if "qkv" in mixer.biases:
        for part, numbers in rows.items():
            stored = ((N + 2 * K) * H,)
            yield (
                f"{name}.bias.{part}",
                parts.Part(f"{name}.bias", stored, (numbers.size,), numbers.ravel()),
            )


def _gguf_internlm2(keys: GgufKeys) -> ModelFields:
    biases = ("qkv", "out") if keys.has_tensor("blk.0.attn_q.bias") else ()
    return {"pattern": (keys.layer(gguf_rope.llama3(keys), biases=biases),)}


FAMILIES = (
    Family(
        name="internlm2",
        architecture="InternLM2ForCausalLM",
        read=_read_internlm2,
        reads=_READS,
        write=_write_internlm2,
        tensors={
            "embed/table": ("model.tok_embeddings.weight",),
            "final_norm": ("model.norm.weight",),
            "head/table": ("output.weight",),
            "mixer_norm": ("attention_norm.weight",),
            "mixer/qkv": tuple(f"attention.wqkv.weight.{part}" for part in "qkv"),
            "mixer/qkv_bias": tuple(f"attention.wqkv.bias.{part}" for part in "qkv"),
            "mixer/out": ("attention.wo.weight",),
            "ffn_norm": ("ffn_norm.weight",),
            "ffn/gate_up": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
            "ffn/down": ("feed_forward.w2.weight",),
        },
        splits=(_packed,),
        gguf=Gguf(
            is_interleaved=True,
            readers={"internlm2": GgufReader(_gguf_internlm2)},
            writer=GgufWriter("internlm2"),
        ),
    ),
    Family(
        name="internlm3",
        architecture="InternLM3ForCausalLM",
        read=_read_internlm3,
        reads=_READS,
        write=_write_internlm3,
        tensors=hf_names.LLAMA,
        gguf=Gguf(writer=GgufWriter("llama", read_as="llama")),
    ),
)
