"""`engine.weights`: the formats in which an engine holds a checkpoint's weights."""

import dataclasses
import logging

from configs.engine import Config
from configs.errors import InputError
from configs.precision import FORMATS
from inference.checkpoints import load
from inference.checkpoints.opened import Checkpoint


def choose(config: Config, checkpoint: Checkpoint, named: str | None) -> tuple[Config, Checkpoint]:
    """The configuration whose parameters have the formats that `engine.weights` asks for, and the
    checkpoint that is read so.

    Args:
        config: of the engine, where `engine.linear` says which products run.
        checkpoint: what is read.
        named: `engine.linear` as it was asked for. Without a name, blocks are dequantized where
            XLA's products run, and one line says so.

    Raises:
        InputError: the file's formats, or these products, do not go with what was asked for.
    """
    weights = config.engine.weights
    if weights is None:
        return config, checkpoint
    paths = load.typed_paths(config.model)
    formats: dict[str, tuple[str, ...]] = dict.fromkeys(paths, (weights,))
    if weights == "file":
        formats = checkpoint.formats()
        blocks = {name for own in formats.values() for name in own if FORMATS[name].is_quantized}
        if blocks and config.engine.linear != "ffi_cpu":
            kept = f"weights in {', '.join(sorted(blocks))}"
            if named is not None:
                raise InputError(
                    f"engine.linear={named} multiplies no {kept}: engine.weights=file goes with "
                    "engine.linear=ffi_cpu, 'bfloat16' and 'float32' with any"
                )
            logging.warning("%s need the CPU kernels: dequantized, in float32", kept)
            formats = dict.fromkeys(paths, ("float32",))
    model = dataclasses.replace(config.model, formats=tuple(formats.items()))
    exact = dataclasses.replace(
        checkpoint, load_params=checkpoint.load_exact or checkpoint.load_params
    )
    return dataclasses.replace(config, model=model), exact
