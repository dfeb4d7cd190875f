"""python -m scripts.generate --config=configs/runs/smollm2_laptop.py --prompt="Hello,"."""

from configs.engine import EngineConfig
from configs.recipes.run import Run
from configs.settings.cache import CacheConfig

RUN = Run(
    model="smollm2-135m", engine=EngineConfig(max_seqs=8, cache=CacheConfig(cache_bytes=128 << 20))
)
