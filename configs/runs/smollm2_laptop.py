"""python -m scripts.generate --config=configs/runs/smollm2_laptop.py --prompt="Hello,"."""

from configs.engine import EngineConfig
from configs.recipes.run import Run

RUN = Run(model="smollm2-135m", engine=EngineConfig(max_seqs=8, cache_bytes=128 << 20))
