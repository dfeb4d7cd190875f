"""One checkpoint written in another format: complete under its name, or not there at all."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from configs import precision
from configs.errors import InputError, reason
from configs.kinds.params import Declared, ParamInfo
from configs.model import ModelConfig
from inference.checkpoints import (
    load,
    manifest,
    mapped,
    new_directory,
    provenance,
    safetensors_file,
    text_files,
)
from inference.checkpoints.checkpoint import Checkpoint, Contents
from inference.checkpoints.hf import config_export, config_json, hf_directory, weights_export
from inference.checkpoints.hf.quantized import export
from inference.checkpoints.load import Progress
from inference.checkpoints.native import averaged, blocks, orbax_directory
from inference.files import atomic
from layers import decoder, params

FORMATS = ("orbax", "hf")
SHARD_BYTES = 5 * 10**9  # what transformers writes

_MAX_REASON = 300  # characters
_TABLES = "embed/table", "inputs/table"  # of which compressed-tensors packs none
_PLAIN = ("float32",)
_INTERMEDIATE = "weights.safetensors"


def convert(
    checkpoint: Checkpoint,
    output: Path,
    to: str,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
    smaller: ModelConfig | None = None,
    packs_head: bool = False,
) -> None:
    """Writes a checkpoint as a directory, reads it back and compares before it gets its name.

    Args:
        output: a directory that does not exist yet.
        to: one of `FORMATS`.
        dtype: 'bfloat16' or 'float32', which the directory then runs in; None keeps what is
            stored (float16 is widened to float32, blocks stay blocks).
        max_shard_bytes: of one safetensors file.
        smaller: the model with less to cache that it becomes (`configs/recipes/smaller_caches.py`);
            None: it stays as it is.
        packs_head: an untied head of few bits stays so in 'hf', too, where others read fewer such
            directories.

    Raises:
        InputError: the source is unsound, the format cannot hold it, or the output is in the way
            or cannot be written.
    """
    new_directory.check(output)
    checkpoint.check_no_classifier()
    contents, model = checkpoint.contents(), checkpoint.config
    copied = contents.read_files()
    if smaller is not None and smaller != model:
        if to == "hf":
            config_export.of_model(smaller)  # refused before weights are read
        contents = averaged.contents(model, smaller, contents)
        stage = {"made_by": "convert", "parent": provenance.weights_digest(checkpoint)}
        copied = provenance.appended(copied, {**stage, "data": None, "averages": "caches"})
        model = dataclasses.replace(smaller, formats=())  # means are no blocks
    stored = dtype or load.stored_dtype(model, contents.source, contents.name_map)
    if stored not in ("bfloat16", "float32"):
        raise InputError(
            f"{contents.source.label}: weights are {stored}, which is not kept; say what they "
            "become: --dtype=float32 or --dtype=bfloat16"
        )
    formats = model.formats if dtype is None else ()
    config = dataclasses.replace(model, dtype=stored, formats=formats)
    if to == "hf" and formats:
        tables = _TABLES if packs_head else (*_TABLES, "head/table")
        config = dataclasses.replace(config, formats=_with_plain(config, tables))
    infos = decoder.param_infos(config)
    declared = params.flatten(infos)
    load.check(declared, contents.source, contents.name_map)
    if checkpoint.eos_ids and text_files.GENERATION not in copied:
        ends = json.dumps({"eos_token_id": list(checkpoint.eos_ids)}) + "\n"
        copied[text_files.GENERATION] = ends.encode()
    with new_directory.create(output) as folder:
        digests: dict[str, str] = {}

        def rows(path: str) -> Iterator[np.ndarray]:
            return _hashed(contents, path, declared[path], digests)

        if to == "orbax":
            _write_orbax(folder, infos, rows, progress)
            runs = dataclasses.replace(config, dtype=dtype or model.dtype)
            description = orbax_directory.config_bytes(
                runs, checkpoint.eos_ids, contents.raw_config
            )
        else:
            plain = dataclasses.replace(config, formats=())
            raw = contents.raw_config
            if not raw:
                text = copied.get(text_files.GENERATION, b"{}")
                raw = config_export.of_model(plain, mapped.parse_json(text, text_files.GENERATION))
            raw = raw | {"tie_word_embeddings": config.tied}
            raw = config_export.with_dtype(raw, stored, checkpoint.eos_ids)
            if config.formats:
                modules = weights_export.modules(config, declared)
                raw["quantization_config"] = export.describe(modules)
            description = (json.dumps(raw, indent=1) + "\n").encode()
            weights_export.write(folder, config, declared, rows, max_shard_bytes, progress)
        for name, data in (copied | {text_files.CONFIG: description}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        manifest.write(folder)
        _compare(folder, checkpoint, declared, digests)


def _with_plain(
    config: ModelConfig, tables: tuple[str, ...]
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Formats for these tables in transformers' directories; an `InputError` if they have none."""
    by_path = dict(config.formats)
    for path, formats in by_path.items():
        for format in formats:
            export.check(path, format)
    packed = (
        table for table in tables if precision.FORMATS[by_path.get(table, _PLAIN)[0]].is_quantized
    )
    return tuple((by_path | dict.fromkeys(packed, _PLAIN)).items())


