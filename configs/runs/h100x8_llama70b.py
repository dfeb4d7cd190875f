"""python -m scripts.launch --config=configs/runs/h100x8_llama70b.py --on=ON --print.

Llama 3 70B on the eight H100 of one host, 17.6 GB of weights each.
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
        cache=CacheConfig(cache_bytes=48 << 30),
        shapes=ShapeConfig(  # each is compiled: docs/log.md
            decode_rows=(8, 32), prefill_chunks=(2, 8)
        ),
    ),
    mesh=Mesh(model=8),
    target="8xh100",
)
