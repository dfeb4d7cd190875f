"""How blocks of Hopper's products wait for other launches, and for their cluster. The interpreter
has no such instructions: it runs launches and blocks one after the other.
"""

from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import llvm


def await_earlier(interpret: object) -> None:
    """Waits for the launches before, and lets those after begin."""
    if not interpret:
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()


def meet_cluster(interpret: object) -> None:
    """Waits for the cluster's blocks, whose writes are visible then."""
    if interpret:
        return

    @plgpu.inline_mgpu()
    def meet(_: object) -> None:
        lines = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
        llvm.inline_asm(None, [], lines, "~{memory}", has_side_effects=True)

    meet()