def _hashed(
    contents: Contents, path: str, info: ParamInfo, digests: dict[str, str]
) -> Iterator[np.ndarray]:
    digest, stored = hashlib.sha256(), contents.name_map(path)
    if precision.FORMATS[info.format].is_quantized:
        whole = np.asarray(load.StoredParameter(contents.source, stored, info))
        digests[path] = hashlib.sha256(whole.data).hexdigest()
        yield whole
        return
    for block in load.rows_of(contents.source, stored):
        block = _as_type(block, path, info.format)
        digest.update(block.view(np.uint8).data)
        yield block
    digests[path] = digest.hexdigest()


def _as_type(block: np.ndarray, path: str, dtype: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        converted = np.ascontiguousarray(block, jax.numpy.dtype(dtype))
    if converted.dtype != block.dtype and (np.isinf(converted) & ~np.isinf(block)).any():
        raise InputError(f"{path} holds values that {dtype} has no number for")
    return converted


def _write_orbax(
    folder: Path, infos: Declared, rows: weights_export.Rows, progress: Progress | None
) -> None:
    """Through one mapped file: Orbax holds all it writes in memory, so nothing else should."""
    intermediate = folder / _INTERMEDIATE
    declared = params.flatten(infos)
    with intermediate.open("wb") as file:
        tensors = {path: blocks.layout(info) for path, info in declared.items()}
        total, done = safetensors_file.write_header(file, tensors, {}), 0
        for path in declared:
            for rows_here in rows(path):
                file.write(rows_here.view(np.uint8).data)
                done += rows_here.nbytes
            if progress:
                progress(done, total, "writing weights")
    leaves = safetensors_file.map_arrays(intermediate)
    atomic.check_room(folder, total)
    try:
        orbax_directory.save(folder, params.unflatten(infos, leaves))
    except OSError:
        raise
    except Exception as error:  # whatever its libraries raise
        raise OSError(reason(error)[:_MAX_REASON]) from error
    intermediate.unlink()


def _compare(
    folder: Path, checkpoint: Checkpoint, declared: dict[str, ParamInfo], digests: dict[str, str]
) -> None:
    """Loads what was written as any script would, and compares every parameter."""
    try:
        if orbax_directory.is_ours(folder):
            config, raw = orbax_directory.read_config(folder)
            written = orbax_directory.open_directory(folder, config, raw)
        else:
            config = config_json.read_model(folder)
            written = hf_directory.open_directory(folder, config)
        contents = written.contents()
        load.check(declared, contents.source, contents.name_map)
        again: dict[str, str] = {}
        for path, info in declared.items():
            for _ in _hashed(contents, path, info, again):
                pass
    except InputError as error:
        raise InputError(f"what was written cannot be read back: {error}") from None
    different = [path for path in declared if again[path] != digests[path]]
    if different or written.eos_ids != checkpoint.eos_ids:
        what = different[0] if different else "the end tokens"
        raise InputError(
            f"{what} would not come back as written: {checkpoint.config.family} cannot be "
            "converted to this format"
        )
