"""What checkpoints fuse of recurrent layers, in parts as we stack them."""

from collections.abc import Iterator, Mapping

import numpy as np

from configs.kinds.recurrent.linear_attention import LinearAttention
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.selective import Mamba
from configs.kinds.recurrent.short_conv import ShortConv
from configs.model import ModelConfig
from inference.checkpoints import names
from inference.checkpoints.hf.tensor_parts import Part, Whole


def of_mamba(config: ModelConfig, prefix: str, kind: Mamba) -> Iterator[Whole]:
    """Taps of one channel each."""
    (taps,) = names.FAMILIES[config.family].table["mamba/conv"]
    yield _of_taps(f"{prefix}.{taps.removesuffix('.taps')}", kind.channels, kind.conv_width)


def of_mamba2(config: ModelConfig, prefix: str, kind: Mamba2) -> Iterator[Whole]:
    """One matrix for the gate, what is convolved and the steps, and taps of one channel each."""
    table = names.FAMILIES[config.family].table
    module = f"{prefix}.{table['mamba2/out'][0].removesuffix('.out_proj.weight')}"
    inner, maps, _ = kind.channels
    sizes = {"z": inner, "x": inner, "B": maps, "C": maps, "dt": kind.num_heads}
    yield _of_rows(f"{module}.in_proj.weight", sizes, (config.width,))
    if "in" in kind.biases:
        yield _of_rows(f"{module}.in_proj.bias", sizes, ())
    yield _of_taps(f"{module}.conv1d.weight", sum(kind.channels), kind.conv_width)


def of_short_conv(config: ModelConfig, prefix: str, kind: ShortConv) -> Iterator[Whole]:
    """Taps of one channel each."""
    taps = names.FAMILIES[config.family].table["short_conv/conv"][0].removesuffix(".taps")
    yield _of_taps(f"{prefix}.{taps}", kind.channels, kind.conv_width)


def of_linear_attention(config: ModelConfig, prefix: str, kind: LinearAttention) -> Iterator[Whole]:
    """One matrix for queries, keys and values, rows of each head side by side."""
    name = names.FAMILIES[config.family].table["linear_attention/in"][0]
    tensor, N, M = f"{prefix}.{name.removesuffix('.q')}", kind.num_heads, kind.key_width
    stored = N * (2 * M + kind.value_width), config.width
    rows_NX = np.arange(stored[0]).reshape(N, -1)
    own = {"q": rows_NX[:, :M], "k": rows_NX[:, M : 2 * M], "v": rows_NX[:, 2 * M :]}

    def parts() -> dict[str, Part]:
        return {
            f"{tensor}.{part}": Part(tensor, stored, (rows.size, config.width), rows.ravel())
            for part, rows in own.items()
        }

    yield tensor, stored, parts


def _of_rows(tensor: str, sizes: Mapping[str, int], rest: tuple[int, ...]) -> Whole:
    """Parts of so many rows each, one behind the other."""

    def parts() -> dict[str, Part]:
        found, first = {}, 0
        for part, rows in sizes.items():
            own = slice(first, first + rows)
            found[f"{tensor}.{part}"] = Part(tensor, stored, (rows, *rest), own)
            first += rows
        return found

    stored = sum(sizes.values()), *rest
    return tensor, stored, parts


def _of_taps(tensor: str, channels: int, width: int) -> Whole:
    """A convolution of each channel alone, [channels, 1, taps] there."""
    stored = channels, 1, width
    part = Part(tensor, stored, (channels, width), slice(0, channels))
    return tensor, stored, lambda: {f"{tensor}.taps": part}
