"""Programs compiled for TPUs by libtpu, without one."""

import pytest

from tests.aot import programs

pytestmark = pytest.mark.aot

_TOPOLOGIES = ["v5e:2x2", "v6e:2x2", "tpu7x:2x2x1"]


def _step(topology: str):
    return programs.compiled_step(programs.tpu(topology), programs.DECODE, 128)


@pytest.mark.parametrize("topology", _TOPOLOGIES)
def test_the_step_aliases_its_cache(topology):
    """Small arrays are padded to tiles there, so slots take more than their elements."""
    executable, cache, slots = _step(topology)
    memory, owned = executable.memory_analysis(), programs.num_bytes((cache, slots))
    assert owned <= memory.alias_size_in_bytes < owned + programs.MEGABYTE
    table = 2 * 128_256 * 4096  # bytes of the token table, which the gather of its bits copies
    assert memory.temp_size_in_bytes < table + 1.1 * programs.num_bytes(cache)


@pytest.mark.xfail(reason="XLA lays pages out by heads for the scatter, and back", strict=True)
@pytest.mark.parametrize("topology", _TOPOLOGIES)
def test_the_step_copies_no_cache(topology):
    executable, cache, _ = _step(topology)
    assert not programs.copies(executable, cache[0])
