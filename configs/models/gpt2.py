"""GPT-2 124M (Radford et al. 2019): learned positions, layer norms, biases everywhere."""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Plain
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset

_ATTENTION = Attention(
    num_heads=12, num_kv_heads=12, head_width=64, rope=None, biases=("qkv", "out")
)
_FFN = Plain(width=3072, activation="gelu_tanh", has_bias=True)

GPT2 = Preset(
    ModelConfig(
        name="gpt2",
        family="gpt2",
        vocab_size=50_257,
        width=768,
        num_layers=12,
        max_context=1024,
        pattern=(LayerSpec(_ATTENTION, _FFN),),
        norm="layer",
        learned_positions=1024,
        tied=True,
    ),
    Hub("openai-community/gpt2", license="MIT"),
)
