"""Llama 4 (Meta 2025), the part that reads and writes text: attention in chunks, layers without
RoPE whose queries grow with their position, and experts whose inputs are weighed.
"""

import dataclasses

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts, Router
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward
from configs.kinds.rope import Linear, Llama3, Rope
from configs.kinds.temperature import Temperature
from configs.model import LayerSpec, ModelConfig
from inference.families.family import Family, Gguf, GgufReader, GgufWriter, ModelFields, Table
from inference.families.shared import (
    export_fields,
    fields,
    gguf_mixtures,
    gguf_names,
    gguf_rope,
    gguf_windows,
    hf_names,
    mixtures,
    parts,
    rope_keys,
)
from inference.families.shared.config_keys import Keys
from inference.families.shared.gguf_keys import GgufKeys
from inference.families.shared.gguf_states import Metadata

_ROUTER = Router("sigmoid", is_normalized=False)
_FULL, _CHUNKED = "full_attention", "chunked_attention"


def _read_llama4(keys: Keys) -> ModelFields:
    rope = dataclasses.replace(rope_keys.read(keys, 500_000.0), neighbours=True)
    if not isinstance(rope.scaling, Linear | Llama3 | None):
        raise InputError("rope_type must be default, linear or llama3: norms stand behind RoPE")
    ffns = _ffns(keys, fields.num_layers(keys))
    return fields.model(keys, rope, _mixers(keys, rope), ffns, eps=1e-5)


def _mixers(keys: Keys, rope: Rope) -> list[Attention]:
    layers = fields.num_layers(keys)
    period = keys.integer("no_rope_layer_interval", 4)
    rotates = keys.listed("no_rope_layers", layers) if keys.raw.get("no_rope_layers") else None
    if rotates is None:  # 1 where a layer rotates, despite the name
        rotates = [int((layer + 1) % period != 0) for layer in range(layers)]
    if any(value not in (0, 1) for value in rotates):
        raise InputError("no_rope_layers lists 1 for a layer that rotates and 0 for one without")
    length = keys.optional_integer("attention_chunk_size", 8192)
    kinds = fields.layer_types(keys, (_FULL, _CHUNKED)) or [
        _CHUNKED if turns and length else _FULL for turns in rotates
    ]
    if length is None and _CHUNKED in kinds:
        raise InputError(f"layer type {_CHUNKED!r} goes with an attention_chunk_size")
    norm = "plain" if keys.boolean("use_qk_norm", True) else None
    turning = fields.attention(keys, 128, rope=rope, qk_norm=norm)
    still = dataclasses.replace(turning, rope=None, qk_norm=None, temperature=_temperature(keys))
    pairs = zip(rotates, kinds, strict=True)
    mixers = ((turning if turns else still, kind) for turns, kind in pairs)
    return [
        mixer if kind == _FULL else dataclasses.replace(mixer, window=length, chunked=True)
        for mixer, kind in mixers
    ]


def _temperature(keys: Keys) -> Temperature | None:
    """Returns the temperature of layers without RoPE; published files say 4 for true."""
    stated = keys.raw.get("attn_temperature_tuning")
    if not isinstance(stated, bool | int | None):
        raise InputError(
            f"{keys.label}attn_temperature_tuning must be true or false, not {shown(stated)}"
        )
    if stated is not None and not stated:
        return None
    scale, length = keys.number("attn_scale", 0.1), keys.integer("floor_scale", 8192)
    return Temperature(scale, length, offset=1)


def _ffns(keys: Keys, layers: int) -> list[FeedForward]:
    step = keys.integer("interleave_moe_layer_step", 1)
    numbers = set(range(step - 1, layers, step))
    if keys.raw.get("moe_layers") is not None:
        numbers = fields.numbered(keys, "moe_layers", layers)
    width = keys.integer("intermediate_size", 8192)
    dense = Gated(keys.integer("intermediate_size_mlp", 16_384), fields.activation(keys))
    experts = mixtures.experts(
        keys, "num_local_experts", 16, 1, width, _ROUTER, shared_width=width, weighs_inputs=True
    )
    return [experts if layer in numbers else dense for layer in range(layers)]


def _write_llama4(config: ModelConfig) -> dict[str, object]:
    mixers = [export_fields.attention(layer) for layer in config.layers]
    turning = next((mixer for mixer in mixers if mixer.rope), mixers[0])
    heated = next((mixer.temperature for mixer in mixers if mixer.temperature), None)
    experts, dense = mixtures.mixture(config), mixtures.dense_layers(config)
    numbers = [layer for layer in range(config.num_layers) if layer not in dense]
    raw = export_fields.sizes(config, turning.rope or Rope()) | export_fields.heads(turning)
    if heated is not None:
        raw |= {"attn_scale": heated.scale, "floor_scale": heated.length}
    return raw | {
        "attention_bias": "out" in turning.biases,
        "use_qk_norm": turning.qk_norm is not None,
        "no_rope_layers": [int(mixer.rope is not None) for mixer in mixers],
        "layer_types": [_CHUNKED if mixer.chunked else _FULL for mixer in mixers],
        "attention_chunk_size": next((mixer.window for mixer in mixers if mixer.chunked), None),
        "attn_temperature_tuning": heated is not None,
        "moe_layers": numbers,
        "intermediate_size": experts.width,
        "intermediate_size_mlp": dense[min(dense)].width if dense else experts.width,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.top_k,
    }


