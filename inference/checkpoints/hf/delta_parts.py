"""What checkpoints fuse of layers with the delta rule, in parts as we stack them: values before
queries and keys.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from configs.kinds.recurrent.delta_net import DeltaNet
from configs.model import ModelConfig
from inference.checkpoints import names
from inference.checkpoints.hf.tensor_parts import Part, Whole


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
