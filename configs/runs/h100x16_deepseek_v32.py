"""python -m scripts.launch --config=configs/runs/h100x16_deepseek_v32.py --on=ON --print.

DeepSeek-V3.2 in its published FP8 on two hosts of eight H100.
"""

from configs.engine import EngineConfig
from configs.mesh import Mesh
from configs.recipes.run import Run
from configs.settings.cache import CacheConfig
from configs.settings.shapes import ShapeConfig

RUN = Run(
    model="deepseek-v3.2",
    engine=EngineConfig(
        max_seqs=16,
        max_context=16384,
        cache=CacheConfig(cache_bytes=16 << 30),
        shapes=ShapeConfig(decode_rows=(8, 16), prefill_chunks=(2, 8)),
    ),
    mesh=Mesh(expert=8, model=2),
    target="16xh100",
    published="fp8_block",
)
