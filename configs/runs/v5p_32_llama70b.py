"""python -m scripts.compile --config=configs/runs/v5p_32_llama70b.py --target=v5p:2x4x4.

Llama 3 70B on 32 v5p: four groups of eight chips, each with sequences and pages of its own.
"""

from configs.engine import EngineConfig
from configs.mesh import Mesh
from configs.recipes.run import Run
from configs.settings.cache import CacheConfig
from configs.settings.shapes import ShapeConfig

RUN = Run(
    model="llama3-70b",
    engine=EngineConfig(
        max_seqs=128,
        max_context=8192,
        cache=CacheConfig(cache_bytes=64 << 30),
        shapes=ShapeConfig(  # each is compiled: docs/log.md
            decode_rows=(8, 32), prefill_chunks=(2, 8)
        ),
    ),
    mesh=Mesh(data=4, model=8),
)
