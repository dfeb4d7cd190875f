"""python -m scripts.launch --config=configs/runs/v5p_32_qwen3_235b.py --on=ON --print.

Qwen3 235B A22B on a v5p-32, sixteen chips on four hosts (Google counts two cores a chip).
"""

from configs.engine import EngineConfig
from configs.mesh import Mesh
from configs.recipes.run import Run
from configs.settings.cache import CacheConfig
from configs.settings.shapes import ShapeConfig

RUN = Run(
    model="qwen3-235b-a22b",
    engine=EngineConfig(
        max_seqs=32,
        max_context=32768,
        cache=CacheConfig(cache_bytes=40 << 30),
        shapes=ShapeConfig(decode_rows=(8, 32), prefill_chunks=(2, 8)),
    ),
    mesh=Mesh(expert=4, model=4),
    target="v5p:2x2x4",
)
