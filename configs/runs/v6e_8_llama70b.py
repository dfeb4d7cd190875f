"""python -m scripts.launch --config=configs/runs/v6e_8_llama70b.py --on=ON --print.

Llama 3 70B on a host of eight v6e: a KV head and 16.4 GiB of weights each.
"""

from configs.engine import EngineConfig
from configs.mesh import Mesh
from configs.recipes.run import Run
from configs.settings.cache import CacheConfig
from configs.settings.shapes import ShapeConfig

RUN = Run(
    model="llama3-70b",
    engine=EngineConfig(
        max_seqs=32,
        max_context=8192,
        cache=CacheConfig(cache_bytes=10 << 30),
        shapes=ShapeConfig(decode_rows=(8, 32), prefill_chunks=(2, 8)),
    ),
    mesh=Mesh(model=8),
    target="v6e:2x4",
)
