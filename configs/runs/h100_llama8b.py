"""python -m scripts.launch --config=configs/runs/h100_llama8b.py --on=ON --print.

Llama 3 8B on one H100.
"""

from configs.engine import EngineConfig
from configs.recipes.run import Run
from configs.settings.cache import CacheConfig
from configs.settings.shapes import ShapeConfig

RUN = Run(
    model="llama3-8b",
    engine=EngineConfig(
        max_seqs=128,
        max_context=8192,
        cache=CacheConfig(cache_bytes=48 << 30),
        shapes=ShapeConfig(decode_rows=(8, 32, 128), prefill_chunks=(2, 8)),
    ),
    target="h100",
)
