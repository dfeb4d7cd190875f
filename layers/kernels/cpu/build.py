"""Compiles the native library: once for each version of its sources, where a C++ compiler is found.

The instruction sets are chosen when it runs, so a library fits every processor of its architecture.
"""

import concurrent.futures
import contextlib
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
import time
from pathlib import Path

import jax

_SOURCES = Path(__file__).parent / "src"
BUNDLED = Path(__file__).parent / "bundled"  # in wheels only (scripts/wheel.py)
_FLAGS = (
    "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffunction-sections",
    "-ffp-contract=fast", "-Wno-psabi",
)  # fmt: skip
_LINK_FLAGS = ("-shared", "-static-libstdc++", "-static-libgcc")  # another's may be loaded already
# Not the C++ library, which others could replace.
_EXPORTS = "{ global: ridgeline_*; local: *; };\n"
_WIDE = "-mprefer-vector-width=512"
_AMX = "-mamx-tile", "-mamx-int8"
_FAST = "-O3"  # unless the compiler's command, or a file, names another level
_QUICK = "-O1"  # of what only calls: a first start waits for its compilation
_CALLED = "ffi.cc", "products.cc", "rows.cc"  # by XLA
# File -> an architecture level, and further flags.
Units = dict[str, tuple[str | None, tuple[str, ...]]]
_X86: Units = {
    "dispatch.cc": ("x86-64", ()),
    "ffi.cc": ("x86-64", (_QUICK,)),
    "products.cc": ("x86-64", (_QUICK,)),
    "rows.cc": ("x86-64", (_QUICK,)),
    "blocks.cc": ("x86-64", ()),
    "peaks.cc": ("x86-64", ()),
    "avx2.cc": ("x86-64-v3", ()),
    "avx512.cc": ("x86-64-v4", (_WIDE,)),
    "avx512vnni.cc": ("x86-64-v4", (_WIDE, "-mavx512vnni")),
    "avx512bf16.cc": ("x86-64-v4", (_WIDE, "-mavx512vnni", "-mavx512bf16")),
    "amx.cc": (
        "x86-64-v4",
        (_WIDE, "-mavx512vnni", "-mavx512bf16", "-mprfchw", *_AMX, "-mamx-bf16"),
    ),
    "amx_blocks.cc": ("x86-64-v4", (_WIDE, "-mavx512vnni", *_AMX)),
    "amx_floats.cc": ("x86-64-v4", (_WIDE, "-mavx512vbmi")),
}
_ARM: Units = {
    **{
        name: (None, ())
        for name in ("dispatch.cc", "ffi.cc", "products.cc", "rows.cc", "blocks.cc", "peaks.cc")
    },
    "neon.cc": (None, ()),
    "neondotprod.cc": ("armv8.2-a+dotprod", ()),
    "neonbf16.cc": ("armv8.2-a+dotprod+i8mm+bf16", ()),
}
_UNITS = {("linux", "x86_64"): _X86, ("linux", "aarch64"): _ARM, ("darwin", "arm64"): _ARM}
_TIMEOUT_S = 600  # of one compilation; under sanitizers, beside other work, minutes
_DIGEST_SIZE = 16
_UNFINISHED, _ABANDONED_S = "building-", 3600
_LOG = "build.log"
_RETRY_S = 24 * 3600  # what failed may have lacked memory


class BuildError(Exception):
    """The library cannot be had here; the message is one line that says why."""


def bundled() -> Path | None:
    """The library that a wheel of this package brought, if it is of these sources and undamaged."""
    return _find(BUNDLED, _bundled_name(platform.machine()))


def find(folder: Path) -> Path | None:
    """The undamaged library of these sources in a folder, if any: its name holds its digest."""
    return _find(folder, library_name())


def _find(folder: Path, name: str) -> Path | None:
    for library in sorted(folder.glob(f"{name}-*.so")):
        with contextlib.suppress(OSError):
            if is_whole(library):
                return library
    return None


def is_whole(library: Path) -> bool:
    """Whether a library is what was built: its name ends with its digest."""
    return library.stem.endswith(f"-{_digest(library.read_bytes())}")


def check(folder: Path) -> None:
    """Raises BuildError if `build` failed within a day with the same sources and compilers."""
    log = folder / _LOG
    try:
        logged = log.read_text(errors="replace").partition("\n")[0]
        is_recent = abs(time.time() - log.stat().st_mtime) < _RETRY_S
    except OSError:
        return
    compilers = _compilers()
    if compilers and is_recent and logged == _attempt(compilers):
        raise BuildError(_failure(compilers, log))


def build(folder: Path) -> Path:
    """Compiles the library into a folder, where it appears whole or not at all. A folder that is
    created is its owner's alone; one that is there keeps its permissions. Raises BuildError if
    there is no compiler, or none can compile it; their messages stay in the folder.
    """
    units = _UNITS.get((sys.platform, platform.machine()))
    if units is None:
        raise BuildError(f"there are none for {platform.machine()} processors on {sys.platform}")
    compilers = _compilers()
    if not compilers:
        raise BuildError("no C++ compiler was found (g++ 12, clang++, or pip install ziglang)")
    try:
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # it holds code
        for abandoned in folder.glob(f"{_UNFINISHED}*"):  # by a process that ended meanwhile
            with contextlib.suppress(FileNotFoundError):  # or one that ends now
                if time.time() - abandoned.stat().st_mtime > _ABANDONED_S:
                    shutil.rmtree(abandoned, ignore_errors=True)
        messages = [_attempt(compilers)]
        for compiler in compilers:
            with tempfile.TemporaryDirectory(dir=folder, prefix=_UNFINISHED) as temporary:
                try:
                    built = _compile(compiler, units, Path(temporary))
                except subprocess.SubprocessError as failed:
                    messages += [str(failed), _stderr(failed)]
                    continue
                return _keep(built, folder, library_name())
        (folder / _LOG).write_text("\n".join(messages), errors="replace")
    except OSError as error:
        raise BuildError(f"{error.filename or folder}: {error.strerror}") from None
    raise BuildError(_failure(compilers, folder / _LOG))


