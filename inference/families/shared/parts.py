"""Splits tensors in which a family fuses several of our parameters, or orders rows otherwise."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from configs.kinds.attention import Attention
from configs.kinds.latent import Latent
from configs.kinds.recurrent.delta_net import DeltaNet
from configs.kinds.recurrent.mamba import Mamba2
from configs.kinds.recurrent.selective import Mamba
from configs.kinds.recurrent.short_conv import ShortConv
from configs.model import LayerSpec
from inference.families.shared.hf_names import Table

Rows = slice | np.ndarray


@dataclasses.dataclass(frozen=True)
class Part:
    """A matrix, or a table, inside of a stored tensor.

    Attributes:
        tensor: name of the stored tensor.
        stored: the shape that the tensor must have.
        shape: of the part.
        rows: a slice, or the numbers of the rows in their order; one matrix of a stack.
        columns: likewise, of the last axis; None: all.
        transposed: the part is stored [in, out].
    """

    tensor: str
    stored: tuple[int, ...]
    shape: tuple[int, ...]
    rows: Rows
    columns: Rows | None = None
    transposed: bool = False


Parts = Iterator[tuple[str, Part]]  # by the names that stand for them
# (prefix of a layer's names, layer, width D of the model, the family's names) -> its parts
Split = Callable[[str, LayerSpec, int, Table], Parts]


def conv_taps(prefix: str, layer: LayerSpec, width: int, tensors: Table) -> Parts:
    """Splits the taps of Mamba's or LFM2's convolution."""
    for kind in layer.mixer.parts:
        if isinstance(kind, Mamba | ShortConv):
            taps = tensors[f"{kind.name}/conv"][0].removesuffix(".taps")
            yield from _taps(f"{prefix}.{taps}", kind.channels, kind.conv_width)


def mamba2(prefix: str, layer: LayerSpec, width: int, tensors: Table) -> Parts:
    """Splits Mamba-2's matrix of gate, convolved channels and steps, and its taps."""
    for kind in layer.mixer.parts:
        if isinstance(kind, Mamba2):
            module = f"{prefix}.{tensors['mamba2/out'][0].removesuffix('.out_proj.weight')}"
            inner, maps, _ = kind.channels
            sizes = {"z": inner, "x": inner, "B": maps, "C": maps, "dt": kind.num_heads}
            yield from _rows(f"{module}.in_proj.weight", sizes, (width,))
            if "in" in kind.biases:
                yield from _rows(f"{module}.in_proj.bias", sizes, ())
            yield from _taps(f"{module}.conv1d.weight", sum(kind.channels), kind.conv_width)


def delta_net(prefix: str, layer: LayerSpec, width: int, tensors: Table) -> Parts:
    """Splits fused tensors of layers with the delta rule, and the taps. Where a tensor has gates in
    addition to convolved channels, the rows of each key head are adjacent.
    """
    for kind in layer.mixer.parts:
        if isinstance(kind, DeltaNet):
            yield from _delta_net(prefix, kind, width, tensors)


def _delta_net(prefix: str, kind: DeltaNet, width: int, tensors: Table) -> Parts:
    values, keys, _ = kind.channels
    heads = {"b": kind.num_heads, "a": kind.num_heads}
    sizes = {"q": keys, "k": keys, "v": values, "z": values} | heads
    shapes = {"in": (width,), "gates": (width,), "conv": (1, kind.conv_width)}
    fused: dict[str, tuple[set[str], tuple[int, ...]]] = {}
    for path, row_shape in shapes.items():
        for name in tensors[f"delta_net/{path}"]:
            tensor, _, part = name.rpartition(".")
            if part in sizes:
                fused.setdefault(tensor, (set(), row_shape))[0].add(part)
    for tensor, (parts, row_shape) in fused.items():
        part_sizes = {part: rows for part, rows in sizes.items() if part in parts}
        is_by_head = not parts <= {"q", "k", "v"}
        groups = kind.num_key_heads if is_by_head else 1
        yield from _grouped_rows(f"{prefix}.{tensor}", part_sizes, row_shape, groups)
    tensor, _, part = tensors["delta_net/rate"][0].rpartition(".")
    if part == "heads":  # stored so as to meet [tokens, heads, elements]
        name, stored = f"{prefix}.{tensor}", (1, 1, kind.num_heads, 1)
        yield f"{name}.heads", Part(name, stored, (kind.num_heads,), slice(0, 1))


