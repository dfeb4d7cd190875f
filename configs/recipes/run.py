"""What a file of `configs/runs` holds."""

import dataclasses

from configs.engine import Config, EngineConfig
from configs.mesh import ONE_CHIP, Mesh
from configs.precision import OURS
from configs.prefill import TOGETHER, Prefill
from configs.recipes import few_bits

_TABLES = "embed", "head"


@dataclasses.dataclass(frozen=True)
class Run:
    """A file of `configs/runs`: a model by name (as `--model` takes it), its engine and chips.

    Attributes:
        target: chips that it is for, as `configs/hardware/targets.py` reads them: 'v5e:2x4'; None:
            whatever JAX finds.
        hosts: that these chips are on; None: as few as there can be.
        published: format of the layers' matrices in the published checkpoint, which an engine
            without `engine.weights` keeps; None: the model's own type.
    """

    model: str
    engine: EngineConfig = EngineConfig()
    mesh: Mesh = ONE_CHIP
    prefill: Prefill = TOGETHER
    target: str | None = None
    hosts: int | None = None
    published: str | None = None


def stored(config: Config, published: str | None = None) -> Config:
    """The configuration whose model has the formats that its weights will have in memory, where no
    checkpoint says so: those of `engine.weights`, or those that are published.
    """
    weights = config.engine.weights
    if weights in OURS:
        formats = few_bits.formats(config.model, weights)
    elif weights is None and published is not None:
        of_layers = few_bits.formats(config.model, "fp8", skip=_TABLES)
        formats = dict.fromkeys(of_layers, published)
    else:
        return config
    stored_formats = tuple((path, (format,)) for path, format in formats.items())
    model = dataclasses.replace(config.model, formats=stored_formats)
    return dataclasses.replace(config, model=model)
