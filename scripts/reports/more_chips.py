"""What more chips gain, as the planner predicts it: weak and strong scaling."""

import dataclasses
from collections.abc import Iterable, Iterator

from configs.errors import InputError
from configs.hardware.spec import HardwareSpec
from configs.mesh import Mesh
from configs.model import ModelConfig
from inference.planner.deployment import Deployment


@dataclasses.dataclass(frozen=True)
class Point:
    """A load on so many chips, on the mesh that decodes it fastest.

    Attributes:
        chips, batch: of them, and sequences that decode at the same time.
        mesh: how the chips divide model and sequences.
        step_s: seconds of a decode step.
        exposed_s: of these, exchange that hides behind nothing.
    """

    chips: int
    batch: int
    mesh: Mesh
    step_s: float
    exposed_s: float

    @property
    def tok_s(self) -> float:
        """Tokens a second of all chips."""
        return self.batch / self.step_s


def strong(
    config: ModelConfig, hardware: HardwareSpec, batch: int, context: int, counts: Iterable[int]
) -> tuple[Point, ...]:
    """One load on more and more chips; numbers of chips that cannot hold it are left out.

    Args:
        config, hardware: the model, and one of the chips.
        batch, context: sequences, and tokens of each.
        counts: numbers of chips.
    """
    points = (_fastest(config, hardware, chips, batch, context) for chips in counts)
    return tuple(point for point in points if point is not None)


def weak(
    config: ModelConfig,
    hardware: HardwareSpec,
    num_seqs_per_chip: int,
    context: int,
    counts: Iterable[int],
) -> tuple[Point, ...]:
    """As `strong`, of a load that grows with the chips: `num_seqs_per_chip` sequences a chip."""
    points = (
        _fastest(config, hardware, chips, num_seqs_per_chip * chips, context) for chips in counts
    )
    return tuple(point for point in points if point is not None)


def _fastest(
    config: ModelConfig, hardware: HardwareSpec, chips: int, batch: int, context: int
) -> Point | None:
    points = []
    for mesh in _meshes(hardware, chips, batch):
        try:
            deployment = Deployment(config, hardware, mesh=mesh)
        except InputError:  # nothing divides the model so, or parts are uneven
            continue
        if deployment.row(batch, context).fits:
            time = deployment.decode_time(batch, context)
            points.append(Point(chips, batch, mesh, time.total_s, time.collective_s))
    return min(points, key=lambda point: point.step_s, default=None)


def _meshes(hardware: HardwareSpec, chips: int, batch: int) -> Iterator[Mesh]:
    """All that links join along `model`, and that have a sequence for each group."""
    for model in range(1, int(min(chips, hardware.linked_chips)) + 1):
        if chips % model == 0 and chips // model <= batch:
            yield Mesh(data=chips // model, model=model)
