"""DeepSeek-V4 and GLM-5.2 in small, beside `fakes`."""

import dataclasses
import itertools
from typing import Any

from configs.kinds.experts import Experts, Router
from configs.kinds.hyper_connections import HyperConnections
from configs.model import LayerSpec, ModelConfig
from tests import fakes


def shared_indexer(dtype: str = "float32", **changes: Any) -> ModelConfig:
    """`deepseek_v32` whose last layer reads what the first one's indexer chose (GLM-5.2)."""
    first, second, third = (model := fakes.deepseek_v32(dtype, **changes)).layers
    third = dataclasses.replace(third, mixer=third.mixer.changed({"index_owner": 0}))
    return dataclasses.replace(model, pattern=(first, second, third))


def deepseek_v4(dtype: str = "float32", **changes: Any) -> ModelConfig:
    """DeepSeek-V4 in small: a window, entries that queries choose among and all entries, over three
    residual streams; experts by token id in the first two layers.
    """
    sparse, _, heavy = (model := fakes.compressed(dtype, **changes)).layers
    near = sparse.mixer.changed({"stride": 0, "overlaps": False, "indexer": None})
    hashed = Experts(
        5, 2, 12, Router("sqrt_softplus", scale=1.5, table_rows=131), shared_width=12, limit=1.0
    )
    scored = dataclasses.replace(hashed, router=Router("sqrt_softplus", has_offsets=True))
    layers = zip((near, sparse.mixer, heavy.mixer), (hashed, hashed, scored), strict=True)
    model = dataclasses.replace(
        model, name="tiny-v4", family="deepseek_v4", hyper_connections=HyperConnections(3, 4),
        pattern=tuple(itertools.starmap(LayerSpec, layers)),
    )  # fmt: skip
    return model
