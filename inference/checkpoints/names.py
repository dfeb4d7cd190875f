"""Which tensors of a checkpoint make up each of our parameters.

A name map takes one of our paths ('layers/3/mixer/qkv') and gives the source tensors to stack along
their rows.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from configs.errors import InputError
from configs.kinds.kind import Mixer
from configs.model import ModelConfig
from inference.checkpoints.gguf import tensor_names
from inference.checkpoints.hf import recurrent_names


class Stored(NamedTuple):
    """Where a parameter is in a checkpoint.

    Attributes:
        names: tensors whose rows follow one another; a checkpoint that stacks them has one.
        transposed: matrices are stored [in, out].
    """

    names: tuple[str, ...]
    transposed: bool = False


NameMap = Callable[[str], Stored]
Table = Mapping[str, tuple[str, ...]]


_LLAMA: Table = {
    "embed/table": ("model.embed_tokens.weight",),
    "final_norm": ("model.norm.weight",),
    "head/table": ("lm_head.weight",),
    "mixer_norm": ("input_layernorm.weight",),
    "mixer/qkv": tuple(f"self_attn.{part}_proj.weight" for part in "qkv"),
    "mixer/out": ("self_attn.o_proj.weight",),
    "mixer/q_norm": ("self_attn.q_norm.weight",),
    "mixer/k_norm": ("self_attn.k_norm.weight",),
    "ffn_norm": ("post_attention_layernorm.weight",),
    "ffn/gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "ffn/down": ("mlp.down_proj.weight",),
}
_GEMMA: Table = {
    **_LLAMA,
    "mixer_post_norm": ("post_attention_layernorm.weight",),
    "ffn_norm": ("pre_feedforward_layernorm.weight",),
    "ffn_post_norm": ("post_feedforward_layernorm.weight",),
}
_EXPERTS: Table = {
    **_LLAMA,
    "ffn/router": ("mlp.gate.weight",),
    "ffn/experts/gate_up": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "ffn/experts/down": ("mlp.experts.{}.down_proj.weight",),
}
_MIXTRAL: Table = {
    **_LLAMA,
    "ffn/router": ("block_sparse_moe.gate.weight",),
    "ffn/experts/gate_up": (
        "block_sparse_moe.experts.{}.w1.weight",
        "block_sparse_moe.experts.{}.w3.weight",
    ),
    "ffn/experts/down": ("block_sparse_moe.experts.{}.w2.weight",),
}
_MINIMAX_M2: Table = {
    **_MIXTRAL,
    "ffn/router_offsets": ("block_sparse_moe.e_score_correction_bias",),
}
_FLEX_OLMO: Table = {
    **_EXPERTS,
    "mixer_post_norm": ("post_attention_layernorm.weight",),
    "ffn_post_norm": ("post_feedforward_layernorm.weight",),
}
_QWEN2_MOE: Table = {
    **_EXPERTS,
    "ffn/shared/gate_up": (
        "mlp.shared_expert.gate_proj.weight",
        "mlp.shared_expert.up_proj.weight",
    ),
    "ffn/shared/down": ("mlp.shared_expert.down_proj.weight",),
    "ffn/shared_gate": ("mlp.shared_expert_gate.weight",),
}
_GLM4_MOE: Table = {
    **_EXPERTS,
    "ffn/router_offsets": ("mlp.gate.e_score_correction_bias",),
    "ffn/shared/gate_up": (
        "mlp.shared_experts.gate_proj.weight",
        "mlp.shared_experts.up_proj.weight",
    ),
    "ffn/shared/down": ("mlp.shared_experts.down_proj.weight",),
}
_DEEPSEEK: Table = {
    **_GLM4_MOE,
    "mixer/q": ("self_attn.q_proj.weight",),
    "mixer/q_down": ("self_attn.q_a_proj.weight",),
    "mixer/q_norm": ("self_attn.q_a_layernorm.weight",),
    "mixer/q_up": ("self_attn.q_b_proj.weight",),
    "mixer/kv_down": ("self_attn.kv_a_proj_with_mqa.weight",),
    "mixer/kv_norm": ("self_attn.kv_a_layernorm.weight",),
    "mixer/k_up": ("self_attn.kv_b_proj.{}.key",),
    "mixer/v_up": ("self_attn.kv_b_proj.{}.value",),
}
_DEEPSEEK_V32: Table = {
    **_DEEPSEEK,
    "mixer/indexer/q": ("self_attn.indexer.wq_b.weight",),
    "mixer/indexer/k": (
        "self_attn.indexer.wk.weight",
        "self_attn.indexer.weights_proj.weight",
    ),
    "mixer/indexer/k_norm/weight": ("self_attn.indexer.k_norm.weight",),
}
_GPT_OSS: Table = {
    **_LLAMA,
    "mixer/sinks": ("self_attn.sinks",),
    "ffn/router": ("mlp.router.weight",),
    "ffn/experts/gate_up": ("mlp.experts.gate_up_proj.{}.gate", "mlp.experts.gate_up_proj.{}.up"),
    "ffn/experts/down": ("mlp.experts.down_proj.{}",),
    "ffn/experts/gate_up_bias": ("mlp.experts.gate_up_proj_bias.ordered",),
    "ffn/experts/down_bias": ("mlp.experts.down_proj_bias",),
}
_PREDICTING: Table = {
    "final_norm": ("shared_head.norm.weight",),
    "input": ("eh_proj.weight",),
    "state_norm": ("hnorm.weight",),
    "token_norm": ("enorm.weight",),
}
_PHI3: Table = {
    **_LLAMA,
    "mixer/qkv": ("self_attn.qkv_proj.weight",),
    "ffn/gate_up": ("mlp.gate_up_proj.weight",),
}
_GPT2: Table = {
    "embed/table": ("transformer.wte.weight",),
    "positions/table": ("transformer.wpe.weight",),
    "final_norm/weight": ("transformer.ln_f.weight",),
    "head/table": ("lm_head.weight",),
    "mixer_norm/weight": ("ln_1.weight",),
    "mixer/qkv": ("attn.c_attn.weight",),
    "mixer/out": ("attn.c_proj.weight",),
    "ffn_norm/weight": ("ln_2.weight",),
    "ffn/up": ("mlp.c_fc.weight",),
    "ffn/down": ("mlp.c_proj.weight",),
}
_GPT2_TRANSPOSED = ("mixer/qkv", "mixer/out", "ffn/up", "ffn/down")
_GEMMA4: Table = {
    **_GEMMA,
    "inputs/table": ("model.embed_tokens_per_layer.weight",),
    "inputs/projection": ("model.per_layer_model_projection.weight",),
    "inputs/projection_norm": ("model.per_layer_projection_norm.weight",),
    "inputs/gate": ("per_layer_input_gate.weight",),
    "inputs/out": ("per_layer_projection.weight",),
    "inputs/norm": ("post_per_layer_input_norm.weight",),
    "scale": ("layer_scalar",),
    "mixer/qk": ("self_attn.q_proj.weight", "self_attn.k_proj.weight"),
    "mixer/q": ("self_attn.q_proj.weight",),
    "ffn/router": ("router.proj.weight",),
    "ffn/router_norm": ("router.scale",),
    "ffn/router_factors": ("router.per_expert_scale",),
    "ffn/experts/gate_up": ("experts.gate_up_proj",),
    "ffn/experts/down": ("experts.down_proj",),
    "ffn/experts_norm": ("pre_feedforward_layernorm_2.weight",),
    "ffn/experts_post_norm": ("post_feedforward_layernorm_2.weight",),
    "ffn/shared/gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "ffn/shared/down": ("mlp.down_proj.weight",),
    "ffn/shared_norm": ("pre_feedforward_layernorm.weight",),
    "ffn/shared_post_norm": ("post_feedforward_layernorm_1.weight",),
}
_BACKBONE: Table = {
    "embed/table": ("backbone.embeddings.weight",),
    "final_norm": ("backbone.norm_f.weight",),
    "head/table": ("lm_head.weight",),
    "mixer_norm": ("norm.weight",),
}
_MAMBA: Table = {**_BACKBONE, **recurrent_names.mamba("mixer")}
_MAMBA2: Table = {**_BACKBONE, **recurrent_names.mamba2("mixer")}
_JAMBA: Table = {
    **_LLAMA,
    **recurrent_names.mamba("mamba"),
    "final_norm": ("model.final_layernorm.weight",),
    "ffn_norm": ("pre_ff_layernorm.weight",),
    "ffn/gate_up": ("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"),
    "ffn/down": ("feed_forward.down_proj.weight",),
    "ffn/router": ("feed_forward.router.weight",),
    "ffn/experts/gate_up": (
        "feed_forward.experts.{}.gate_proj.weight",
        "feed_forward.experts.{}.up_proj.weight",
    ),
    "ffn/experts/down": ("feed_forward.experts.{}.down_proj.weight",),
}
_KIMI_LINEAR: Table = {
    **_DEEPSEEK,
    **{path: names for path, names in _MIXTRAL.items() if path.startswith("ffn/")},
    **recurrent_names.kimi_linear("self_attn"),
    "ffn/router_offsets": ("block_sparse_moe.gate.e_score_correction_bias",),
    "ffn/shared/gate_up": tuple(
        f"block_sparse_moe.shared_experts.{part}_proj.weight" for part in ("gate", "up")
    ),
    "ffn/shared/down": ("block_sparse_moe.shared_experts.down_proj.weight",),
}
_OLMO_HYBRID: Table = {
    **_GEMMA,
    **recurrent_names.olmo_hybrid("linear_attn"),
    "mixer_norm": ("attention_layer_norm.weight",),
    "ffn_norm": ("feedforward_layer_norm.weight",),
}
_QWEN3_NEXT: Table = {**_QWEN2_MOE, **recurrent_names.qwen3_next("linear_attn")}
_QWEN3_5: Table = {**_LLAMA, **recurrent_names.qwen3_5("linear_attn")}
_LFM2: Table = {
    **_LLAMA,
    **recurrent_names.short_conv("conv"),
    "final_norm": ("model.embedding_norm.weight",),
    "mixer_norm": ("operator_norm.weight",),
    "mixer/out": ("self_attn.out_proj.weight",),
    "mixer/q_norm": ("self_attn.q_layernorm.weight",),
    "mixer/k_norm": ("self_attn.k_layernorm.weight",),
    "ffn_norm": ("ffn_norm.weight",),
    "ffn/gate_up": ("feed_forward.w1.weight", "feed_forward.w3.weight"),
    "ffn/down": ("feed_forward.w2.weight",),
}
_MINIMAX: Table = {**_MIXTRAL, **recurrent_names.lightning("self_attn")}


class Names(NamedTuple):
    """How a family's checkpoints name tensors.

    Attributes:
        table: our paths, of layers without 'layers/N/', and the tensors that make them up, '{}'
            standing for the number of an expert or a head; a bias goes by its weight's names,
            unless it has names of its own. Where kinds of mixers differ, one's name stands for
            'mixer'.
        layers: what stands before a layer's number; its first word stands before all but the head.
        transposed: paths of matrices stored [in, out].
        gguf: as `table`, for the names that llama.cpp gives them.
        interleaved: llama.cpp stores rotary pairs of queries and keys as neighbours.
        predicts: layers behind the last one may predict a second token, and are no part of the
            model.
        predictor: what stands before the names of such layers that are none of the model's in
            number; they are not read.
        inside: what stands before the names of a model that is a part of one that reads images and
            sounds too.
        also: other names of a layer's tensors, where the model has none of that name, and those
            that they stand for.
        others: the other parts of that one, which are not read.
        derived: endings of tensors that only repeat what the configuration says.
        stacks_experts: all experts' matrices are one tensor [experts, in, out], in which the rows
            of gates and of what they multiply alternate.
    """

    table: Table
    layers: str = "model.layers"
    transposed: tuple[str, ...] = ()
    gguf: Table = tensor_names.LLAMA
    interleaved: bool = False
    predicts: bool = False
    predictor: str | None = None
    inside: str | None = None
    also: Mapping[str, str] = {}
    others: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()
    stacks_experts: bool = False


_SHARED = re.compile(r"(?:model\.layers|blk)\.(\d+)\.(?:self_attn\.|attn_)[kv](?:_.+)?\.\w+")
_LAYER = re.compile(r"layers/(\d+)/(.+)")
_PART = re.compile(r"(.+)/(\d+)")  # of a stack

FAMILIES: dict[str, Names] = {
    "llama": Names(_LLAMA, interleaved=True),
    "gemma2": Names(_GEMMA),
    "gemma3": Names(_GEMMA),
    "gemma4": Names(
        _GEMMA4,
        gguf=tensor_names.GEMMA4,
        inside="model.language_model",
        others=tuple(
            f"model.{part}"
            for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
        ),
    ),
    "gpt2": Names(_GPT2, "transformer.h", _GPT2_TRANSPOSED, tensor_names.GPT2),
    "mistral": Names(_LLAMA),
    "olmo2": Names(_GEMMA),
    "olmo3": Names(_GEMMA),
    "deepseek_v2": Names(_DEEPSEEK, gguf=tensor_names.LATENT),
    "deepseek_v3": Names(_DEEPSEEK, gguf=tensor_names.LATENT, predicts=True),
    "deepseek_v32": Names(_DEEPSEEK_V32, gguf={}, predicts=True),  # which llama.cpp has not
    "dots1": Names(_GLM4_MOE, gguf=tensor_names.EXPERTS),
    "flex_olmo": Names(_FLEX_OLMO, gguf={}),  # nor this
    "glm_moe_dsa": Names(_DEEPSEEK_V32, gguf={}, predicts=True),  # nor this
    "glm4_moe_lite": Names(_DEEPSEEK, gguf=tensor_names.LATENT, predicts=True),
    "bamba": Names({**_LLAMA, **recurrent_names.BAMBA}, gguf={}),  # nor this, as it is published
    "falcon_h1": Names({**_LLAMA, **recurrent_names.BAMBA}, gguf=tensor_names.FALCON_H1),
    "granitemoehybrid": Names(
        {**_LLAMA, **recurrent_names.GRANITE}, gguf=tensor_names.STATES, interleaved=True
    ),
    "falcon_mamba": Names(_MAMBA, "backbone.layers", gguf=tensor_names.STATES),
    "jamba": Names(_JAMBA, gguf=tensor_names.STATES),
    "mamba": Names(_MAMBA, "backbone.layers", gguf=tensor_names.STATES),
    "mamba2": Names(_MAMBA2, "backbone.layers", gguf=tensor_names.STATES),
    "nemotron_h": Names(
        {**_MAMBA2, **recurrent_names.NEMOTRON},
        "backbone.layers",
        gguf=tensor_names.NEMOTRON,
        interleaved=True,
        others=("mtp",),
    ),
    "lfm2": Names(_LFM2, gguf=tensor_names.LFM2),
    "minimax": Names(
        _MINIMAX,
        gguf={},
        derived=tuple(
            f".self_attn.{part}"
            for part in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
        ),
    ),
    "minimax_m2": Names(_MINIMAX_M2, gguf=tensor_names.EXPERTS),
    "glm4_moe": Names(_GLM4_MOE, gguf=tensor_names.POST_NORMED, predicts=True),
    "gpt_oss": Names(_GPT_OSS, gguf=tensor_names.POST_NORMED, stacks_experts=True),
    "mixtral": Names(_MIXTRAL, gguf=tensor_names.EXPERTS, interleaved=True),
    "olmoe": Names(_EXPERTS, gguf=tensor_names.EXPERTS),
    "phi3": Names(_PHI3, gguf=tensor_names.PHI3),
    "qwen2": Names(_LLAMA),
    "qwen2_moe": Names(_QWEN2_MOE, gguf=tensor_names.EXPERTS),
    "qwen3": Names(_LLAMA),
    "qwen3_moe": Names(_EXPERTS, gguf=tensor_names.EXPERTS),
    "kimi_linear": Names(
        _KIMI_LINEAR,
        gguf={},
        also={
            f"block_sparse_moe.{part}_proj.weight": f"mlp.{part}_proj.weight"
            for part in ("gate", "up", "down")
        },
    ),
    "olmo_hybrid": Names(
        _OLMO_HYBRID,
        gguf={},
        also={
            "input_layernorm.weight": "attention_layer_norm.weight",
            "post_attention_layernorm.weight": "feedforward_layer_norm.weight",
            "feedforward_layer_norm.weight": "post_attention_layernorm.weight",
        },
    ),
    "qwen3_5": Names(
        _QWEN3_5, gguf={}, predictor="mtp", inside="model.language_model", others=("model.visual",)
    ),
    "qwen3_next": Names(_QWEN3_NEXT, gguf={}, predictor="mtp"),
    "smollm3": Names(_LLAMA, interleaved=True),
}


def huggingface(config: ModelConfig) -> NameMap:
    """The map to the names transformers gives a model's tensors."""
    return functools.partial(_translate, FAMILIES[config.family], config)