def _failure(compilers: list[list[str]], log: Path) -> str:
    return f"{' and '.join(map(shlex.join, compilers))} failed, see {log}"


def _attempt(compilers: list[list[str]]) -> str:
    """The first line of a log: sources and compilers, as they are now."""
    files = {path for command in compilers for word in command if (path := shutil.which(word))}
    if (zig := importlib.util.find_spec("ziglang")) and zig.origin:
        files.add(zig.origin)
    states = [(path, (state := os.stat(path)).st_size, state.st_mtime_ns) for path in sorted(files)]
    return f"{library_name()} {_digest(repr((compilers, states)).encode())}"


def cross_compile(compiler: list[str], machine: str, folder: Path) -> Path:
    """Compiles a Linux wheel's library for a processor into a folder. Raises BuildError with the
    output of a compiler that fails.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        try:
            built = _compile(compiler, _UNITS["linux", machine], Path(temporary))
        except subprocess.SubprocessError as failed:
            raise BuildError(f"{failed}\n{_stderr(failed)}") from None
        return _keep(built, folder, _bundled_name(machine))


def _keep(built: Path, folder: Path, name: str) -> Path:
    library = folder / f"{name}-{_digest(built.read_bytes())}.so"
    built.chmod(0o755)  # whatever the umask: who writes it decides what this process does
    os.replace(built, library)
    return library


def _compile(compiler: list[str], units: Units, folder: Path) -> Path:
    objects = compile_units(compiler, units, folder)
    library, linker = folder / "library.so", []
    if sys.platform != "darwin":  # whose linker has no such options
        (exports := folder / "exports").write_text(_EXPORTS)
        linker = [f"-Wl,--version-script={exports}", "-Wl,--gc-sections"]
    _run([*compiler, *_LINK_FLAGS, *linker, *objects, "-o", str(library)])
    return library


def compile_units(compiler: list[str], units: Units, folder: Path) -> list[str]:
    """Compiles files into objects in a folder; raises SubprocessError if the compiler fails."""
    commands = []
    for source, (level, flags) in units.items():
        headers = ("-isystem", jax.ffi.include_dir()) if source in _CALLED else ()
        output = folder / Path(source).with_suffix(".o")
        fast = () if any(word.startswith("-O") for word in compiler) else (_FAST,)
        options = (*_FLAGS, *fast, *_at_level(compiler, level), *flags, *headers)
        commands.append([*compiler, *options, "-c", str(_SOURCES / source), "-o", str(output)])
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_run, commands))
    return [command[-1] for command in commands]


def _at_level(compiler: list[str], level: str | None) -> tuple[str, ...]:
    if level is None:
        return ()
    if "ziglang" not in compiler:
        return (f"-march={level}",)
    # It has LLVM's names of processors.
    return (f"-mcpu={level.replace('armv8.2-a', 'generic+v8_2a').replace('-', '_')}",)


def _run(command: list[str]) -> None:
    subprocess.run(
        command, check=True, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S,
        env=os.environ | {"LC_ALL": "C"},
    )  # fmt: skip


def _stderr(failed: subprocess.SubprocessError) -> str:
    """What a compiler said; where its time ran out it comes as bytes, even in text mode."""
    stderr = getattr(failed, "stderr", None) or ""
    return stderr.decode(errors="replace") if isinstance(stderr, bytes) else stderr


def _compilers() -> list[list[str]]:
    """Commands of C++ compilers, to be tried in turn: CXX alone, if it is set; else the system's,
    then that of the wheel. Raises BuildError if CXX is no command.
    """
    if variable := os.environ.get("CXX"):
        try:
            command = shlex.split(variable)
        except ValueError:
            command = []
        if not command:
            raise BuildError(f"CXX={variable!r} is not a command")
        return [command]
    commands = [[path] for name in ("g++", "clang++", "c++") if (path := shutil.which(name))]
    if importlib.util.find_spec("ziglang"):
        commands.append([sys.executable, "-m", "ziglang", "c++"])
    return commands


def library_name() -> str:
    """The prefix of built libraries' names, for this architecture, XLA and compiler."""
    return _name_of(platform.machine(), jax.__version__, os.environ.get("CXX"))


def _bundled_name(machine: str) -> str:
    """The same in a wheel, for every later JAX as well: XLA takes what older headers made."""
    return _name_of(machine)


@functools.cache
def _name_of(machine: str, *circumstances: str | None) -> str:
    hasher = hashlib.sha256(repr((_FLAGS, _LINK_FLAGS, _EXPORTS, _UNITS, circumstances)).encode())
    for source in sorted([*_SOURCES.glob("*.cc"), *_SOURCES.glob("*.h")]):
        hasher.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return f"kernels-{machine}-{hasher.hexdigest()[:_DIGEST_SIZE]}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGEST_SIZE]
