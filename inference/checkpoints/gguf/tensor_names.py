"""Names that llama.cpp gives tensors, by families that share them: our paths, as
`checkpoints.names.Names.table` has them, and what makes them up.
"""

from collections.abc import Mapping

Table = Mapping[str, tuple[str, ...]]

# Tensors that say how positions rotate, by the kind of scaling that a configuration has of them.
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
GEMMA4: Table = {
    **EXPERTS,
    "inputs/table": ("per_layer_token_embd.weight",),
    "inputs/projection": ("per_layer_model_proj.weight",),
    "inputs/projection_norm": ("per_layer_proj_norm.weight",),
    "inputs/gate": ("inp_gate.weight",),
    "inputs/out": ("proj.weight",),
    "inputs/norm": ("post_norm.weight",),
    "scale": ("layer_output_scale.weight",),
    "mixer/qk": ("attn_q.weight", "attn_k.weight"),
    "mixer/q": ("attn_q.weight",),
    "ffn/router_norm": ("ffn_gate_inp.scale",),
    "ffn/router_factors": ("ffn_down_exps.scale",),
    "ffn/experts/gate_up": ("ffn_gate_up_exps.weight",),
    "ffn/experts_norm": ("pre_ffw_norm_2.weight",),
    "ffn/experts_post_norm": ("post_ffw_norm_2.weight",),
    "ffn/shared/gate_up": ("ffn_gate.weight", "ffn_up.weight"),
    "ffn/shared/down": ("ffn_down.weight",),
    "ffn/shared_norm": ("ffn_norm.weight",),
    "ffn/shared_post_norm": ("post_ffw_norm_1.weight",),
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
PHI3: Table = {
    **LLAMA,
    "mixer/qkv": ("attn_qkv.weight",),
    "ffn/gate_up": ("ffn_up.weight",),
}
GPT2: Table = {
    **LLAMA,
    "positions/table": ("position_embd.weight",),
    "final_norm/weight": ("output_norm.weight",),
    "mixer_norm/weight": ("attn_norm.weight",),
    "mixer/qkv": ("attn_qkv.weight",),
    "ffn_norm/weight": ("ffn_norm.weight",),
    "ffn/up": ("ffn_up.weight",),
}
# Of recurrent layers; a Mamba-2's way in and its biases go by the parts that are fused there.
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
FALCON_H1: Table = {**STATES, "ffn_norm": ("ffn_norm",)}
NEMOTRON: Table = {
    **STATES,
    "ffn_norm": ("attn_norm.weight",),
    "ffn/up": ("ffn_up.weight",),
    "ffn/latent_down": ("ffn_latent_down.weight",),
    "ffn/latent_up": ("ffn_latent_up.weight",),
    "ffn/experts/up": ("ffn_up_exps.{}.weight",),
    "ffn/shared/up": ("ffn_up_shexp.weight",),
}
LFM2: Table = {
    **LLAMA,
    "final_norm": ("token_embd_norm.weight",),
    "short_conv/in": ("shortconv.in_proj.weight",),
    "short_conv/conv": ("shortconv.conv.weight",),
    "short_conv/out": ("shortconv.out_proj.weight",),
}
