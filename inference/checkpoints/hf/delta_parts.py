"""What checkpoints fuse of layers with the delta rule, in parts as we stack them: values before
queries and keys.
"""

from collections.abc import Iterator, Mapping

import numpy as np

from configs.kinds.delta_net import DeltaNet
from configs.model import ModelConfig
from inference.checkpoints import names
from inference.checkpoints.hf.tensor_parts import Part, Whole


def of_delta_net(config: ModelConfig, prefix: str, kind: DeltaNet) -> Iterator[Whole]:
    """Of Qwen3-Next one matrix for queries, keys, values and gates, and one for betas and decays,
    each key head's rows together; and taps of one channel each.
    """
    table = names.FAMILIES[config.family].table
    module = f"{prefix}.{table['delta_net/rate'][0].removesuffix('.A_log')}"
    values, keys, _ = kind.channels
    heads = kind.num_key_heads
    fed = {"q": keys, "k": keys, "v": values, "z": values}
    yield _of_rows(f"{module}.in_proj_qkvz.weight", fed, (config.width,), heads)
    numbers = {"b": kind.num_heads, "a": kind.num_heads}
    yield _of_rows(f"{module}.in_proj_ba.weight", numbers, (config.width,), heads)
    taps = {"q": keys, "k": keys, "v": values}
    yield _of_rows(f"{module}.conv1d.weight", taps, (1, kind.conv_width))


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
