"""A run on its chips before it starts: whether it fits, and what requests see; loads no JAX."""

import dataclasses
import math

from configs.engine import Config
from configs.errors import InputError
from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from configs.hardware.targets import Target
from inference.planner import slo
from inference.planner.compiled import prediction
from inference.planner.compiled.prediction import Prediction
from inference.planner.deployment import Deployment
from inference.planner.slo import Steady
from inference.scheduling.step_shapes import enumerate_shapes

_GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Placement:
    """A run on a target.

    Attributes:
        memory: bytes on each device.
        batch: requests at a time that the engine runs at these lengths, of all data shards.
        context, new_tokens: of each request.
        alone, busy: what a request sees with no others, and among `batch`.
        dollars_per_million: of output tokens among `batch`; None without a price.
        warnings: of the planner.
    """

    memory: Prediction
    batch: int
    context: int
    new_tokens: int
    alone: Steady
    busy: Steady
    dollars_per_million: float | None
    warnings: tuple[str, ...]


def place(
    config: Config, target: Target, context: int, new_tokens: int, price: float | None = None
) -> Placement:
    """Plans a run with requests of these lengths.

    Args:
        config: whose model has the formats of its weights (`recipes.run.stored`).
        price: dollars an hour of a chip.

    Raises:
        InputError: it does not fit, the planner cannot divide it so, or requests are too long.
    """
    target.check_mesh(config.mesh)
    config = config.for_platform(target.platform, target.pads_bytes)
    memory = prediction.predict(config, target, enumerate_shapes(config.engine))
    if not memory.fits:
        raise InputError(_too_large(config, target, memory))
    length = context + new_tokens
    if length > config.max_context:
        raise InputError(
            f"context and new_tokens are {length} tokens together: engine.max_context is "
            f"{config.max_context}"
        )
    engine = config.engine
    holds = config.with_engine(max_context=length).most_seqs
    batch = max(1, min(engine.max_seqs, holds)) * config.mesh.num_groups
    deployment = Deployment(config.model, _device(target), mesh=config.mesh)
    alone, busy = (slo.steady(deployment, count, context, new_tokens) for count in (1, batch))
    dollars = None
    if price is not None:
        dollars = price * target.num_chips / 3600 / busy.output_tok_s * 1e6
    return Placement(memory, batch, context, new_tokens, alone, busy, dollars, deployment.warnings)


def _device(target: Target) -> HardwareSpec:
    """What JAX calls a device of a target: a chip, or its share of one."""
    chip, share = catalog.get(target.chip), 1 / target.devices_a_chip
    return dataclasses.replace(
        chip,
        memory_bytes=chip.memory_bytes * share,
        read_bandwidth=chip.read_bandwidth * share,
        rates={name: rate * share for name, rate in chip.rates.items()},
        link_bandwidth=chip.link_bandwidth * share,
        linked_chips=chip.linked_chips * target.devices_a_chip,
    )


def _too_large(config: Config, target: Target, memory: Prediction) -> str:
    """What is too large, and what would be valid."""
    fixed = memory.weight_bytes + memory.temporary_bytes
    room = memory.memory_bytes - fixed
    need = (
        f"{config.model.name} does not fit {target.name} ({config.mesh}): weights "
        f"{memory.weight_bytes / _GIB:.1f}, cache {memory.cache_bytes / _GIB:.1f} and temporaries "
        f"{memory.temporary_bytes / _GIB:.1f} GiB of {memory.memory_bytes / _GIB:.1f} a device; "
    )
    if room > memory.memory_bytes / 20:
        most = config.engine.cache.cache_bytes - (memory.cache_bytes - room)
        return f"{need}valid: engine.cache.cache_bytes of at most {most}"
    num_devices = math.ceil(fixed * target.num_devices / memory.memory_bytes)
    return f"{need}valid: more than {num_devices} devices, or engine.weights of fewer bits"
