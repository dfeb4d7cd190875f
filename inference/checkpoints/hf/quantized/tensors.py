"""A directory whose weights are stored in few bits, as tensors of the shapes that they have."""

import dataclasses
import fnmatch
import logging
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from configs.errors import InputError, shown
from configs.kinds import params
from configs.kinds.params import Formats, ParamInfo
from configs.model import ModelConfig
from configs.precision import FORMATS
from inference.checkpoints import load
from inference.checkpoints.hf.quantized import layouts, scaled, schemes
from inference.checkpoints.hf.quantized.layouts import Layout, Module, Values
from inference.checkpoints.hf.quantized.schemes import Quantization, Scheme
from inference.checkpoints.names import NameMap
from inference.checkpoints.tensor_source import TensorSource
from inference.families.shared.config_keys import Keys

LAYOUTS = layouts.LAYOUTS | {"scaled": Layout(scaled.ENDINGS, scaled.shape, scaled.values)}
_WEIGHT = ".weight"
# Scales of a cache in few bits, which ours does not have.
_OF_CACHE = ".k_scale", ".v_scale", ".q_scale", ".prob_output_scale"
_BLOCK_ELEMENTS = 1 << 22
_NUMBERS = "bfloat16", "float32", "float64"
_TABLES = ("embed_tokens", "wte", "wpe")  # modules that tokens are looked up in


class Matrix(NamedTuple):
    """A matrix in few bits.

    Attributes:
        module: the tensors that stand for it.
        shape: its own.
        format: of ours that holds exactly its numbers; None: none does.
    """

    module: Module
    shape: tuple[int, int]
    format: str | None


def matrices(source: TensorSource, quantization: Quantization) -> dict[str, Matrix]:
    """Matrices that are stored in few bits, by the names that they have in full.

    Raises:
        InputError: a tensor is missing, of another shape or type, or nothing says what it is.
    """
    by_name = {}
    for module in _modules(source, quantization):
        shape = LAYOUTS[module.scheme.layout].shape(module)
        by_name[f"{module.name}{_WEIGHT}"] = Matrix(module, shape, module.scheme.format(shape[1]))
    return by_name


