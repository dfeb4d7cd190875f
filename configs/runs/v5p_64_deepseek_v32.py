"""python -m scripts.launch --config=configs/runs/v5p_64_deepseek_v32.py --on=ON --print.

DeepSeek-V3.2 in its published FP8 on a v5p-64, 32 chips on eight hosts (Google counts two cores a
chip).
"""

from configs.engine import EngineConfig
from configs.mesh import Mesh
from configs.recipes.run import Run
from configs.settings.cache import CacheConfig
from configs.settings.shapes import ShapeConfig

RUN = Run(
    model="deepseek-v3.2",
    engine=EngineConfig(
        max_seqs=32,
        max_context=16384,
        cache=CacheConfig(cache_bytes=40 << 30),
        shapes=ShapeConfig(decode_rows=(8, 32), prefill_chunks=(2, 8)),
    ),
    mesh=Mesh(expert=8, model=4),
    target="v5p:2x4x4",
    published="fp8_block",
)
