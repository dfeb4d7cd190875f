"""Compiles the native library: once for each version of its sources, where a C++ compiler is found.

The instruction sets are chosen when it runs, so a library fits every processor of its architecture.
"""

import concurrent.futures
import functools
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax

_SOURCES = Path(__file__).parent / "src"
_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=fast", "-Wno-psabi",
)  # fmt: skip
_LINK_FLAGS = ("-shared", "-static-libstdc++", "-static-libgcc")  # another's may be loaded already
_WIDE = "-mprefer-vector-width=512"
Units = dict[str, tuple[str | None, tuple[str, ...]]]  # file -> what it may use: a level, and more
_X86: Units = {
    "dispatch.cc": ("x86-64", ()),
    "ffi.cc": ("x86-64", ()),
    "avx2.cc": ("x86-64-v3", ()),
    "avx512.cc": ("x86-64-v4", (_WIDE,)),
    "amx.cc": ("x86-64-v4", (_WIDE, "-mavx512bf16", "-mamx-tile", "-mamx-bf16")),
}
_ARM: Units = {name: (None, ()) for name in ("dispatch.cc", "ffi.cc", "neon.cc")}
_UNITS = {
    ("linux", "x86_64"): _X86,
    ("linux", "aarch64"): _ARM,
    ("darwin", "arm64"): _ARM,
}
_TIMEOUT_S = 120  # of one compilation
_DIGEST_SIZE = 16


class BuildError(Exception):
    """The library cannot be had here; the message is one line that says why."""


def find(folder: Path) -> Path | None:
    """The library of these sources in a folder, if it is there and undamaged: its name holds its
    digest.
    """
    for library in sorted(folder.glob(f"{_name()}-*.so")):
        try:
            is_whole = library.stem.endswith(f"-{_digest(library.read_bytes())}")
        except OSError:
            continue
        if is_whole:
            return library
    return None


def build(folder: Path) -> Path:
    """Compiles the library into a folder that only its owner can open, where it appears whole or
    not at all.

    Raises:
        BuildError: there is no compiler, or none can compile it; the last one's output is kept in
            the folder.
    """
    units = _UNITS.get((sys.platform, platform.machine()))
    if units is None:
        raise BuildError(f"there are none for {platform.machine()} processors on {sys.platform}")
    compilers = _compilers()
    if not compilers:
        raise BuildError("no C++ compiler was found (g++ 12, clang++, or pip install ziglang)")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)  # it holds code
        for compiler in compilers:
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                try:
                    built = _compile(compiler, units, Path(temporary))
                except subprocess.SubprocessError as failed:
                    output = getattr(failed, "stderr", None) or ""
                    (folder / "build.log").write_text(f"{failed}\n{output}", errors="replace")
                    continue
                library = folder / f"{_name()}-{_digest(built.read_bytes())}.so"
                os.replace(built, library)
                return library
    except OSError as error:
        raise BuildError(f"{error.filename or folder}: {error.strerror}") from None
    raise BuildError(f"{shlex.join(compiler)} failed, see {folder / 'build.log'}")


def _compile(compiler: list[str], units: Units, folder: Path) -> Path:
    commands = []
    for source, (level, flags) in units.items():
        headers = ("-isystem", jax.ffi.include_dir()) if source == "ffi.cc" else ()
        output = folder / Path(source).with_suffix(".o")
        own = (*_FLAGS, *_at_level(compiler, level), *flags, *headers)
        commands.append([*compiler, *own, "-c", str(_SOURCES / source), "-o", str(output)])
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    library = folder / "library.so"
    _run([*compiler, *_LINK_FLAGS, *[command[-1] for command in commands], "-o", str(library)])
    return library


def _at_level(compiler: list[str], level: str | None) -> tuple[str, ...]:
    if level is None:
        return ()
    is_zig = "ziglang" in compiler  # it has LLVM's names of processors
    return (f"-mcpu={level.replace('-', '_')}",) if is_zig else (f"-march={level}",)


def _run(command: list[str]) -> None:
    subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S,
        env=os.environ | {"LC_ALL": "C"},
    )  # fmt: skip


def _compilers() -> list[list[str]]:
    """Commands of C++ compilers, to be tried in turn: CXX alone, if it is set; else the system's,
    then the one that comes as a wheel.

    Raises:
        BuildError: CXX is no command.
    """
    if named := os.environ.get("CXX"):
        try:
            command = shlex.split(named)
        except ValueError:
            command = []
        if not command:
            raise BuildError(f"CXX={named!r} is not a command")
        return [command]
    found = [[path] for name in ("g++", "clang++", "c++") if (path := shutil.which(name))]
    if importlib.util.find_spec("ziglang"):
        found.append([sys.executable, "-m", "ziglang", "c++"])
    return found


@functools.cache
def _name() -> str:
    """What names of libraries of these sources begin with, for this processor's architecture, this
    XLA and this compiler.
    """
    found = hashlib.sha256(
        repr((_FLAGS, _LINK_FLAGS, _UNITS, jax.__version__, os.environ.get("CXX"))).encode()
    )
    for source in sorted([*_SOURCES.glob("*.cc"), *_SOURCES.glob("*.h")]):
        found.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return f"kernels-{platform.machine()}-{found.hexdigest()[:_DIGEST_SIZE]}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGEST_SIZE]
