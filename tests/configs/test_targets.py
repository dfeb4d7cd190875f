"""Names of chips that programs are compiled for."""

import pytest

from configs.errors import InputError
from configs.hardware import catalog, targets

_KNOWN = {  # chip, chips, devices, topology
    "cpu": ("cpu", 1, 1, ""),
    "h200": ("h200", 1, 1, "1x1x1"),
    "8xh200": ("h200", 8, 8, "1x1x8"),
    "16xh200": ("h200", 16, 16, "1x2x8"),
    "v5e:1x1": ("v5e", 1, 1, "v5e:1x1"),
    "v5e:2x4": ("v5e", 8, 8, "v5e:2x4"),
    "v6e:4x4": ("v6e", 16, 16, "v6e:4x4"),
    "v5p:2x2x4": ("v5p", 16, 16, "v5p:2x2x4"),
    "v5p:4x4x8": ("v5p", 128, 128, "v5p:4x4x8"),
    "tpu7x:2x2x1": ("v7x", 4, 8, "tpu7x:2x2x1"),
}


@pytest.mark.parametrize("name", _KNOWN)
def test_a_name_is_chips_and_a_topology(name):
    found = targets.parse(name)
    assert (found.chip, found.num_chips, found.num_devices, found.topology) == _KNOWN[name]
    assert found.platform == catalog.platform(found.chip)
    assert found.is_here == (name == "cpu")


_UNKNOWN = {
    "": "valid: h200, 8xh200, v5e:2x4",
    "b200": "no target 'b200'; valid: h200",
    "0xh200": "no target '0xh200'",
    "9xh200": "1 to 8 GPUs of a host, or up to 256 of hosts with 8 each",
    "264xh200": "up to 256",
    "٨xh200": "no target",
    "v5e": "no slice '' of v5e",
    "v5e:3x3": "no slice '3x3' of v5e, of at most 256 chips; valid: 1x1, 2x2, 2x4",
    "v5e:2x2x1": "no slice '2x2x1' of v5e",
    "v5p:2x4": "valid: 1x1x1, 2x2x1, 2x2x2, 2x2x4, 2x4x4, or three growing multiples of 4",
    "v5p:8x4x4": "no slice '8x4x4'",
    "v5p:64x64x64": "of at most 8960 chips",
    "tpu7x:4x4x6": "no slice '4x4x6'",
    "v5p:" + "9" * 5000: "no slice '9999",
}


@pytest.mark.parametrize("name", _UNKNOWN, ids=lambda name: name[:12])
def test_another_name_is_told_what_would_be_valid(name):
    with pytest.raises(InputError) as raised:
        targets.parse(name)
    assert _UNKNOWN[name] in str(raised.value) and len(str(raised.value)) < 400
