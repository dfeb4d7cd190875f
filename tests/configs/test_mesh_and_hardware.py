"""Meshes, number formats and chips as data."""

import dataclasses
import math

import pytest

from configs import mesh, precision, presets
from configs.errors import InputError
from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from configs.mesh import Mesh


@pytest.mark.parametrize(
    "text, found",
    [("", Mesh()), ("model=2", Mesh(model=2)), ("data=2,model=4,expert=8", Mesh(2, 4, 8))],
)
def test_meshes_are_read_as_they_are_written(text, found):
    assert mesh.parse(text) == found
    assert mesh.parse("" if text == "" else str(found)) == found
    assert str(Mesh()) == "one chip"


@pytest.mark.parametrize("text", ["2", "model", "model=", "model=-1", "model=2,model=2", "x=1",
                                  "model=²", "model=1.5"])  # fmt: skip
def test_what_is_no_mesh(text):
    with pytest.raises(InputError, match="a mesh is like data=2,model=4 with the axes data, model"):
        mesh.parse(text)


@pytest.mark.parametrize(
    "model, found, valid",
    [("llama2-13b", Mesh(model=41), "widths .40, 13824. and .* of llama2-13b; valid: 1 to 40$"),
     ("llama2-70b", Mesh(model=65), "valid: 1 to 64"),
     ("deepseek-v2", Mesh(model=129), "valid: 1 to 128"),
     ("mamba2-2.7b", Mesh(model=3), "valid: 1, 2, 4, 5, 8, 10, 16, 20, 40, 80"),
     ("granite4-h-small", Mesh(expert=5), "valid: 1, 2, 3, 4, 6, 8, 9, 12, 18, 24, 36, 72"),
     ("llama2-13b", Mesh(expert=2), "has no experts to divide")],
)  # fmt: skip
def test_what_a_mesh_cannot_divide(model, found, valid):
    with pytest.raises(InputError, match=valid):
        found.check(presets.get(model).config)


def test_parts_are_even_where_chips_divide_every_width():
    config = presets.get("deepseek-v2").config  # 128 heads, experts of 1,536 columns
    assert Mesh(model=8).is_even(config)
    odd = config.with_kinds(shared_width=1540)
    assert Mesh(model=4).is_even(odd) and not Mesh(model=8).is_even(odd)
    assert Mesh(model=8).is_even(config.with_kinds(shared_width=0))


def test_formats_count_scales():
    assert precision.get("bfloat16").bytes_for(10, 5) == 20
    assert precision.get("int8").bytes_for(1024, 512) == 1024 + 2 * 4
    assert precision.get("int4").bytes_for(1024, 512) == 512 + 8 * 4
    assert precision.get("int4").bytes_for(64, 32) == 32 + 2 * 4  # a short row has one scale
    rows = (precision.get("int8").bytes_for(row, row) - row for row in range(1, 2000))
    assert set(rows) == {4}  # exactly, whatever the row
    assert precision.get("int4_asym_g32").bytes_for(1024, 512) == 512 + 32 * (4 + 1)
    with pytest.raises(InputError, match="no number format 'int2'; valid: float32, bfloat16"):
        precision.get("int2")


def test_every_chip_is_plausible():
    assert list(catalog.NAMES) == ["h100", "h200", "b200", "a100", "l4", "v5e", "v5p", "v6e", "v7x"]
    for name, chip in catalog.NAMES.items():
        assert chip.name == name and catalog.get(name) is chip
        numbers = [getattr(chip, field.name) for field in dataclasses.fields(chip)
                   if field.type in ("float", "int", float, int)]  # fmt: skip
        assert all(math.isfinite(number) and number >= 0 for number in numbers)
        assert 100 < chip.ridge() < 700 and chip.link_bandwidth > 0 and chip.linked_chips >= 8
        eight = max(chip.rates.get("fp8", 0), chip.rates.get("int8", 0))
        assert eight == pytest.approx(2 * chip.rates["bfloat16"], rel=0.01)
        assert 15e9 < chip.memory_bytes < 210e9 and 0.2e12 < chip.read_bandwidth < 8e12
    reported = {"h100": 85.52e9, "h200": 150.8e9, "b200": 192.3e9, "v5e": 15.75 * 2**30}
    for name, num_bytes in reported.items():
        assert catalog.get(name).memory_bytes == pytest.approx(num_bytes, rel=1e-3)
    axes = {name: chip.link_axes for name, chip in catalog.NAMES.items()}
    assert axes == dict.fromkeys(axes, 1) | {"v5e": 2, "v5p": 3, "v6e": 2, "v7x": 3}
    tpus = [name for name in catalog.NAMES if catalog.platform(name) == "tpu"]
    assert tpus == ["v5e", "v5p", "v6e", "v7x"]
    assert (catalog.platform("l4"), catalog.platform("cpu")) == ("gpu", "cpu")
    assert catalog.get("h100").ridge() == pytest.approx(295, abs=0.5)  # the notes' figure
    with pytest.raises(InputError, match="no hardware 'x'; valid: h100, .* cpu"):
        catalog.get("x")


def test_types_without_a_path_of_their_own_run_in_bfloat16():
    assert catalog.get("a100").rate("fp8") == 312e12
    assert HardwareSpec("none", 1, 1, {}).rate("bfloat16") == math.inf
