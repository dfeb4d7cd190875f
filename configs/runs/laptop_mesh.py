"""python -m scripts.generate --config=configs/runs/laptop_mesh.py --prompt="Hello,".

A CPU stands for eight chips: nothing is faster, but the program is that of eight.
"""

from configs.engine import EngineConfig
from configs.mesh import Mesh
from configs.recipes.run import Run
from configs.settings.cache import CacheConfig

RUN = Run(
    model="smollm2-135m",
    engine=EngineConfig(max_seqs=4, cache=CacheConfig(cache_bytes=16 << 20)),
    mesh=Mesh(model=8),
)
