"""Apertus (Swiss AI Initiative 2025, arXiv 2509.14233): Llama with norms of query and key heads and
a plain feed-forward whose activation each layer learns (xIELU).
"""

from configs.kinds.feed_forward import Plain
from configs.kinds.rope import Llama3, Rope
from configs.model import LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    export_fields,
    fields,
    gguf_names,
    gguf_rope,
    hf_names,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys
from inference.families.shared.parts import Part, Parts

_THETA = 12_000_000.0
_ROPE = Rope(_THETA, Llama3(8.0, 1.0, 4.0, 8192))  # where a file describes none
_CURVE = "mlp.act_fn"
_CONSTANTS: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


def _read_apertus(keys: Keys) -> ModelFields:
    keys.choice("hidden_act", {"xielu": "xielu"}, "xielu")
    keys.require_neutral(post_norm=(False, None), qk_norm=(True, None))
    is_described = rope_keys.described(keys) is not None or keys.raw.get("rope_theta") is not None
    rope = rope_keys.read(keys, _THETA) if is_described else _ROPE
    attention = fields.attention(keys, rope=rope, qk_norm="head")
    ffn = Plain(keys.integer("intermediate_size", 14_336), "xielu")
    return fields.model(keys, rope, attention, ffn, eps=1e-5)


def _write_apertus(config: ModelConfig) -> dict[str, object]:
    """Returns the keys: transformers stretches the positions of a file that describes none."""
    raw = export_fields.llama_fields(config)
    del raw["mlp_bias"]
    scaling = raw["rope_scaling"] or {"rope_type": "default"}
    return raw | {"hidden_act": "xielu", "rope_scaling": scaling}


def _curves(prefix: str, layer: LayerSpec, width: int, tensors: Table) -> Parts:
    """Makes vectors of the constants: some are stored as numbers."""
    for name, stored in _CONSTANTS.items():
        tensor = f"{prefix}.{_CURVE}.{name}"
        yield f"{tensor}.vector", Part(tensor, stored, (1,), slice(0, 1))


def _gguf_apertus(keys: GgufKeys) -> ModelFields:
    attention = keys.attention(gguf_rope.llama3(keys), qk_norm="head")
    return {"pattern": (LayerSpec(attention, Plain(keys.ffn_width, "xielu")),)}


_NUMBERS = tuple(f"xielu.{name}" for name in _CONSTANTS)
FAMILIES = (
    Family(
        name="apertus",
        architecture="ApertusForCausalLM",
        read=_read_apertus,
        reads=("attention_bias",),
        write=_write_apertus,
        feed_forwards=(Plain,),
        tensors={
            **hf_names.PLAIN,
            "mixer_norm": ("attention_layernorm.weight",),
            "ffn_norm": ("feedforward_layernorm.weight",),
            "ffn/curve": tuple(f"{_CURVE}.{name}.vector" for name in _CONSTANTS),
        },
        splits=(_curves,),
        gguf=Gguf(
            {**gguf_names.PLAIN, "ffn/curve": _NUMBERS},
            numbers=_NUMBERS,
            readers={"apertus": GgufReader(_gguf_apertus)},
            writer=GgufWriter("apertus"),
        ),
    ),
)
