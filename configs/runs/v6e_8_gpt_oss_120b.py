"""python -m scripts.launch --config=configs/runs/v6e_8_gpt_oss_120b.py --on=ON --print.

gpt-oss 120B on a host of eight v6e: pairs of chips divide heads, four of them the experts. (Eight
chips would divide a row of 2,880 into no whole blocks of MXFP4.)
"""

from configs.engine import EngineConfig
from configs.mesh import Mesh
from configs.recipes.run import Run
from configs.settings.cache import CacheConfig
from configs.settings.shapes import ShapeConfig

RUN = Run(
    model="gpt-oss-120b",
    engine=EngineConfig(
        max_seqs=16,
        max_context=16384,
        weights="mxfp4",
        cache=CacheConfig(cache_bytes=12 << 30),
        shapes=ShapeConfig(decode_rows=(8, 16), prefill_chunks=(2, 8)),
    ),
    mesh=Mesh(expert=4, model=2),
    target="v6e:2x4",
)
