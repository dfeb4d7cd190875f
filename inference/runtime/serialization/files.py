"""Executables in files. They are code: a file that others may write to is not run.

A file holds magic bytes, the SHA-256 of all that follows, the length of a JSON header, the header
(what the program depends on, and how its output is laid out), and the bytes of the runtime.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from configs.engine import Config
from configs.errors import InputError, reason
from inference.files import atomic, ownership
from inference.runtime.packed_output import PackedOutput
from inference.runtime.serialization import key as keys
from inference.runtime.serialization.key import Key
from inference.runtime.serialization.loaded import LoadedExecutable
from sharding import mesh as meshes

_MAGIC = b"RIDGELINE-EXE 1\n"
_LENGTH = struct.Struct("<Q")
_START = len(_MAGIC) + hashlib.sha256().digest_size  # of the body
_MOST_HEADER = 1 << 16  # bytes that are looked at to say why a file is not used
_MOST_KEPT = 256 << 20  # bytes of a cache; a step has one or two million
SUFFIX = ".executable"
_DAMAGED = "it is damaged, or no file of an executable"


class _Header(TypedDict):
    """Of a file; `layout` is that of a step's `PackedOutput`."""

    key: keys.Key
    layout: Sequence[tuple[Sequence[int], str]] | None


class ExecutableFiles:
    """The executables of one engine in a directory."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        attention: str,
        devices: Sequence[jax.Device],
        mesh: Mesh | None,
        is_cache: bool = False,
    ):
        """Of a directory; the engine as `key.of_engine` takes it. Programs run on `devices`, in
        this order. Into a cache those that it lacks are written once they are compiled (`keep`);
        of any other directory a line says what is missing.
        """
        self._folder, self._devices, self.is_cache = folder, devices, is_cache
        self._engine = keys.of_engine(config, attention, devices, mesh)
        self._has_said_why = False

    def load(self, name: str, arguments: tuple[object, ...]) -> LoadedExecutable | None:
        """Returns a program's executable; None, after a line on why, if none can be used.
        `arguments` are shapes, as `key.of_program` takes them.
        """
        key = keys.of_program(self._engine, name, arguments)
        path = self._path(name, key)
        try:
            header, data = _read(path)
            if header["key"] != key:
                raise ValueError("it is of another program")
            results = _results(arguments, header["layout"])
            executable = LoadedExecutable(data, self._devices, arguments, results)
            if self.is_cache:
                with contextlib.suppress(
                    OSError
                ):  # a reader without the right to write evicts nothing
                    os.utime(path)
            return executable
        except FileNotFoundError:
            if not self.is_cache and not self._has_said_why:
                self._has_said_why = True
                logging.warning("%s has no %s: %s", self._folder, name, self._why(name, key))
        except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
            logging.warning("%s is not used, %s is compiled: %s", path, name, reason(error)[:300])
        return None

    def write(self, name: str, arguments: tuple[object, ...], compiled: Compiled) -> Path:
        """Writes an executable; returns its path. Raises InputError if it cannot be written."""
        key = keys.of_program(self._engine, name, arguments)
        outputs = jax.tree.leaves(compiled.out_info, is_leaf=_is_packed)
        layout = next((output.layout for output in outputs if _is_packed(output)), None)
        header = json.dumps({"key": key, "layout": layout}).encode()
        executable: Any = compiled.runtime_executable()
        body = _LENGTH.pack(len(header)) + header + executable.serialize()
        path = self._path(name, key)
        try:
            with atomic.open_file(path, is_kept=True) as file:
                file.write(_MAGIC + hashlib.sha256(body).digest() + body)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error
        return path

    def keep(self, name: str, arguments: tuple[object, ...], compiled: Compiled) -> None:
        """Caches an executable in place of the least recently used; warns of the first failure."""
        try:
            self.write(name, arguments, compiled)
        except (InputError, jax.errors.JaxRuntimeError) as error:
            if not self._has_said_why:
                self._has_said_why = True
                logging.warning("executables are not kept: %s", reason(error)[:300])
            return
        with contextlib.suppress(OSError):  # another process may do the same
            paths = [(path.stat(), path) for path in self._folder.glob(f"*{SUFFIX}")]
            newest, *older = sorted(paths, key=lambda entry: -entry[0].st_mtime_ns)
            num_bytes = newest[0].st_size
            for status, path in older:
                num_bytes += status.st_size
                if num_bytes > _MOST_KEPT:
                    path.unlink()

    def _path(self, name: str, key: Key) -> Path:
        words = name.replace(" x ", "x").replace(", ", "-").replace(" ", "")
        return self._folder / f"{words}-{keys.digest(json.dumps(key))}{SUFFIX}"

    def _why(self, name: str, key: Key) -> str:
        """What sets the most similar file apart; files of other programs tell about the engine."""
        of_program: list[tuple[str, ...]] = []
        of_engine: list[tuple[str, ...]] = []
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            try:
                file_key = _read_key(path)
            except (OSError, ValueError):
                continue
            different = {part for part in key if file_key.get(part) != key[part]}
            if file_key.get("program") == name:
                of_program.append(tuple(part for part in key if part in different))
            of_engine.append(tuple(part for part in self._engine if part in different))
        nearest = min(of_program or of_engine, key=len, default=())
        if not nearest:
            return "no file of it is there; it is compiled"
        return f"those that are there differ in {', '.join(nearest)}; it is compiled"


def check(path: Path) -> None:
    """Raises InputError if a file is damaged, no executable's, or writable by others."""
    try:
        _read(path)
    except InputError:
        raise
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None


def _read(path: Path) -> tuple[_Header, bytes]:
    """Header and program; raises OSError, or ValueError if damaged or not its owner's alone."""
    with _opened(path) as file:
        data = file.read()
    body = memoryview(data)[_START:]
    if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : _START]:
        raise ValueError(_DAMAGED)
    header, end = _header(body)
    return header, bytes(body[end:])


def _read_key(path: Path) -> keys.Key:
    """The key in a header, without the program behind it; raises what `_read` does."""
    with _opened(path) as file:
        return _header(memoryview(file.read(_MOST_HEADER))[_START:])[0]["key"]


def _opened(path: Path) -> BinaryIO:
    ownership.check(path)
    return path.open("rb")


def _header(body: memoryview) -> tuple[_Header, int]:
    """The header of what follows the digest, and where it ends; raises ValueError if it is none."""
    if len(body) < _LENGTH.size:
        raise ValueError(_DAMAGED)
    end = _LENGTH.size + _LENGTH.unpack_from(body)[0]
    header: _Header = json.loads(bytes(body[_LENGTH.size : end]))
    if not (isinstance(header, dict) and isinstance(header.get("key"), dict)):
        raise ValueError(_DAMAGED)
    return header, end


def _results(
    arguments: tuple[object, ...], layout: Sequence[tuple[Sequence[int], str]] | None
) -> tuple[object, ...]:
    """Shapes of a program's results: cache and slots, and a step's output, divided as its batch."""
    cache, slots, batch = arguments[-3:]
    if layout is None:
        return cache, slots
    fields = tuple((tuple(shape), str(dtype)) for shape, dtype in layout)
    on_mesh = jax.tree.leaves(batch)[0].sharding
    shards = 1 if on_mesh is None else meshes.num_parts(on_mesh.mesh, on_mesh.spec)
    size = shards * sum(math.prod(shape) for shape, _ in fields)
    words_X = jax.ShapeDtypeStruct((size,), np.int32, sharding=on_mesh)
    return cache, slots, PackedOutput(words_X, fields)


def _is_packed(value: object) -> bool:
    return isinstance(value, PackedOutput)
