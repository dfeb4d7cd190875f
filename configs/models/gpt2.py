"""GPT-2 124M (Radford et al. 2019): learned positions, layer norms, biases everywhere."""

from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub

CONFIG = ModelConfig(
    name="gpt2",
    family="gpt2",
    vocab_size=50_257,
    width=768,
    ffn_width=3072,
    num_layers=12,
    num_heads=12,
    num_kv_heads=12,
    head_width=64,
    max_context=1024,
    pattern=(LayerSpec(ffn="plain", rope=None),),
    norm="layer",
    norm_eps=1e-5,
    biases=("qkv", "out", "ffn"),
    activation="gelu_tanh",
    learned_positions=1024,
    tied=True,
)

WEIGHTS = Hub("openai-community/gpt2", license="MIT")
