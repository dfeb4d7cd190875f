"""Steps whose tokens have adapters, compiled for an H200 without one: launches, and bytes that they
take and leave, beside XLA's products.
"""

import dataclasses

import jax
import pytest

from configs.mesh import Mesh
from inference.scheduling.step_shapes import StepShape
from layers.backends import backends
from layers.backends.gpu import Hopper
from layers.kernels.linear import adapted_gpu
from layers.kernels.linear.adapted import Adapted, SlotOrder
from tests.aot import adapters, machine_code, programs

pytestmark = pytest.mark.aot
_KERNELS = {"adapters_down", "adapters_up"}
_MATRICES, _SHARED = 4, 5


@dataclasses.dataclass(frozen=True)
class _ByXla(Hopper):
    """Hopper's kernels, except that of adapters."""

    def addition(self, leaf):
        return None


@pytest.mark.parametrize("shape", [
    StepShape((32, 1), (0, 64), greedy=True), StepShape((16, 1), (2, 512), greedy=True),
], ids=["decode", "prefill"])  # fmt: skip
def test_adapters_take_two_launches_a_matrix_and_few_bytes(shape, monkeypatch):
    """Beside these all matrices share what makes units of work of slots, and a gate is apart."""
    without = adapters.counts("h200", shape, slots=0)
    by_kernels = adapters.counts("h200", shape)
    backend_of = backends.of

    def by_xla(*arguments):
        backend = backend_of(*arguments)
        names = (field.name for field in dataclasses.fields(backend))
        return _ByXla(**{name: getattr(backend, name) for name in names})

    monkeypatch.setattr(backends, "of", by_xla)
    by_xla = adapters.counts("h200", shape)
    added, xlas = (
        (counts.launches - without.launches, counts.num_bytes - without.num_bytes)
        for counts in (by_kernels, by_xla)
    )
    print(f"adapters add {added} launches and bytes, XLA's {xlas}")
    assert by_kernels.readers == _KERNELS and "" in by_xla.readers
    assert added[0] <= 2 * _MATRICES + _SHARED < xlas[0]
    assert added[1] < xlas[1]


def test_chips_add_their_parts_of_adapters():
    shape = StepShape((24, 1), (0, 64), greedy=True)
    assert adapters.counts("2xh200", shape, mesh=Mesh(model=2)).readers == _KERNELS


@pytest.mark.parametrize("room, D, ends", [(16, 4096, (4096, 5120, 6144)), (256, 14336, (4096,))])
def test_kernels_of_adapters_spill_no_registers(room, D, ends, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))

    def array(*shape, dtype="bfloat16"):
        return jax.ShapeDtypeStruct(shape, dtype)

    T, N = 40, adapters.SLOTS
    of_tokens, of_slots = array(T, dtype="int32"), array(N, dtype="int32")
    order = SlotOrder(of_tokens, of_tokens, of_tokens, of_slots)
    stacks = array(N, len(ends) * room, D), array(N, ends[-1], room)
    leaf = Adapted(None, *stacks, ends, order, of_slots)
    arguments = array(T, ends[-1], dtype="float32"), array(T, D), leaf
    programs.compiled(adapted_gpu.add, programs.device("h200"), arguments, (0,))
    kernels = machine_code.kernels(tmp_path)
    print(*kernels, sep="\n")
    assert len(kernels) == 2
    for kernel in kernels:
        assert kernel.stack_bytes == kernel.spilled_bytes == 0
        assert kernel.early == frozenset()  # nothing is read before the launches before have ended
