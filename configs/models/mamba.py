"""Mamba-2 2.7B (Dao & Gu 2024, arXiv 2405.21060): no attention, no feed-forward, no growing cache.

States bound no context: `max_context` is the largest that an int32 position can name.

Planned, not run: what is published are pickles; a directory as transformers converts it is read.
"""

from configs.kinds.recurrent.mamba import Mamba2
from configs.model import LayerSpec, ModelConfig
from configs.weights import Hub, Preset

MAMBA2_2P7B = Preset(
    ModelConfig(
        name="mamba2-2.7b",
        family="mamba2",
        vocab_size=50_288,
        width=2560,
        num_layers=64,
        max_context=2**31 - 1,
        pattern=(LayerSpec(Mamba2(num_heads=80, head_width=64, state_width=128), ffn=None),),
        tied=True,
    ),
    Hub("state-spaces/mamba2-2.7b", license="Apache-2.0"),
)
