"""python -m scripts.generate --config=configs/runs/laptop_disaggregated.py --prompt="Hello,".

A CPU stands for two chips: one computes prompts, and sends their pages to the one that decodes.
"""

from configs.engine import EngineConfig
from configs.prefill import Prefill
from configs.recipes.run import Run
from configs.settings.cache import CacheConfig

RUN = Run(
    model="smollm2-135m",
    engine=EngineConfig(max_seqs=8, cache=CacheConfig(cache_bytes=64 << 20)),
    prefill=Prefill(chips=1),
)
