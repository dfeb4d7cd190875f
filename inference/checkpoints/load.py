"""From tensors on disk to parameters: strict both ways, a few parameters at a time."""

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np
from numpy.typing import DTypeLike

from configs.errors import InputError, shown
from configs.kinds.params import Declared, ParamInfo, in_rows
from configs.model import ModelConfig
from configs.precision import FORMATS
from inference.checkpoints.names import NameMap, Stored
from inference.checkpoints.tensor_source import TensorSource
from layers import params, quantized
from layers.params import Params

Progress = Callable[[int, int, str], None]  # bytes done, bytes in all, what is happening
# Returns a leaf of the parameters, on the device, of the values or blocks at a path.
Place = Callable[[str, ParamInfo, "StoredParameter"], object]

_SHOWN = 3
_AHEAD = 16  # parameters that are read, or being read, ahead of what was asked for


class StoredParameter:
    """A parameter's values, or blocks, on disk: read as a whole by `np.asarray`, or in part by a
    slice of rows (a stack's are those of all its matrices), or of all rows' columns. Blocks that
    are not stored are made: each number is rounded to the nearest (of a tensor that is not stored
    so, the rows that are asked for).
    """

    def __init__(self, source: TensorSource, stored: Stored, info: ParamInfo):
        self._source, self._stored, self._info = source, stored, info
        self._is_blocks = FORMATS[info.format].is_quantized
        self._whole: np.ndarray | None = None
        self._blocks_read: dict[str, np.ndarray] = {}  # some kinds are unpacked to be read

    @property
    def shape(self) -> tuple[int, ...]:
        """Of blocks rows and bytes: where they are stored, as many as they are stored in."""
        rows, *columns = self._info.in_rows
        if self._is_blocks:
            stored = [name for name in self._stored.names if self._has_blocks(name)]
            counted = FORMATS[self._info.format].row_bytes(columns[0])
            columns = [self._blocks(stored[0]).shape[-1] if stored else counted]
        return rows, *columns

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if self._whole is None:
            self._whole = self._read_whole()
        return self._whole

    def __getitem__(self, index: slice | tuple[slice, slice]) -> np.ndarray:
        rows, columns = (index, slice(None)) if isinstance(index, slice) else index
        start, stop, _ = rows.indices(self._info.in_rows[0])
        parts, first = [], 0
        for name in self._stored.names:
            turn = -1 if self._stored.transposed else 1
            count = in_rows(self._source.shapes[name][::turn])[0]
            begin, end = max(start - first, 0), min(stop - first, count)
            if begin < end:
                parts.append(self._read(name, begin, end, columns))
            first += count
        if self._is_blocks:
            return np.concatenate(parts)
        values = params.aligned((stop - start, *parts[0].shape[1:]), self._info.format)
        fill(values, parts)
        return values

    def _read(self, name: str, start: int, stop: int, columns: slice) -> np.ndarray:
        if self._is_blocks and self._has_blocks(name):
            return self._blocks(name)[start:stop, columns]
        if self._is_blocks:
            rows = self._read_numbers(name, start, stop, slice(None))
            return quantized.quantize(self._info.format, rows)[:, columns]
        return self._read_numbers(name, start, stop, columns)

    def _read_numbers(self, name: str, start: int, stop: int, columns: slice) -> np.ndarray:
        if not self._stored.transposed:
            return self._read_rows(name, start, stop, columns)
        first, last, _ = columns.indices(self._source.shapes[name][0])
        return self._source.read(name, first, last, slice(start, stop)).T

    def _read_rows(self, name: str, start: int, stop: int, columns: slice) -> np.ndarray:
        """Of a stack, whole matrices are read and cut."""
        shape = self._source.shapes[name]
        if len(shape) < 3:
            return self._source.read(name, start, stop, columns)
        matrix_rows = shape[-2]
        matrices = self._source.read(name, start // matrix_rows, -(-stop // matrix_rows))
        first = start // matrix_rows * matrix_rows
        return matrices.reshape(in_rows(matrices.shape))[start - first : stop - first, columns]

    def _read_whole(self) -> np.ndarray:
        source, stored = self._source, self._stored
        if self._is_blocks:
            whole = np.empty(self.shape, np.uint8)
            fill(whole, (part for name in stored.names for part in self._quantized(name)))
            return whole.reshape(*self._info.shape[:-1], -1)
        buffer = params.aligned(self._info.shape, self._info.format)
        read_into = None if len(stored.names) > 1 or stored.transposed else source.read_into
        if read_into is None or not read_into(stored.names[0], buffer):
            fill(buffer.reshape(self._info.in_rows), rows_of(source, stored))
        return buffer

    def _quantized(self, name: str) -> Iterator[np.ndarray]:
        """Blocks of all rows of a tensor, some at a time."""
        if self._has_blocks(name):
            yield self._blocks(name)
            return
        for rows in rows_of(self._source, self._stored._replace(names=(name,))):
            yield quantized.quantize(self._info.format, rows)

    def _has_blocks(self, name: str) -> bool:
        """Whether a tensor is stored in blocks of the format that is declared."""
        source = self._source
        return source.read_blocks is not None and source.formats.get(name) == self._info.format

    def _blocks(self, name: str) -> np.ndarray:
        if name not in self._blocks_read:
            assert self._source.read_blocks is not None
            self._blocks_read[name] = self._source.read_blocks(name)
        return self._blocks_read[name]


def on_device(path: str, info: ParamInfo, values: StoredParameter) -> jax.Array:
    """`Place` of parameters that stay as they are."""
    return jax.device_put(np.asarray(values))


def load_params(
    infos: Declared,
    source: TensorSource,
    name_map: NameMap,
    progress: Progress | None = None,
    place: Place = on_device,
) -> Params:
    """Values for a declaration.

    Args:
        place: makes a leaf of a parameter's values, called by several threads.

    Raises:
        InputError: a tensor is missing, left over or wrongly shaped.
    """
    declared = params.flatten(infos)
    check(declared, source, name_map)
    done, total = 0, params.num_bytes(infos)
    device = jax.numpy.zeros(()).device  # the caller's: other threads have a default of their own
    leaves = {}

    def read(path: str) -> object:
        info = declared[path]
        with jax.default_device(device):
            return place(path, info, StoredParameter(source, name_map(path), info))

    for path, leaf in _in_order(read, declared, source.readers):
        leaves[path] = leaf
        done += params.num_bytes(declared[path])
        if progress:
            progress(done, total, "loading weights")
    return params.unflatten(infos, leaves)


def _in_order(
    read: Callable[[str], object], paths: Iterable[str], workers: int
) -> Iterator[tuple[str, object]]:
    """Results of threads, a few ahead of the caller."""
    pending: collections.deque[tuple[str, Future[object]]] = collections.deque()
    with ThreadPoolExecutor(workers) as pool:
        for path in paths:
            if len(pending) == _AHEAD:
                first, future = pending.popleft()
                yield first, future.result()
            pending.append((path, pool.submit(read, path)))
        for path, future in pending:
            yield path, future.result()


def check(declared: dict[str, ParamInfo], source: TensorSource, name_map: NameMap) -> None:
    """Compares a flat declaration with a checkpoint's names and shapes.

    Raises:
        InputError: naming the first tensor that is missing or wrongly shaped, or the left-over
            ones.
    """
    stored = {path: name_map(path) for path in declared}
    used = {name for names, _ in stored.values() for name in names}
    used |= {part for name in used & source.parts.keys() for part in source.parts[name]}
    extra = sorted(source.shapes.keys() - used - source.parts.keys())
    for path, info in declared.items():
        names, transposed = stored[path]
        for name in names:
            if name not in source.shapes:
                other = f"; there is {shown(extra[0])}, which has no place" if extra else ""
                raise InputError(
                    f"{source.label}: tensor {shown(name)} is missing; "
                    f"it holds {path}, {list(info.shape)}{other}"
                )
        turn = -1 if transposed else 1
        stacks = {len(source.shapes[name]) for name in names} - {0, 1, 2}
        shapes = [in_rows(source.shapes[name][::turn]) for name in names]
        rows = sum(shape[0] if shape else 0 for shape in shapes)
        is_alike = (
            all(shape[1:] == info.in_rows[1:] for shape in shapes) and rows == info.in_rows[0]
        )
        if stacks and len(names) == 1:  # whose rows may be as many in another order
            is_alike = source.shapes[names[0]][::turn] == info.shape
        if not is_alike:
            actual = ", ".join(f"{shown(name)} is {list(source.shapes[name])}" for name in names)
            expected = list((info.shape if stacks else info.in_rows)[::turn])
            raise InputError(f"{source.label}: {actual}; expected {expected} for {path}")
    if extra:
        more = f" and {len(extra) - _SHOWN} more" if len(extra) > _SHOWN else ""
        raise InputError(
            f"{source.label}: tensors the model has no place for: {', '.join(extra[:_SHOWN])}{more}"
        )


def stored_dtype(config: ModelConfig, source: TensorSource, name_map: NameMap) -> str:
    """The smallest type that holds every value of parameters of the model's type, except blocks."""
    names = (name for path in typed_paths(config) for name in name_map(path).names)
    return source.widest(name for name in names if name not in source.formats)


def typed_paths(config: ModelConfig) -> list[str]:
    """Of the parameters whose type is the model's: others keep a wider one of their own, routers
    above all.
    """
    half = dataclasses.replace(config, dtype="bfloat16", formats=())
    declared = params.flatten(half.parameters())
    return [path for path, info in declared.items() if info.format == "bfloat16"]


def check_parts(config: ModelConfig, source: TensorSource, name_map: NameMap) -> None:
    """Checks the tensors that are stacked into one parameter, whose sum alone may hide a swap; what
    the checkpoint itself has stacked is a sum.

    Raises:
        InputError: naming the first tensor with a wrong number of rows.
    """
    for path, info in params.flatten(config.parameters()).items():
        tensors = name_map(path).names if info.stacked else ()
        for name, rows in zip(tensors, info.stacked, strict=True) if len(tensors) > 1 else ():
            if name in source.shapes:
                source.check_shape(name, (rows, *info.in_rows[1:]))


def rows_of(source: TensorSource, stored: Stored) -> Iterable[np.ndarray]:
    """The rows of several tensors after one another, in blocks of bounded size, a stack's as those
    of one matrix; a transposed tensor is one block.
    """
    for name in stored.names:
        if stored.transposed:
            yield source.read(name, 0, source.shapes[name][0]).T
        else:
            yield from (block.reshape(in_rows(block.shape)) for block in source.blocks(name))


def fill(buffer: np.ndarray, blocks: Iterable[np.ndarray]) -> None:
    """Writes blocks of rows into a buffer, converting to its type."""
    start = 0
    for block in blocks:
        buffer[start : start + len(block)] = block
        start += len(block)
