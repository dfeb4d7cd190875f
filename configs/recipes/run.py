"""What a file of `configs/runs` holds."""

import dataclasses

from configs.engine import EngineConfig
from configs.mesh import ONE_CHIP, Mesh
from configs.prefill import TOGETHER, Prefill


@dataclasses.dataclass(frozen=True)
class Run:
    """A file of `configs/runs`: a model by name (as `--model` takes it), its engine and chips."""

    model: str
    engine: EngineConfig = EngineConfig()
    mesh: Mesh = ONE_CHIP
    prefill: Prefill = TOGETHER
