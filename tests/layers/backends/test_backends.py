"""Which back end a device gets, and what each offers."""

import dataclasses

import pytest

from configs.errors import InputError
from layers.backends import backends
from layers.backends.cpu import Cpu
from layers.kernels.cpu import rows
from layers.kernels.device import Device

CPU, A100 = Device("cpu", "cpu", 2), Device("gpu", "NVIDIA A100", 108, "8.0")
H200, V6E = Device("gpu", "NVIDIA H200", 132, "9.0"), Device("tpu", "TPU v6 lite", 1)


@pytest.mark.parametrize("device, linear, backend", [
    (CPU, None, backends.XLA_CPU), (CPU, "reference", backends.XLA_CPU),
    (CPU, "ffi_cpu", backends.CPU), (H200, None, backends.HOPPER),
    (H200, "reference", backends.HOPPER), (A100, None, backends.GPU), (V6E, None, backends.TPU),
    (Device("rocket", "another", 1), None, backends.XLA),
])  # fmt: skip
def test_a_device_gets_the_first_back_end_with_the_named_products(device, linear, backend):
    assert backends.of(device, linear) is backend


@pytest.mark.parametrize("device, linear, valid", [
    (H200, "ffi_cpu", "reference"), (V6E, "ffi_cpu", "reference"),
    (CPU, "mkl", "reference, ffi_cpu"),
])  # fmt: skip
def test_products_that_a_device_lacks_are_refused(device, linear, valid):
    with pytest.raises(InputError) as refused:
        backends.of(device, linear)
    message = f"engine.kernels.linear={linear}: not for {device.kind}; valid: {valid}"
    assert str(refused.value) == message


@pytest.mark.parametrize("backend", backends.ALL, ids=lambda backend: type(backend).__name__)
def test_a_back_end_offers_what_its_class_says(backend):
    """A class that sets a field without its annotation would leave the parent's value."""
    for field in dataclasses.fields(backend):
        assert getattr(backend, field.name) == getattr(type(backend), field.name), field.name
    is_native = isinstance(backend, Cpu)
    assert backend.rows is (rows if is_native else None)
    assert (backend.linear == "ffi_cpu") == backend.skips_zero_rows == is_native
    assert (backend.scan is not None) == is_native
    assert backend.has_native_kernels == ("ffi_cpu" in backend.attention)


def test_traced_programs_ask_the_chosen_back_end():
    device_backend = backends.current()
    with backends.use(backends.TPU):
        assert backends.current() is backends.TPU
        with backends.use(None):
            assert backends.current() is device_backend
    assert backends.current() is device_backend
