"""python -m scripts.launch --config=configs/runs/v5p_64_llama70b.py --on=ON --print.

Llama 3 70B on a v5p-64, 32 chips on eight hosts (Google counts two cores a chip): four groups of
eight chips, each with sequences and pages of its own.
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
    target="v5p:2x4x4",
)
