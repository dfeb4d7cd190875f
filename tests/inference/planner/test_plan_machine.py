"""This machine is measured once; what is remembered is believed only as far as it is sound."""

import json

import pytest

from configs.errors import InputError
from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from inference.files import digests, local_machine
from inference.planner.calibration import lookup, measure, store
from inference.runtime import cpu_kernels
from layers import quantized
from layers.kernels.cpu import library
from layers.kernels.linear import packed

_MEASURED = HardwareSpec("cpu", 16e9, 30e9, {"float32": 2e11, "bfloat16": 1e11})


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """How often the machine was measured."""
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    calls = []
    monkeypatch.setattr(measure, "this_machine", lambda *dtypes: calls.append(dtypes) or _MEASURED)
    return calls


@pytest.mark.parametrize("packs", [True, False])
def test_products_of_every_format_are_timed(monkeypatch, packs):
    monkeypatch.setattr(measure, "_ROWS", 4)
    monkeypatch.setattr(measure, "_WIDTH", 256)
    cpu_kernels.load()
    if packs and not library.is_loaded():
        pytest.skip("there is no library")
    monkeypatch.setattr(library, "is_loaded", lambda: packs)
    formats = packed.BLOCKS if packs else quantized.OURS
    assert all(rate > 0 for rate in measure.few_bits_rates(formats).values())


def test_this_machine_is_measured_once(counted):
    assert lookup.get("cpu") == lookup.get("cpu") == _MEASURED
    assert counted == [("float32", "bfloat16")]
    assert lookup.get("h100") is catalog.get("h100")
    with pytest.raises(InputError, match="no hardware"):
        lookup.get("tpu")


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\x00", b"[]", b"null", b"{}", b"[" * 100_000, b'"cpu"',
     b'{"memory_bytes": 1, "read_bandwidth": 1, "rates": 3}',
     b'{"memory_bytes": 1, "read_bandwidth": 1, "rates": {"float32": 1}}',
     b'{"memory_bytes": 0, "read_bandwidth": 1, "rates": {"float32": 1, "bfloat16": 1}}',
     b'{"memory_bytes": NaN, "read_bandwidth": 1, "rates": {"float32": 1, "bfloat16": 1}}',
     b'{"memory_bytes": 1, "read_bandwidth": "1", "rates": {"float32": 1, "bfloat16": 1}}',
     b'{"memory_bytes": 1, "read_bandwidth": 1e999, "rates": {"float32": 1, "bfloat16": 1}}'],
)  # fmt: skip
def test_an_unsound_memory_is_measured_again(counted, content):
    path = store.path()
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert lookup.get("cpu") == _MEASURED and len(counted) == 1
    assert json.loads(digests.opened(path.read_bytes(), "kept"))["read_bandwidth"] == 30e9
    assert lookup.get("cpu") == _MEASURED and len(counted) == 1


def test_a_memory_that_cannot_be_kept_costs_a_measurement_each_time(counted, tmp_path, caplog):
    (tmp_path / "hardware").write_text("a file where the folder should be")
    assert lookup.get("cpu") == lookup.get("cpu") == _MEASURED
    assert len(counted) == 2 and "cannot keep" in caplog.text


def test_another_number_of_cores_is_another_machine(counted, monkeypatch):
    path = store.path()
    monkeypatch.setattr(local_machine, "num_cores", lambda: 1000)
    assert store.path() != path
