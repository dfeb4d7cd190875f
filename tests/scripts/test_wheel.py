"""A wheel with the CPU kernels inside: its tag, its record, and what is compiled for it."""

import base64
import hashlib
import sys
import zipfile

import pytest
from packaging.utils import parse_wheel_filename

from layers.kernels.cpu import build
from scripts import wheel

INFO = "ridgeline-0.1.0.dist-info"


@pytest.fixture
def pure(tmp_path):
    """A wheel as setuptools writes it."""
    path = tmp_path / "ridgeline-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as written:
        written.writestr("layers/kernels/cpu/build.py", "code")
        written.writestr(
            f"{INFO}/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        written.writestr(f"{INFO}/RECORD", f"old,sha256=x,1\n{INFO}/RECORD,,\n")
    return path


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_a_wheel_says_what_loads_its_library(pure, tmp_path, machine):
    library = tmp_path / "kernels.so"
    library.write_bytes(b"machine code")
    made = wheel.bundle(pure, library, machine, tmp_path)
    _, _, _, (tag,) = parse_wheel_filename(made.name)
    assert str(tag) == f"py3-none-manylinux_2_27_{machine}"
    assert f"{machine}-linux-gnu.2.27" in wheel.compiler("zig", machine)
    with zipfile.ZipFile(made) as written:
        files = {name: written.read(name) for name in written.namelist()}
    assert len(files) == 4 and "layers/kernels/cpu/bundled/kernels.so" in files
    lines = files[f"{INFO}/WHEEL"].decode().splitlines()
    assert {"Root-Is-Purelib: false", f"Tag: {tag}"} < {*lines} and len(lines) == 3
    recorded = {}
    for line in files.pop(f"{INFO}/RECORD").decode().splitlines():
        name, digest, size = line.split(",")
        recorded[name] = digest, size
    assert recorded.pop(f"{INFO}/RECORD") == ("", "")
    assert recorded == {
        name: (
            "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(x).digest()).decode().rstrip("="),
            str(len(x)),
        )
        for name, x in files.items()
    }


def test_a_compiler_that_fails_is_shown(pure, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(wheel, "oldest_jax", lambda: wheel.jax.__version__)
    zig = f"{sys.executable} -c 'raise SystemExit(\"no such target\")'"
    arguments = [str(pure), "--machine=aarch64", f"--zig={zig}", f"--output={tmp_path / 'dist'}"]
    monkeypatch.setattr(sys, "argv", ["wheel", *arguments])
    with pytest.raises(SystemExit, match="no such target"):
        wheel.main()
    assert not [*(tmp_path / "dist").iterdir()]


def test_only_the_oldest_headers_make_a_wheel(pure, monkeypatch):
    """XLA refuses to start with functions of newer ones than its own."""
    monkeypatch.setattr(wheel.jax, "__version__", "99.0")
    monkeypatch.setattr(sys, "argv", ["wheel", str(pure), "--machine=aarch64"])
    with pytest.raises(SystemExit, match=f"only headers of JAX {wheel.oldest_jax()} make .* 99.0"):
        wheel.main()


def test_every_machine_has_a_name_of_its_own():
    names = {build._bundled_name(machine) for machine in ("x86_64", "aarch64")}
    assert len(names) == 2 and build.library_name() not in names
