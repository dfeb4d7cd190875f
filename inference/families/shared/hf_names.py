"""transformers' names of tensors that several families share, by our paths (`Family.tensors`).
Parts of a fused tensor have names of their own (`parts.py`).
"""

from collections.abc import Mapping

Table = Mapping[str, tuple[str, ...]]
LLAMA: Table = {
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
# A feed-forward without a gate.
PLAIN: Table = {**LLAMA, "ffn/up": ("mlp.up_proj.weight",)}
# Norms behind attention and feed-forward.
POST_NORMED: Table = {
    **LLAMA,
    "mixer_post_norm": ("post_attention_layernorm.weight",),
    "ffn_norm": ("pre_feedforward_layernorm.weight",),
    "ffn_post_norm": ("post_feedforward_layernorm.weight",),
}
EXPERTS: Table = {
    **LLAMA,
    "ffn/router": ("mlp.gate.weight",),
    "ffn/experts/gate_up": ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight"),
    "ffn/experts/down": ("mlp.experts.{}.down_proj.weight",),
}
# Mixtral's experts.
SPARSE_BLOCK: Table = {
    "ffn/router": ("block_sparse_moe.gate.weight",),
    "ffn/experts/gate_up": (
        "block_sparse_moe.experts.{}.w1.weight",
        "block_sparse_moe.experts.{}.w3.weight",
    ),
    "ffn/experts/down": ("block_sparse_moe.experts.{}.w2.weight",),
}
# A shared expert, and offsets in the choice.
SHARED_EXPERTS: Table = {
    **EXPERTS,
    "ffn/router_offsets": ("mlp.gate.e_score_correction_bias",),
    "ffn/shared/gate_up": tuple(f"mlp.shared_experts.{p}_proj.weight" for p in ("gate", "up")),
    "ffn/shared/down": ("mlp.shared_experts.down_proj.weight",),
}
LATENT: Table = {
    **SHARED_EXPERTS,
    "mixer/q": ("self_attn.q_proj.weight",),
    "mixer/q_down": ("self_attn.q_a_proj.weight",),
    "mixer/q_norm": ("self_attn.q_a_layernorm.weight",),
    "mixer/q_up": ("self_attn.q_b_proj.weight",),
    "mixer/kv_down": ("self_attn.kv_a_proj_with_mqa.weight",),
    "mixer/kv_norm": ("self_attn.kv_a_layernorm.weight",),
    "mixer/k_up": ("self_attn.kv_b_proj.{}.key",),
    "mixer/v_up": ("self_attn.kv_b_proj.{}.value",),
}
INDEXED: Table = {
    **LATENT,
    "mixer/indexer/q": ("self_attn.indexer.wq_b.weight",),
    "mixer/indexer/k": (
        "self_attn.indexer.wk.weight",
        "self_attn.indexer.weights_proj.weight",
    ),
    "mixer/indexer/k_norm/weight": ("self_attn.indexer.k_norm.weight",),
}
# A layer that predicts a second token, without what every layer has; tables repeat the model's.
PREDICTING: Table = {
    "embed/table": ("embed_tokens.weight",),
    "head/table": ("shared_head.head.weight",),
    "final_norm": ("shared_head.norm.weight",),
    "input": ("eh_proj.weight",),
    "state_norm": ("hnorm.weight",),
    "token_norm": ("enorm.weight",),
}
# The same of Ling and Hunyuan 3.
PREDICTING_FINAL: Table = {**PREDICTING, "final_norm": ("final_layernorm.weight",)}
# The same of Qwen3-Next and later, whose such layers are apart.
PREDICTING_APART: Table = {
    "embed/table": ("embed_tokens.weight",),
    "head/table": ("lm_head.weight",),
    "final_norm": ("norm.weight",),
    "input": ("fc.weight",),
    "state_norm": ("pre_fc_norm_hidden.weight",),
    "token_norm": ("pre_fc_norm_embedding.weight",),
}
# Mixers alone.
BACKBONE: Table = {
    "embed/table": ("backbone.embeddings.weight",),
    "final_norm": ("backbone.norm_f.weight",),
    "head/table": ("lm_head.weight",),
    "mixer_norm": ("norm.weight",),
}
OLDER_BACKBONE = {"backbone.embedding.weight": "backbone.embeddings.weight"}  # `Family.also`


def mamba(module: str) -> Table:
    """Returns the names of Mamba's tensors in a module of a layer."""
    return {
        "mamba/in": (f"{module}.in_proj.weight",),
        "mamba/conv": (f"{module}.conv1d.weight.taps",),
        "mamba/conv_bias": (f"{module}.conv1d.bias",),
        "mamba/choice": (f"{module}.x_proj.weight",),
        "mamba/step": (f"{module}.dt_proj.weight",),
        "mamba/step_norm": (f"{module}.dt_layernorm.weight",),
        "mamba/b_norm": (f"{module}.b_layernorm.weight",),
        "mamba/c_norm": (f"{module}.c_layernorm.weight",),
        "mamba/decay": (f"{module}.A_log",),
        "mamba/skip": (f"{module}.D",),
        "mamba/out": (f"{module}.out_proj.weight",),
    }


def mamba2(module: str) -> Table:
    """Returns the names of Mamba-2's tensors in a module of a layer."""
    return {
        "mamba2/in": tuple(f"{module}.in_proj.weight.{part}" for part in ("x", "B", "C")),
        "mamba2/in_bias": tuple(f"{module}.in_proj.bias.{part}" for part in ("x", "B", "C")),
        "mamba2/gates": tuple(f"{module}.in_proj.weight.{part}" for part in ("z", "dt")),
        "mamba2/gates_bias": tuple(f"{module}.in_proj.bias.{part}" for part in ("z", "dt")),
        "mamba2/conv": (f"{module}.conv1d.weight.taps",),
        "mamba2/conv_bias": (f"{module}.conv1d.bias",),
        "mamba2/decay": (f"{module}.A_log",),
        "mamba2/step_bias": (f"{module}.dt_bias",),
        "mamba2/skip": (f"{module}.D",),
        "mamba2/out_norm": (f"{module}.norm.weight",),
        "mamba2/out": (f"{module}.out_proj.weight",),
    }


# Bamba and Falcon-H1.
HYBRID: Table = {
    **LLAMA,
    **mamba2("mamba"),
    "final_norm": ("model.final_layernorm.weight",),
    "ffn_norm": ("pre_ff_layernorm.weight",),
    "ffn/gate_up": ("feed_forward.gate_proj.weight", "feed_forward.up_proj.weight"),
    "ffn/down": ("feed_forward.down_proj.weight",),
}


def delta_net(module: str) -> Table:
    """Returns the names of gated DeltaNet's tensors where every matrix is a tensor of its own."""
    return {
        "delta_net/in": tuple(f"{module}.{part}_proj.weight" for part in "vqk"),
        "delta_net/gates": tuple(f"{module}.{part}_proj.weight" for part in "gba"),
        "delta_net/conv": tuple(f"{module}.{part}_conv1d.weight.{part}" for part in "vqk"),
        "delta_net/rate": (f"{module}.A_log",),
        "delta_net/step_bias": (f"{module}.dt_bias",),
        "delta_net/out_norm": (f"{module}.o_norm.weight",),
        "delta_net/out": (f"{module}.o_proj.weight",),
    }
