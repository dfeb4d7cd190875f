"""llama.cpp's names of tensors that several families share, by our paths (`Gguf.tensors`)."""

from inference.families.shared.hf_names import Table

# Tensors that scale the frequencies of positions.
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
LLAMA: Table = {
    "embed/table": ("token_embd.weight",),
    "final_norm": ("output_norm.weight",),
    "head/table": ("output.weight",),
    "mixer_norm": ("attn_norm.weight",),
    "mixer/qkv": tuple(f"attn_{part}.weight" for part in "qkv"),
    "mixer/out": ("attn_output.weight",),
    "mixer/q_norm": ("attn_q_norm.weight",),
    "mixer/k_norm": ("attn_k_norm.weight",),
    "mixer_post_norm": ("post_attention_norm.weight",),
    "ffn_norm": ("ffn_norm.weight",),
    "ffn/gate_up": ("ffn_gate.weight", "ffn_up.weight"),
    "ffn/down": ("ffn_down.weight",),
    "ffn_post_norm": ("post_ffw_norm.weight",),
}
# Layer norms with a bias, and plain feed-forwards.
LAYER_NORMED: Table = {
    **LLAMA,
    "final_norm/weight": ("output_norm.weight",),
    "mixer_norm/weight": ("attn_norm.weight",),
    "ffn_norm/weight": ("ffn_norm.weight",),
    "ffn/up": ("ffn_up.weight",),
}
EXPERTS: Table = {
    **LLAMA,
    "ffn/router": ("ffn_gate_inp.weight",),
    "ffn/router_offsets": ("exp_probs_b.bias",),
    "ffn/experts/gate_up": ("ffn_gate_exps.{}.weight", "ffn_up_exps.{}.weight"),
    "ffn/experts/down": ("ffn_down_exps.weight",),
    "ffn/shared/gate_up": ("ffn_gate_shexp.weight", "ffn_up_shexp.weight"),
    "ffn/shared/down": ("ffn_down_shexp.weight",),
    "ffn/shared_gate": ("ffn_gate_inp_shexp.weight",),
}
POST_NORMED: Table = {
    **EXPERTS,
    "ffn_norm": ("post_attention_norm.weight",),
    "mixer/sinks": ("attn_sinks.weight",),
}
LATENT: Table = {
    **EXPERTS,
    "mixer/q": ("attn_q.weight",),
    "mixer/q_down": ("attn_q_a.weight",),
    "mixer/q_norm": ("attn_q_a_norm.weight",),
    "mixer/q_up": ("attn_q_b.weight",),
    "mixer/kv_down": ("attn_kv_a_mqa.weight",),
    "mixer/kv_norm": ("attn_kv_a_norm.weight",),
    "mixer/k_up": ("attn_k_b.weight",),
    "mixer/v_up": ("attn_v_b.weight",),
}
# Recurrent layers; Mamba-2's fused input projection and its biases go by their parts.
_MAMBA: Table = {
    "mamba/in": ("ssm_in.weight",),
    "mamba/conv": ("ssm_conv1d.weight",),
    "mamba/choice": ("ssm_x.weight",),
    "mamba/step": ("ssm_dt.weight",),
    "mamba/step_norm": ("ssm_dt_norm.weight",),
    "mamba/b_norm": ("ssm_b_norm.weight",),
    "mamba/c_norm": ("ssm_c_norm.weight",),
    "mamba/decay": ("ssm_a",),
    "mamba/skip": ("ssm_d",),
    "mamba/out": ("ssm_out.weight",),
}
_MAMBA2: Table = {
    "mamba2/in": tuple(f"ssm_in.weight.{part}" for part in ("x", "B", "C")),
    "mamba2/in_bias": tuple(f"ssm_in.bias.{part}" for part in ("x", "B", "C")),
    "mamba2/gates": tuple(f"ssm_in.weight.{part}" for part in ("z", "dt")),
    "mamba2/gates_bias": tuple(f"ssm_in.bias.{part}" for part in ("z", "dt")),
    "mamba2/conv": ("ssm_conv1d.weight",),
    "mamba2/decay": ("ssm_a",),
    "mamba2/step_bias": ("ssm_dt.bias",),
    "mamba2/skip": ("ssm_d",),
    "mamba2/out_norm": ("ssm_norm.weight",),
    "mamba2/out": ("ssm_out.weight",),
}
STATES: Table = {**EXPERTS, **_MAMBA, **_MAMBA2}
