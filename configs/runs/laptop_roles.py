"""Prompts in two processes of their own, on one machine: a CPU stands for three.

python -m scripts.serve --config=configs/runs/laptop_roles.py --role=prefill --port=8101   # 8102
python -m scripts.serve --config=configs/runs/laptop_roles.py --role=decode
"""

from configs.engine import EngineConfig
from configs.prefill import Prefill
from configs.recipes.run import Run
from configs.settings.cache import CacheConfig

RUN = Run(
    model="smollm2-135m",
    engine=EngineConfig(max_seqs=8, cache=CacheConfig(cache_bytes=64 << 20)),
    prefill=Prefill(hosts="127.0.0.1:8101,127.0.0.1:8102", bandwidth=1e9),
)
