"""`engine.weights`: the formats in which an engine holds a checkpoint's weights."""

import dataclasses
import logging
from collections.abc import Mapping

from configs import precision
from configs.engine import Config
from configs.errors import InputError
from configs.model import ModelConfig
from configs.precision import FORMATS
from configs.recipes import few_bits
from inference.checkpoints import load
from inference.checkpoints.checkpoint import Checkpoint
from layers.kernels.linear import packed

Formats = dict[str, tuple[str, ...]]


def choose(config: Config, checkpoint: Checkpoint, linear: str | None) -> tuple[Config, Checkpoint]:
    """The configuration whose parameters have the formats that `engine.weights` asks for, and the
    checkpoint that is read so.

    Args:
        config: of the engine, where `engine.kernels.linear` says which products run.
        linear: `engine.kernels.linear` before it was resolved. Where it is None, a GGUF
            file's blocks are dequantized for XLA's products, and one line says so.

    Raises:
        InputError: the file's formats, or these products, do not go with what was asked for; or
            weights of few bits are to be rounded again.
    """
    weights = config.engine.weights
    if weights is None:
        return config, checkpoint
    paths = load.typed_paths(config.model)
    formats: Formats = dict.fromkeys(paths, (weights,))
    if weights == "file":
        formats = checkpoint.formats()
        blocks = _blocks(formats) - {*precision.ROW_FORMATS, few_bits.LLM_INT8}
        if blocks and config.engine.kernels.linear != "ffi_cpu":
            stored = f"weights in {_listed(blocks)}"
            if linear is not None:
                raise InputError(
                    f"engine.kernels.linear={linear} multiplies no {stored}: engine.weights=file "
                    "goes with engine.kernels.linear=ffi_cpu, 'bfloat16' and 'float32' with any"
                )
            logging.warning("%s need the CPU kernels: dequantized, in float32", stored)
            formats = dict.fromkeys(paths, ("float32",))
    elif FORMATS[weights].is_quantized:
        if blocks := _blocks(dict(checkpoint.config.formats)):
            raise InputError(
                f"{checkpoint.config.name} has its weights in {_listed(blocks)}: "
                f"engine.weights={weights} would round them again; leave it out"
            )
        formats = rounded(config.model, weights)
        _warn_of_rounding_again(formats, checkpoint.formats(), weights)
    model = dataclasses.replace(config.model, formats=tuple(formats.items()))
    return dataclasses.replace(config, model=model), checkpoint.exact()


def warn_of_rounding(config: Config) -> None:
    """One line where products round activations, which no format of the weights asks for."""
    kernels = config.engine.kernels
    formats = {format for _, of_part in config.model.formats for format in of_part}
    names = set(filter(packed.rounds, formats))
    if names and (kernels.linear, kernels.activations) == ("ffi_cpu", "int8"):
        logging.warning(
            "activations are rounded to int8 in products with weights in %s; --activations=exact "
            "leaves them as they are, and is slower",
            _listed(names),
        )


def drawn(config: Config) -> Config:
    """The configuration of random weights; raises an `InputError` for formats that are stored."""
    weights = config.engine.weights
    if weights is None:
        return config
    if weights not in precision.OURS:
        raise InputError(
            f"engine.weights={weights} goes with a checkpoint; random weights have model.dtype, or "
            "one of few bits"
        )
    formats = tuple(rounded(config.model, weights).items())
    return dataclasses.replace(config, model=dataclasses.replace(config.model, formats=formats))


def rounded(model: ModelConfig, format: str) -> Formats:
    """Formats by path of a model whose matrices are in one of few bits (`few_bits.formats`)."""
    return {path: (kind,) for path, kind in few_bits.formats(model, format).items()}


def _warn_of_rounding_again(formats: Formats, stored: Formats, weights: str) -> None:
    """Says which blocks of a file are rounded once more and take no fewer bits afterwards."""
    bits = FORMATS[weights].bits
    again = {  # but tables, which get more bits
        path: stored[path]
        for path, (format,) in formats.items()
        if FORMATS[format].is_quantized and FORMATS[format].bits == bits
        and any(FORMATS[name].bits <= bits for name in _blocks({path: stored[path]}))
    }  # fmt: skip
    if again:
        logging.warning(
            "engine.weights=%s rounds %d matrices again that the file has in %s and saves nothing; "
            "--weights=file keeps them as they are",
            weights, len(again), _listed(_blocks(again)),
        )  # fmt: skip


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def _blocks(formats: Mapping[str, tuple[str, ...]]) -> set[str]:
    """Formats of few bits among these."""
    return {name for names in formats.values() for name in names if FORMATS[name].is_quantized}
