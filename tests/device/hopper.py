"""Tests of kernels that only Hopper has."""

import pytest

from layers.kernels.device import target_device


@pytest.fixture
def hopper() -> None:
    """Skips a test on any other device."""
    if not (device := target_device()).is_hopper:
        pytest.skip(f"kernels of Hopper, not of {device.kind}")