_WINDOW, _STEP = "attention.sliding_window", "interleave_moe_layer_step"
_PERIOD, _MOST = 4, 128  # layers; experts


def _gguf_llama4(keys: GgufKeys) -> ModelFields:
    """Reads Llama 4. llama.cpp has its chunks, its layers without RoPE and their temperature as
    constants, and norms queries and keys of all but the model with the most experts.
    """
    if keys.has(_WINDOW) and not keys.whole(_WINDOW):
        raise InputError(f"metadata {keys.architecture}.{_WINDOW}=0 is not supported: no chunks")
    count, width = keys.integer("expert_count"), keys.integer("expert_feed_forward_length")
    near = keys.attention(
        dataclasses.replace(gguf_rope.llama3(keys), neighbours=True), window=8192, chunked=True,
        qk_norm=None if count == _MOST else "plain",
    )  # fmt: skip
    far = keys.attention(None, temperature=Temperature(0.1, 8192, offset=1))
    experts = gguf_mixtures.read_experts(keys, _ROUTER, shared_width=width, weighs_inputs=True)
    dense, step = Gated(keys.ffn_width), keys.integer(_STEP)
    layers = [
        LayerSpec(near if layer % _PERIOD else far, dense if layer % step else experts)
        for layer in range(1, keys.num_layers + 1)
    ]
    return {"pattern": fields.repeated(layers)}


def _gguf_metadata(config: ModelConfig) -> Metadata:
    """Returns the chunk, and which of so many layers has experts: the last one."""
    numbers = [n for n, layer in enumerate(config.layers, 1) if isinstance(layer.ffn, Experts)]
    return {_WINDOW: gguf_windows.window(config), _STEP: next(iter(numbers), 1)}


def _split_experts(prefix: str, layer: LayerSpec, width: int, tensors: Table) -> parts.Parts:
    """Splits matrices [experts, in, out] of all experts, in which gates lie before ups."""
    if not isinstance(layer.ffn, Experts):
        return
    E, D, F = layer.ffn.num_experts, width, layer.ffn.width
    name = f"{prefix}.feed_forward.experts"
    gate_up, down = f"{name}.gate_up_proj", f"{name}.down_proj"
    for expert in range(E):
        matrix = slice(expert, expert + 1)
        for first, half in enumerate(("gate", "up")):
            columns = slice(first * F, (first + 1) * F)
            part = parts.Part(gate_up, (E, D, 2 * F), (F, D), matrix, columns, transposed=True)
            yield f"{gate_up}.{expert}.{half}", part
        part = parts.Part(down, (E, F, D), (D, F), matrix, transposed=True)
        yield f"{down}.{expert}", part


_TENSORS: Table = {
    **hf_names.LLAMA,
    "ffn/gate_up": ("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"),
    "ffn/down": ("feed_forward.down_proj.weight",),
    "ffn/router": ("feed_forward.router.weight",),
    "ffn/experts/gate_up": tuple(
        f"feed_forward.experts.gate_up_proj.{{}}.{half}" for half in ("gate", "up")
    ),
    "ffn/experts/down": ("feed_forward.experts.down_proj.{}",),
    "ffn/shared/gate_up": tuple(
        f"feed_forward.shared_expert.{part}_proj.weight" for part in ("gate", "up")
    ),
    "ffn/shared/down": ("feed_forward.shared_expert.down_proj.weight",),
}
FAMILIES = (
    Family(
        name="llama4",
        architecture="Llama4ForCausalLM",
        model_type="llama4_text",
        read=_read_llama4,
        reads=("attention_bias", "num_local_experts"),
        write=_write_llama4,
        feed_forwards=(Gated, Experts),
        tensors=_TENSORS,
        splits=(_split_experts,),
        wrapper="Llama4ForConditionalGeneration",
        ignored=("vision_model", "multi_modal_projector"),
        gguf=Gguf(
            gguf_names.EXPERTS,
            readers={
                "llama4": GgufReader(
                    _gguf_llama4,
                    (*gguf_mixtures.COUNTS, "expert_feed_forward_length", _WINDOW, _STEP),
                )
            },
            writer=GgufWriter("llama4", _gguf_metadata),
        ),
    ),
)