def grouped_qkv(prefix: str, layer: LayerSpec, width: int, tensors: Table) -> Parts:
    """Splits a fused projection, and its bias, whose rows are, for each key/value head, those of
    its queries, of its key and of its value.
    """
    kind = layer.mixer
    if not isinstance(kind, Attention):
        return
    name = f"{prefix}.{tensors['mixer/qkv'][0].removesuffix('.q')}"
    keys = kind.num_kv_heads * kind.head_width
    sizes = {"q": kind.query_rows, "k": keys, "v": keys}
    yield from _grouped_rows(name, sizes, (width,), kind.num_kv_heads)
    if "qkv" in kind.biases:
        bias = f"{prefix}.{tensors['mixer/qkv_bias'][0].removesuffix('.q')}"
        yield from _grouped_rows(bias, sizes, (), kind.num_kv_heads)


def fused_qkv(module: str) -> Table:
    """Returns the names of the parts that `grouped_qkv` makes."""
    return {
        "mixer/qkv": tuple(f"{module}.weight.{part}" for part in "qkv"),
        "mixer/qkv_bias": tuple(f"{module}.bias.{part}" for part in "qkv"),
    }


def head_norms(prefix: str, layer: LayerSpec, width: int, tensors: Table) -> Parts:
    """Flattens the weights [heads, elements] of norms of each head."""
    kind = layer.mixer
    if not isinstance(kind, Attention) or kind.qk_norm != "each":
        return
    for path, heads in (("q_norm", kind.num_heads), ("k_norm", kind.num_kv_heads)):
        name = f"{prefix}.{tensors[f'mixer/{path}'][0]}"
        stored, size = (heads, kind.head_width), heads * kind.head_width
        yield name, Part(name.removesuffix(".heads"), stored, (size,), slice(0, heads))


def separate_taps(prefix: str, layer: LayerSpec, tensors: Table) -> Iterator[dict[str, int]]:
    """Yields the taps of queries, keys and values, each with its rows: transformers fuses the
    three, and saves thirds of all channels under these names.
    """
    for kind in layer.mixer.parts:
        if isinstance(kind, DeltaNet):
            values, keys, _ = kind.channels
            v, q, k = (f"{prefix}.{name.rpartition('.')[0]}" for name in tensors["delta_net/conv"])
            yield {q: keys, k: keys, v: values}


def latent_heads(prefix: str, layer: LayerSpec, width: int, tensors: Table) -> Parts:
    """Splits the projection from latent vectors: a head's rows are its keys', then its values'."""
    kind = layer.mixer
    if not isinstance(kind, Latent):
        return
    H, V, C = kind.nope_width, kind.value_width, kind.rank
    name = f"{prefix}.{tensors['mixer/k_up'][0].removesuffix('.{}.key')}"
    tensor, stored = f"{name}.weight", (kind.num_heads * (H + V), C)
    for head in range(kind.num_heads):
        first = head * (H + V)
        keys, values = slice(first, first + H), slice(first + H, first + H + V)
        yield f"{name}.{head}.key", Part(tensor, stored, (C, H), keys, transposed=True)
        yield f"{name}.{head}.value", Part(tensor, stored, (V, C), values)


def _rows(tensor: str, sizes: Mapping[str, int], row_shape: tuple[int, ...]) -> Parts:
    """Splits consecutive parts of so many rows each."""
    stored, first = (sum(sizes.values()), *row_shape), 0
    for part, rows in sizes.items():
        span = slice(first, first := first + rows)
        yield f"{tensor}.{part}", Part(tensor, stored, (rows, *row_shape), span)


def _grouped_rows(
    tensor: str, sizes: Mapping[str, int], row_shape: tuple[int, ...], num_groups: int
) -> Parts:
    """Splits parts of so many rows each, which are consecutive within each of the groups."""
    stored = sum(sizes.values()), *row_shape
    rows_GX = np.arange(stored[0]).reshape(num_groups, -1)
    ends = np.cumsum([count // num_groups for count in sizes.values()])[:-1]
    rows = dict(zip(sizes, np.split(rows_GX, ends, axis=1), strict=True))
    return gathered(tensor, stored, rows)


def gathered(tensor: str, stored: tuple[int, ...], rows: Mapping[str, np.ndarray]) -> Parts:
    """Splits parts of the rows with these numbers."""
    for part, numbers in rows.items():
        shape = numbers.size, *stored[1:][-1:]
        yield f"{tensor}.{part}", Part(tensor, stored, shape, numbers.ravel())


def _taps(tensor: str, channels: int, width: int) -> Parts:
    """Reshapes the taps [channels, 1, taps] of a convolution of each channel alone."""
    stored = channels, 1, width
    yield f"{tensor}.taps", Part(tensor, stored, (channels, width), slice(0, channels))
