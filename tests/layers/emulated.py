"""The native library on processors that are not there: AArch64's instruction sets by QEMU.

A program that Zig's compiler builds and `qemu-user` runs calls the library's functions as XLA does
(`emulated.cc`). Programs that are traced meanwhile call them through the host.
"""

import contextlib
import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from layers.kernels.cpu import build, calls

PROCESSORS = {"neonbf16": "max", "neondotprod": "neoverse-n1", "neon": "cortex-a53"}
_ROOT, _SOURCE = Path(__file__).parents[2], Path(__file__).with_suffix(".cc")
_TYPES = {
    "bool": 1, "int32": 4, "int64": 5, "uint8": 6, "uint16": 7, "float32": 11, "bfloat16": 16,
}  # fmt: skip  # XLA_FFI_DataType
_THREADS = 3
_chosen = jax.make_user_context(default_value=None)  # a part of the keys of jit's caches


class Emulation:
    """A process on an emulated processor, which takes one call after the other.

    Raises:
        OSError: it ended.
    """

    def __init__(self, processor: str) -> None:
        command = [_emulator(), "-cpu", processor, _program()]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def use(self, instruction_set: str) -> bool:
        """Whether the processor has an instruction set; if so, computes with it from now on."""
        return self._ask("use", instruction_set) >= 0

    def seconds(self, instruction_set: str) -> float:
        """As `library.product_seconds`."""
        return self._ask("try", instruction_set)

    def call(
        self, function: str, outs: list[jax.ShapeDtypeStruct], *arrays: np.ndarray, **attributes
    ) -> list[np.ndarray]:
        """What a function of the library makes of arrays.

        Raises:
            ValueError: it refuses them.
        """
        message = [*_text(function), _THREADS, len(attributes)]
        for name, value in sorted(attributes.items()):
            if isinstance(value, str):
                message += [*_text(name), 0, *_text(value)]
            else:
                scalar = np.asarray(value)
                message += [*_text(name), _TYPES[str(scalar.dtype)], *_bytes(scalar)]
        message += [len(arrays), len(outs)]
        for array in arrays:
            message += [_TYPES[str(array.dtype)], array.ndim, *array.shape, *_bytes(array)]
        for out in outs:
            size = out.size * out.dtype.itemsize
            message += [_TYPES[str(out.dtype)], len(out.shape), *out.shape, size]
        self._send(message)
        if error := self._receive():
            raise ValueError(error.decode())
        return [np.frombuffer(self._receive(), out.dtype).reshape(out.shape) for out in outs]

    def _ask(self, question: str, instruction_set: str) -> float:
        self._send([*_text(question), *_text(instruction_set)])
        (answer,) = np.frombuffer(self._receive(), np.float64)
        return float(answer)

    def _send(self, message: list[int | bytes]) -> None:
        parts = (x if isinstance(x, bytes) else int(x).to_bytes(8, "little") for x in message)
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join(parts))
        self._process.stdin.flush()

    def _receive(self) -> bytes:
        return self._read(int.from_bytes(self._read(8), "little"))

    def _read(self, size: int) -> bytes:
        assert self._process.stdout is not None
        content = self._process.stdout.read(size)
        if len(content) < size:
            raise OSError(f"the emulated process ended with status {self._process.wait()}")
        return content


@contextlib.contextmanager
def using(instruction_set: str) -> Iterator[Emulation]:
    """Programs that are traced meanwhile call the library on an emulated processor (`started`).

    Args:
        instruction_set: one of `PROCESSORS`.
    """
    emulation = started(PROCESSORS[instruction_set])
    assert emulation.use(instruction_set)

    def call(target, out, *arrays, in_place=None, **attributes):
        outs = list(out) if isinstance(out, tuple) else [out]
        function = target.split("_")[1]

        def run(*arrays):
            return emulation.call(function, outs, *map(np.asarray, arrays), **attributes)

        results = jax.pure_callback(run, outs, *arrays, vmap_method="sequential")
        return tuple(results) if isinstance(out, tuple) else results[0]

    with pytest.MonkeyPatch.context() as patch, _chosen(instruction_set):
        patch.setattr(calls, "call", call)
        yield emulation


@functools.cache
def started(processor: str) -> Emulation:
    """The one process of a processor; a test is skipped where there is no emulator or compiler."""
    return Emulation(processor)


def _emulator() -> str:
    for name in ("qemu-aarch64", "qemu-aarch64-static"):
        if path := shutil.which(name):
            return path
    pytest.skip("there is no qemu-aarch64 (Debian's qemu-user)")


def _compiler() -> list[str]:
    """Zig's, whose programs for musl need nothing of the system that they run on."""
    python = _ROOT / ".venv-zig" / "bin" / "python"
    if not python.exists() and not importlib.util.find_spec("ziglang"):
        pytest.skip("there is no Zig to compile with (make .venv-zig/.ready)")
    interpreter = str(python) if python.exists() else sys.executable
    return [interpreter, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl"]


def _program() -> str:
    """Builds it once for all processes of a run: that of the library's own files and flags."""
    compiler, shared = _compiler(), Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    path = shared / f"emulated-{_digest()}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=shared) as folder:
            objects = build.compile_units(compiler, build._UNITS["linux", "aarch64"], Path(folder))
            headers = ["-isystem", jax.ffi.include_dir()]
            program = Path(folder) / path.name
            command = [*compiler, *build._FLAGS, *headers, str(_SOURCE), *objects, "-o", program]
            subprocess.run(command, check=True)
            os.replace(program, path)
    return str(path)


def _digest() -> str:
    """Of the library's files and flags, and of what calls it."""
    return build._digest(build._bundled_name("aarch64").encode() + _SOURCE.read_bytes())


def _text(text: str) -> list[int | bytes]:
    return [len(text), text.encode()]


def _bytes(array: np.ndarray) -> list[int | bytes]:
    return [array.nbytes, array.tobytes()]