def predicting(config: ModelConfig, number: int) -> NameMap:
    """The map to the names of a layer that predicts a second token, of heads that are that layer.

    Args:
        config: of the heads.
        number: of the layer.
    """

    def name(path: str) -> Stored:
        names = FAMILIES[config.family]
        if path not in _PREDICTING:
            return _translate(names, config, path, number)
        return Stored(tuple(f"{names.layers}.{number}.{own}" for own in _PREDICTING[path]))

    return name


def base(family: str) -> str:
    """What stands before the names of all tensors but the head's."""
    return FAMILIES[family].layers.split(".")[0]


def gguf(config: ModelConfig) -> NameMap:
    """The map to the names llama.cpp gives a model's tensors."""
    return functools.partial(_translate, Names(FAMILIES[config.family].gguf, layers="blk"), config)


def interleaved(family: str) -> bool:
    """Whether llama.cpp stores the rotary pairs of a family's queries and keys as neighbours."""
    return FAMILIES[family].interleaved


def is_other(family: str, name: str) -> bool:
    """Whether a tensor belongs to another part of the model that this one is a part of."""
    return name.startswith(tuple(f"{other}." for other in FAMILIES[family].others))


def is_unread(config: ModelConfig, name: str) -> bool:
    """Whether a tensor makes keys or values in a layer that reads an earlier one's."""
    layer = _SHARED.fullmatch(name)
    if layer is None or int(layer[1]) >= config.num_layers:
        return False
    return config.cache_specs[int(layer[1])].owner is not None


