"""python -m scripts.launch --config=configs/runs/h100_gpt_oss_120b.py --on=ON --print.

gpt-oss 120B on one H100, all matrices in MXFP4: the experts are published so.
"""

from configs.engine import EngineConfig
from configs.recipes.run import Run
from configs.settings.cache import CacheConfig
from configs.settings.shapes import ShapeConfig

RUN = Run(
    model="gpt-oss-120b",
    engine=EngineConfig(
        max_seqs=32,
        max_context=16384,
        weights="mxfp4",
        cache=CacheConfig(cache_bytes=12 << 30),
        shapes=ShapeConfig(decode_rows=(8, 32), prefill_chunks=(2, 8)),
    ),
    target="h100",
)
