"""python -m scripts.launch --config=configs/runs/v5e_8_llama8b.py --on=ON --print.

Llama 3 8B on a host of eight v5e: a KV head and 2.0 GB of weights each.
"""

from configs.engine import EngineConfig
from configs.mesh import Mesh
from configs.recipes.run import Run
from configs.settings.cache import CacheConfig
from configs.settings.shapes import ShapeConfig

RUN = Run(
    model="llama3-8b",
    engine=EngineConfig(
        max_seqs=64,
        max_context=8192,
        cache=CacheConfig(cache_bytes=8 << 30),
        shapes=ShapeConfig(  # each is compiled: docs/log.md
            decode_rows=(8,), prefill_chunks=(2, 8)
        ),
    ),
    mesh=Mesh(model=8),
    target="v5e:2x4",
)
