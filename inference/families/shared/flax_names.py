"""Where trees of Flax keep transformers' tensors: Tunix's NNX modules, Linen modules of the `gemma`
package, and MaxText's decoders (`Family.flax`).

Each axis has a letter: D width, F feed-forward, V vocabulary, N query heads, K KV heads, L layers,
H elements of a head, or `a` (2, its halves) and `b` (H / 2). A number is an axis of that many
tensors.
"""

import dataclasses
from collections.abc import Mapping

# Axes of transformers' tensors, by the last words of their names; norms of layers have D.
AXES = {
    "embed_tokens.weight": "V D", "lm_head.weight": "V D", "q_proj.weight": "NH D",
    "k_proj.weight": "KH D", "v_proj.weight": "KH D", "o_proj.weight": "D NH", "q_proj.bias": "NH",
    "k_proj.bias": "KH", "v_proj.bias": "KH", "q_norm.weight": "H", "k_norm.weight": "H",
    "gate_proj.weight": "F D", "up_proj.weight": "F D", "down_proj.weight": "D F",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A leaf of a tree of Flax.

    Attributes:
        path: its keys, of a layer's leaf below the layer.
        axes: in the order of the leaf; those written together ("NH") are one axis.
        index: of the tensor on the axis that is a number, the first; None: there is no such axis.
        is_divided: whether the tensor was divided by the square root of H, which attention then
            need not do.
    """

    path: str
    axes: str
    index: int | None = None
    is_divided: bool = False


@dataclasses.dataclass(frozen=True)
class Names:
    """The tree of one family in one package.

    Attributes:
        package: its name, for messages.
        layer: the path of a layer, "{}" for its number; without it the layers' leaves are stacked
            along an axis L.
        leaves: by the names of transformers' tensors, of layers without "model.layers.N.".
        ignored: how paths begin that are not of the text.
        is_scaled: whether it is that of models with the rotary positions of Llama 3.1, or of those
            without; None: of both.
    """

    package: str
    layer: str
    leaves: Mapping[str, Leaf]
    ignored: tuple[str, ...] = ()
    is_scaled: bool | None = None


_TUNIX = {
    "model.embed_tokens.weight": Leaf("embedder/input_embedding", "V D"),
    "model.norm.weight": Leaf("final_norm/w", "D"),
    "lm_head.weight": Leaf("lm_head/w", "D V"),
    "input_layernorm.weight": Leaf("input_layernorm/w", "D"),
    "post_attention_layernorm.weight": Leaf("post_attention_layernorm/w", "D"),
    "self_attn.q_proj.weight": Leaf("attn/q_proj/w", "D N H"),
    "self_attn.k_proj.weight": Leaf("attn/k_proj/w", "D K H"),
    "self_attn.v_proj.weight": Leaf("attn/v_proj/w", "D K H"),
    "self_attn.o_proj.weight": Leaf("attn/o_proj/w", "N H D"),
    "self_attn.q_proj.bias": Leaf("attn/q_bias", "NH"),
    "self_attn.k_proj.bias": Leaf("attn/k_bias", "KH"),
    "self_attn.v_proj.bias": Leaf("attn/v_bias", "KH"),
    "self_attn.q_norm.weight": Leaf("attn/q_norm/w", "H"),
    "self_attn.k_norm.weight": Leaf("attn/k_norm/w", "H"),
    "mlp.gate_proj.weight": Leaf("mlp/gate_proj/kernel", "D F"),
    "mlp.up_proj.weight": Leaf("mlp/up_proj/kernel", "D F"),
    "mlp.down_proj.weight": Leaf("mlp/down_proj/kernel", "F D"),
}
_MAXTEXT = {
    "model.embed_tokens.weight": Leaf("token_embedder/embedding", "V D"),
    "model.norm.weight": Leaf("decoder/decoder_norm/scale", "D"),
    "lm_head.weight": Leaf("decoder/logits_dense/kernel", "D V"),
    "input_layernorm.weight": Leaf("pre_self_attention_layer_norm/scale", "D"),
    "post_attention_layernorm.weight": Leaf("post_self_attention_layer_norm/scale", "D"),
    "self_attn.q_proj.weight": Leaf("self_attention/query/kernel", "D N H"),
    "self_attn.k_proj.weight": Leaf("self_attention/key/kernel", "D K H"),
    "self_attn.v_proj.weight": Leaf("self_attention/value/kernel", "D K H"),
    "self_attn.o_proj.weight": Leaf("self_attention/out/kernel", "N H D"),
    "self_attn.q_proj.bias": Leaf("self_attention/query/bias", "N H"),
    "self_attn.k_proj.bias": Leaf("self_attention/key/bias", "K H"),
    "self_attn.v_proj.bias": Leaf("self_attention/value/bias", "K H"),
    "self_attn.q_norm.weight": Leaf("self_attention/query_norm/scale", "H"),
    "self_attn.k_norm.weight": Leaf("self_attention/key_norm/scale", "H"),
    "mlp.gate_proj.weight": Leaf("mlp/wi_0/kernel", "D F"),
    "mlp.up_proj.weight": Leaf("mlp/wi_1/kernel", "D F"),
    "mlp.down_proj.weight": Leaf("mlp/wo/kernel", "F D"),
}
# Llama has the scale of attention in its queries there, and since 3.1 it rotates neighbors.
_MAXTEXT_LLAMA = {
    **_MAXTEXT,
    "self_attn.q_proj.weight": Leaf("self_attention/query/kernel", "D N H", is_divided=True),
}
_MAXTEXT_LLAMA31 = {
    **_MAXTEXT,
    "self_attn.q_proj.weight": Leaf("self_attention/query/kernel", "D N ba", is_divided=True),
    "self_attn.k_proj.weight": Leaf("self_attention/key/kernel", "D K ba"),
}
_FEW_KV_HEADS = {
    "self_attn.q_proj.weight": Leaf("attn/q_einsum/w", "N D H"),
    "self_attn.k_proj.weight": Leaf("attn/kv_einsum/w", "2 K D H", 0),
    "self_attn.v_proj.weight": Leaf("attn/kv_einsum/w", "2 K D H", 1),
}
# Where each query head has a KV head of its own.
_ALL_KV_HEADS = {
    "self_attn.q_proj.weight": Leaf("attn/qkv_einsum/w", "3 N D H", 0),
    "self_attn.k_proj.weight": Leaf("attn/qkv_einsum/w", "3 K D H", 1),
    "self_attn.v_proj.weight": Leaf("attn/qkv_einsum/w", "3 K D H", 2),
}
_LINEN_MLP = {
    "mlp.gate_proj.weight": Leaf("mlp/gating_einsum", "2 F D", 0),
    "mlp.up_proj.weight": Leaf("mlp/gating_einsum", "2 F D", 1),
    "mlp.down_proj.weight": Leaf("mlp/linear", "F D"),
}
# The smaller models before Gemma 3.
_LINEN_MLP_IN_OUT = {
    **_LINEN_MLP,
    "mlp.gate_proj.weight": Leaf("mlp/gating_einsum", "2 D F", 0),
    "mlp.up_proj.weight": Leaf("mlp/gating_einsum", "2 D F", 1),
}
_NNX_MLP = {name: leaf for name, leaf in _TUNIX.items() if name.startswith("mlp.")}
_GEMMA = {
    "model.embed_tokens.weight": Leaf("embedder/input_embedding", "V D"),
    "model.norm.weight": Leaf("final_norm/scale", "D"),
    "input_layernorm.weight": Leaf("pre_attention_norm/scale", "D"),
    "post_attention_layernorm.weight": Leaf("pre_ffw_norm/scale", "D"),
    "self_attn.o_proj.weight": Leaf("attn/attn_vec_einsum/w", "N H D"),
    "self_attn.q_norm.weight": Leaf("attn/_query_norm/scale", "H"),
    "self_attn.k_norm.weight": Leaf("attn/_key_norm/scale", "H"),
}
_GEMMA_POST_NORMED = {
    **_GEMMA,
    "post_attention_layernorm.weight": Leaf("post_attention_norm/scale", "D"),
    "pre_feedforward_layernorm.weight": Leaf("pre_ffw_norm/scale", "D"),
    "post_feedforward_layernorm.weight": Leaf("post_ffw_norm/scale", "D"),
}
_GEMMA2_IN_TUNIX = {
    **_GEMMA_POST_NORMED,
    "post_attention_layernorm.weight": Leaf("post_attn_norm/scale", "D"),
}
_IMAGES = ("vision_encoder/", "SigLiPFromPatches_0/", "embedder/mm_")


def _maxtext(leaves: Mapping[str, Leaf], is_scaled: bool | None = None) -> tuple[Names, ...]:
    """Layers one by one, and scanned, where L is the second axis (`param_scan_axis: 1`)."""
    scanned = {
        name: leaf
        if name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
        else dataclasses.replace(leaf, axes=" ".join(_with_layers(leaf.axes.split())))
        for name, leaf in leaves.items()
    }
    return (
        Names("maxtext", "decoder/layers", scanned, is_scaled=is_scaled),
        Names("maxtext", "decoder/layers_{}", leaves, is_scaled=is_scaled),
    )


def _with_layers(axes: list[str]) -> list[str]:
    return [axes[0], "L", *axes[1:]]


def _gemma(nnx: Mapping[str, Leaf], linen: Mapping[str, Leaf]) -> tuple[Names, ...]:
    """Gemma's trees; which one of a package it is, its paths and shapes say."""
    heads = _FEW_KV_HEADS, _ALL_KV_HEADS
    return (
        *(Names("tunix", "layers/{}", {**nnx, **_NNX_MLP, **h}, _IMAGES) for h in heads),
        *(
            Names("gemma", "layer_{}", {**linen, **mlp, **h}, _IMAGES)
            for h in heads
            for mlp in (_LINEN_MLP, _LINEN_MLP_IN_OUT)
        ),
    )


_IN_TUNIX = Names("tunix", "layers/{}", _TUNIX)
LLAMA = (_IN_TUNIX, *_maxtext(_MAXTEXT_LLAMA, False), *_maxtext(_MAXTEXT_LLAMA31, True))
QWEN = (_IN_TUNIX, *_maxtext(_MAXTEXT))
GEMMA = _gemma(_GEMMA, _GEMMA)
GEMMA2 = _gemma(_GEMMA2_IN_TUNIX, _GEMMA_POST_NORMED)
GEMMA3 = _gemma(_GEMMA_POST_NORMED, _GEMMA_POST_NORMED)
