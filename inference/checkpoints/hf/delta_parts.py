"""What checkpoints fuse of layers with the delta rule, in parts as we stack them: values before
queries and keys.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from configs.kinds.recurrent.delta_net import DeltaNet
from configs.model import ModelConfig
from inference.checkpoints import names
from inference.checkpoints.hf.tensor_parts import Part, Whole
from inference.checkpoints.tensor_source import TensorSource


def of_delta_net(config: ModelConfig, prefix: str, kind: DeltaNet) -> Iterator[Whole]:
    """Of queries, keys, values, gates, betas and decays those that lie in one tensor; and taps of
    one channel each. Where gates lie beside what is convolved, rows are each key head's together.
    """
    values, keys, _ = kind.channels
    sizes = {
        "q": keys,
        "k": keys,
        "v": values,
        "z": values,
        "b": kind.num_heads,
        "a": kind.num_heads,
    }
    shapes = {"in": (config.width,), "gates": (config.width,), "conv": (1, kind.conv_width)}
    table = names.FAMILIES[config.family].table
    found: dict[str, set[str]] = {}
    rest = {}
    for path, shape in shapes.items():
        for name in table[f"delta_net/{path}"]:
            tensor, _, part = name.rpartition(".")
            if part in sizes:
                found.setdefault(tensor, set()).add(part)
                rest[tensor] = shape
    for tensor, parts in found.items():
        own = {part: rows for part, rows in sizes.items() if part in parts}
        is_by_head = not parts <= {"q", "k", "v"}
        groups = kind.num_key_heads if is_by_head else 1
        yield _of_rows(f"{prefix}.{tensor}", own, rest[tensor], groups)
    tensor, _, part = table["delta_net/rate"][0].rpartition(".")
    if part == "heads":
        yield _of_heads(f"{prefix}.{tensor}", kind.num_heads)


def with_aligned_taps(source: TensorSource, config: ModelConfig, first: int) -> TensorSource:
    """The source with the taps of queries, of keys and of values each in the tensor of that name.
    transformers fuses the three, and saves thirds of all channels under these names.

    Args:
        source: the checkpoint's tensors.
        config: the model.
        first: number of the model's first layer there.
    """
    joined: dict[str, tuple[list[str], int]] = {}  # each tensor: all three, and its first row there
    shapes = dict(source.shapes)
    for index, layer in enumerate(config.layers, first):
        for kind in (mixer for mixer in layer.mixer.parts if isinstance(mixer, DeltaNet)):
            prefix = f"{names.FAMILIES[config.family].layers}.{index}"
            stored = names.FAMILIES[config.family].table["delta_net/conv"]
            whole = [f"{prefix}.{name.rpartition('.')[0]}" for name in (*stored[1:], stored[0])]
            values, keys, _ = kind.channels
            taps = {source.shapes.get(name, (0,))[1:] for name in whole}
            rows = [source.shapes.get(name, (0,))[0] for name in whole]
            own = [keys, keys, values]
            if len(set(whole)) < 3 or len(taps) > 1 or rows == own or sum(rows) != sum(own):
                continue
            starts = itertools.accumulate(own, initial=0)
            joined |= {name: (whole, start) for name, start in zip(whole, starts, strict=False)}
            shapes |= {name: (n, *shapes[name][1:]) for name, n in zip(whole, own, strict=True)}

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        if name not in joined:
            return source.read(name, start, stop, columns)
        whole, offset = joined[name]
        rows = [source.read(part, 0, source.shapes[part][0], columns) for part in whole]
        return np.concatenate(rows)[offset + start : offset + stop]

    return dataclasses.replace(source, shapes=shapes, read=read) if joined else source


def _of_rows(
    tensor: str, sizes: Mapping[str, int], rest: tuple[int, ...], num_groups: int = 1
) -> Whole:
    """Parts of so many rows each, of every group one behind the other."""
    stored = sum(sizes.values()), *rest

    def parts() -> dict[str, Part]:
        found, first = {}, 0
        number = np.arange(stored[0]).reshape(num_groups, -1)
        for part, count in sizes.items():
            last = first + count // num_groups
            rows = number[:, first:last].ravel()
            found[f"{tensor}.{part}"] = Part(tensor, stored, (count, rest[-1]), rows)
            first = last
        return found

    return tensor, stored, parts


def _of_heads(tensor: str, num_heads: int) -> Whole:
    """A number of each head, stored so as to meet [tokens, heads, elements]."""
    stored = 1, 1, num_heads, 1
    part = Part(tensor, stored, (num_heads,), slice(0, 1))
    return tensor, stored, lambda: {f"{tensor}.heads": part}
