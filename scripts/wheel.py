"""Puts the CPU kernels into a wheel: python -m scripts.wheel PURE_WHEEL --machine=aarch64.

Zig's compiler targets any processor and any version of glibc.
"""

import argparse
import base64
import hashlib
import re
import shlex
import sys
import tempfile
import zipfile
from pathlib import Path

import jax

from layers.kernels.cpu import build

_GLIBC = 2, 27  # jaxlib's own
_PROJECT = Path(__file__).parents[1] / "pyproject.toml"


def main() -> None:
    """Writes one wheel and prints its path, or only compiles; shows a compiler's errors whole."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "wheel", type=Path, nargs="?",
        help="the wheel without a library, *-py3-none-any.whl; default: compile, write nothing",
    )  # fmt: skip
    parser.add_argument("--machine", choices=["x86_64", "aarch64"], required=True)
    parser.add_argument("--zig", default=f"{sys.executable} -m ziglang", help="the command of Zig")
    parser.add_argument("--output", type=Path, default=Path("dist"), help="a directory")
    args = parser.parse_args()
    if args.wheel and (oldest := oldest_jax()) != jax.__version__:
        sys.exit(f"error: only headers of JAX {oldest} make what every version loads; "
                 f"this is {jax.__version__}: make wheel PYTHON=python3.11")  # fmt: skip
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output) as temporary:
        try:
            library = build.cross_compile(
                compiler(args.zig, args.machine), args.machine, Path(temporary)
            )
        except (build.BuildError, OSError) as error:
            sys.exit(f"error: {error}")
        if args.wheel:
            print(bundle(args.wheel, library, args.machine, args.output))


def oldest_jax() -> str:
    (version,) = re.findall(r'"jax>=([\d.]+)', _PROJECT.read_text())
    return str(version)


def compiler(zig: str, machine: str) -> list[str]:
    """The command that compiles for a machine, without what only debuggers read (most of it)."""
    return [*shlex.split(zig), "c++", "-target", f"{machine}-linux-gnu.{_dotted()}", "-s"]


def bundle(pure: Path, library: Path, machine: str, folder: Path) -> Path:
    """Writes the wheel of a machine: the pure one with the library, and the tag of its loader."""
    tag = f"py3-none-manylinux_{_dotted('_')}_{machine}"
    name, version, *_ = pure.name.split("-")
    target, info = folder / f"{name}-{version}-{tag}.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(pure) as source:
        files = {entry: source.read(entry) for entry in source.namelist()}
    files[f"layers/kernels/cpu/{build.BUNDLED.name}/{library.name}"] = library.read_bytes()
    described = files[f"{info}/WHEEL"].decode()
    described = described.replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
    files[f"{info}/WHEEL"] = described.replace("Tag: py3-none-any", f"Tag: {tag}").encode()
    del files[f"{info}/RECORD"]
    lines = [f"{path},sha256={_digest(content)},{len(content)}" for path, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, content in files.items():
            wheel.writestr(path, content)
    return target


def _dotted(separator: str = ".") -> str:
    return separator.join(map(str, _GLIBC))


def _digest(content: bytes) -> str:
    """As RECORD has it (packaging.python.org, "Recording installed projects")."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


if __name__ == "__main__":
    main()
