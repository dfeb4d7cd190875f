"""python -m scripts.launch --config=configs/runs/h200x8_qwen3_235b.py --on=ON --print.

Qwen3 235B A22B on the eight H200 of one host: four chips divide the four KV heads, two such groups
the experts.
"""

from configs.engine import EngineConfig
from configs.mesh import Mesh
from configs.recipes.run import Run
from configs.settings.cache import CacheConfig
from configs.settings.shapes import ShapeConfig

RUN = Run(
    model="qwen3-235b-a22b",
    engine=EngineConfig(
        max_seqs=64,
        max_context=32768,
        cache=CacheConfig(cache_bytes=48 << 30),
        shapes=ShapeConfig(decode_rows=(8, 32, 64), prefill_chunks=(2, 8)),
    ),
    mesh=Mesh(expert=2, model=4),
    target="8xh200",
)
