"""Qwen3 0.6B (Qwen Team 2025, arXiv 2505.09388): a norm of each query and key head."""

from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub

CONFIG = ModelConfig(
    name="qwen3-0.6b",
    family="qwen3",
    vocab_size=151_936,
    width=1024,
    ffn_width=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_width=128,
    max_context=40_960,
    pattern=(LayerSpec(rope=Rope(theta=1_000_000.0)),),
    norm_eps=1e-6,
    qk_norm="head",
    tied=True,
)

WEIGHTS = Hub("Qwen/Qwen3-0.6B", license="Apache-2.0")