def dequantized(source: TensorSource, matrices: dict[str, Matrix]) -> TensorSource:
    """The source with such matrices in place of the tensors that stand for them; blocks of ours
    hold exactly their numbers, where a format of ours has any.

    Raises:
        InputError: another tensor is no number.
    """
    shapes: dict[str, tuple[int, ...]] = {name: matrix.shape for name, matrix in matrices.items()}
    formats = {name: m.format for name, m in matrices.items() if m.format is not None}
    for name, shape in source.shapes.items():
        if _is_part(name, matrices) or name.endswith(_OF_CACHE):
            continue
        if source.dtypes.get(name, source.dtype) not in _NUMBERS:
            raise InputError(
                f"{source.label}: tensor {shown(name)} is {source.dtypes[name]}, and "
                "quantization_config says nothing of it"
            )
        shapes[name] = shape

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        if name not in matrices:
            return source.read(name, start, stop, columns)
        return _values(matrices[name].module, start, stop).numbers()[:, columns]

    def read_blocks(name: str) -> np.ndarray:
        module, (rows, width), _ = matrices[name]
        repeats = module.scheme.repeats(width, formats[name])
        step = max(_BLOCK_ELEMENTS // width, 1)
        blocks = [
            _values(module, start, min(start + step, rows)).blocks(formats[name], repeats)
            for start in range(0, rows, step)
        ]
        return np.concatenate(blocks)

    dtypes = {n: source.dtypes.get(n, source.dtype) for n in shapes if n not in matrices}
    return TensorSource(
        source.label,
        shapes,
        read,
        "float32",
        read_blocks=read_blocks,
        formats=formats,
        dtypes=dtypes | dict.fromkeys(matrices, "float32"),
        block_bytes=source.block_bytes,
        readers=source.readers,
    )


def _is_part(name: str, matrices: dict[str, Matrix]) -> bool:
    """Whether a tensor is one of those that stand for a matrix."""
    module, _, ending = name.rpartition(".")
    matrix = matrices.get(f"{module}{_WEIGHT}")
    return matrix is not None and ending in LAYOUTS[matrix.module.scheme.layout].endings


def warn(label: str, matrices: dict[str, Matrix]) -> None:
    """Says, a line for each kind, how few bits are served otherwise."""
    notes, stay = {}, "activations stay as they are"
    kinds = dict.fromkeys((module.scheme, format) for module, _, format in matrices.values())
    for scheme, format in kinds:
        rounds = format is not None and FORMATS[format].activations is not None
        keeps = scheme.activations is not None and not rounds
        if format is None:
            why = "have no format that is multiplied as it is: dequantized"
            notes[scheme.described] = f"{why}, and {stay}" if keeps else why
        elif keeps:
            notes[scheme.described] = f"are served as {format}: {stay}"
    for described, note in notes.items():
        logging.warning("%s: weights of %s %s", label, described, note)


def _values(module: Module, start: int, stop: int) -> Values:
    return LAYOUTS[module.scheme.layout].values(module, start, stop)


def _modules(source: TensorSource, quantization: Quantization) -> Iterator[Module]:
    """Modules that are stored in few bits: known by a tensor that none other has."""
    yielded = set()
    for name in source.shapes:
        module, _, ending = name.rpartition(".")
        if ending not in schemes.MARKS or module in yielded:
            continue
        yielded.add(module)
        scheme = quantization.find(module, _is_table(module))
        if scheme is None:
            raise InputError(
                f"{source.label}: {shown(name)} is of few bits, and quantization_config says "
                f"nothing of {shown(module)}"
            )
        yield Module(source, module, scheme)


def _is_table(module: str) -> bool:
    return module.rpartition(".")[2] in _TABLES


def formats(config: ModelConfig, quantization: Quantization, name_map: NameMap) -> Formats:
    """Formats of a model's parameters as its `config.json` says, by path, of each part of a stack
    where they differ; without those whose type is the model's.

    Raises:
        InputError: the matrices of a stack have several.
    """
    by_path = {}
    for path, info in _matrices(config):
        stored = name_map(path)
        names = () if stored.transposed else stored.names
        row = info.shape[-1]
        kinds = [_format(quantization, name, row) or info.format for name in names]
        if not _keeps_shared(info, len(names), set(kinds)):
            kinds = [info.format if FORMATS[kind].rows > 1 else kind for kind in kinds]
        if not set(kinds) - {info.format}:
            continue
        if len(info.shape) > 2 and len(set(kinds)) > 1:
            raise InputError(
                f"quantization_config: {path} is a stack of {', '.join(sorted(set(kinds)))}, "
                "which no kernel multiplies at once"
            )
        by_path[path] = tuple(kinds if len(set(kinds)) > 1 else kinds[:1])
    return by_path


def _keeps_shared(info: ParamInfo, count: int, kinds: set[str]) -> bool:
    """Whether rows that share scales still do where so many tensors follow one another: each but
    the last of a matrix has whole runs of them.
    """
    together = max(FORMATS[kind].rows for kind in kinds) if kinds else 1
    if together == 1 or len(info.shape) == 2 and not info.stacked:
        return True
    if len(info.shape) == 2:
        return all(rows % together == 0 for rows in info.stacked[:-1])
    if count < info.shape[0]:  # one tensor holds the stack
        return info.shape[1] % together == 0
    parts = count // info.shape[0]
    return parts == 1 or info.shape[1] // parts % together == 0


def packed_experts(config: ModelConfig, keys: Keys) -> Formats:
    """As `formats`, of gpt-oss, whose experts are stored as MXFP4.

    Args:
        keys: of a `config.json`, whose `quantization_config` lists modules that are not.

    Raises:
        InputError: it lists what are no names.
    """
    stated = keys.nested("quantization_config") or Keys({})
    skipped = schemes.names(stated, "modules_to_not_convert")
    by_path = {}
    for path, info in _matrices(config):
        module = f"model.layers.{path.split('/')[1]}.mlp.experts"
        is_left = any(fnmatch.fnmatchcase(module, pattern) for pattern in skipped)
        if info.num_experts is not None and not is_left:
            by_path[path] = ("mxfp4",)
    return by_path


def _matrices(config: ModelConfig) -> Iterator[tuple[str, ParamInfo]]:
    typed = load.typed_paths(config)
    declared = dataclasses.replace(config, formats=()).parameters()
    for path, info in params.leaves(declared):
        name = "/".join(path)
        if name in typed and (info.is_multiplied or name == "embed/table"):
            yield name, info


def _format(quantization: Quantization, name: str, row: int) -> str | None:
    if not name.endswith(_WEIGHT):
        return None  # a part of a tensor
    module = name.removesuffix(_WEIGHT)
    scheme: Scheme | None = quantization.find(module, _is_table(module))
    return None if scheme is None else scheme.format(row)


def without_empty_biases(
    source: TensorSource, config: ModelConfig, name_map: NameMap
) -> TensorSource:
    """The source without biases of zeros where the model has none: AutoGPTQ has written one for
    every matrix.
    """
    plain = dataclasses.replace(config, formats=()).parameters()
    declared = {
        name for path, _ in params.leaves(plain) for name in name_map("/".join(path)).names
    }  # fmt: skip
    empty = {
        name
        for name in source.shapes.keys() - declared
        if name.endswith(".bias") and not any(block.any() for block in source.blocks(name))
    }
    shapes = {name: shape for name, shape in source.shapes.items() if name not in empty}
    return dataclasses.replace(source, shapes=shapes)


def check(source: TensorSource, config: ModelConfig, name_map: NameMap) -> None:
    """Raises an `InputError` if a format differs from that in which its tensor is stored."""
    declared: Mapping[str, tuple[str, ...]] = dict(config.formats)
    for path, _ in _matrices(config):
        for part, name in enumerate(names := name_map(path).names):
            kinds = declared.get(path) or (config.dtype,)
            expected = kinds[part if len(kinds) == len(names) else 0]
            stored = source.formats.get(name, config.dtype)
            is_expanded = FORMATS[stored].rows > 1 and expected == config.dtype
            if expected != stored and not is_expanded:
                raise InputError(
                    f"{source.label}: {shown(name)} is stored as {stored}; by its "
                    f"quantization_config it is {expected}"
                )