def is_behind(config: ModelConfig, name: str, layers: str, count: int) -> bool:
    """Whether a tensor is of a layer that predicts a second token.

    Args:
        config: the model.
        name: of the tensor.
        layers: what stands before a layer's number.
        count: such layers that the checkpoint announces.
    """
    predictor = FAMILIES[config.family].predictor
    if predictor is not None and name.startswith(f"{predictor}."):
        return True
    number = name.removeprefix(f"{layers}.").partition(".")[0]
    has_number = name.startswith(f"{layers}.") and number.isdecimal()
    predicts = FAMILIES[config.family].predicts
    behind = range(config.num_layers, config.num_layers + count)
    return predicts and has_number and int(number) in behind


def identity(path: str) -> Stored:
    """The map of a checkpoint that is stored under our own paths."""
    return Stored((path,))


def _translate(names: Names, config: ModelConfig, path: str, first: int = 0) -> Stored:
    """`first` is the number of the model's first layer there."""
    layer = _LAYER.fullmatch(path)
    own = layer[2] if layer else path
    if part := _PART.fullmatch(own):
        stack = _translate(names, config, path.removesuffix(f"/{part[2]}"), first)
        return Stored((stack.names[int(part[2])],), stack.transposed)
    if layer and own.startswith("mixer/"):
        own = _of_kind(names, config.layers[int(layer[1])].mixer, own)
    weight = _weight(names, own)
    is_bias, found = weight != own, names.table.get(weight)
    if found is None:
        raise InputError(f"parameter {path!r} has no counterpart in this checkpoint format")
    if is_bias:
        found = tuple(name.removesuffix(".weight") + ".bias" for name in found)
    if layer and "{}" in found[0]:
        found = tuple(name.format(n) for n in range(_matrices(config, layer)) for name in found)
    if layer:
        found = tuple(f"{names.layers}.{first + int(layer[1])}.{name}" for name in found)
    return Stored(found, own in names.transposed)


def _of_kind(names: Names, mixer: Mixer, path: str) -> str:
    """The path of a mixer's parameter that its names go by: its kind's, where the family says so,
    else that of any mixer; of one of two mixers as if it were alone.
    """
    of_kind = path.replace("mixer", mixer.name, 1)
    if len(mixer.parts) > 1:
        of_kind = path.removeprefix("mixer/")
        path = f"mixer/{of_kind.partition('/')[2]}"
    return of_kind if _weight(names, of_kind) in names.table else path


def _weight(names: Names, path: str) -> str:
    """The path whose names a parameter goes by: its own, or its weight's."""
    if not path.endswith(("_bias", "/bias")) or path in names.table:
        return path
    return path.removesuffix("_bias").replace("/bias", "/weight")


def _matrices(config: ModelConfig, layer: re.Match[str]) -> int:
    """Of a stack: a layer's experts, or its heads."""
    found = config.layers[int(layer[1])]
    if layer[2].startswith("mixer/"):
        return found.mixer.query_heads
    assert found.ffn is not None and found.ffn.experts is not None
    return found.ffn.experts[0]
