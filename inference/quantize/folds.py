"""Where factors may move from one matrix of a layer to another, so that the layer's function stays
what it is: elements are divided where they are made and multiplied where they are read.

norm -> what reads it; rows of v -> columns of out, one factor for all queries of a key/value head;
rows of up -> columns of down. Nothing is folded where something else happens in between: limits and
offsets of gpt-oss, an activation on up, norms or limits of values, values that later layers read,
and parts of a layer that norm by themselves.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import numpy as np

from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.latent import Latent
from configs.kinds.params import ParamInfo, leaves
from configs.model import ModelConfig
from inference.layerwise.input_statistics import InputStatistics
from inference.layerwise.stream import Values

_NORMED_READERS = {
    "mixer": "qkv qk q gate q_down kv_down kv pooled indexer/k indexer/weights indexer/pooled",
    "ffn": "gate_up up router latent_down experts/gate_up experts/up shared/gate_up shared/up "
    "shared_gate",
}


@dataclasses.dataclass(frozen=True)
class Fold:
    """Elements that parameters make, and matrices read.

    Attributes:
        shape: of the factors: [n], or [E, n] of a stack whose matrices have their own.
        readers: matrices whose columns they are.
        norm: weights that make them, with `offset` added, and what has a bias of theirs; None: no
            norm makes them.
        rows: otherwise the matrix that makes them, and which of its rows do.
        offset: of the norm.
        head: elements of a head, each of which readers read `copies` times.
    """

    shape: tuple[int, ...]
    readers: tuple[str, ...]
    norm: tuple[str, str | None] | None = None
    rows: tuple[str, slice] | None = None
    offset: float = 0.0
    head: int = 1
    copies: int = 1

    def gathered(self, inputs: np.ndarray, reduce: Callable[..., np.ndarray]) -> np.ndarray:
        """What is known of the columns of a reader, [..., D], as known of the elements."""
        if inputs.ndim > len(self.shape):
            inputs = reduce(inputs, axis=0)
        if self.copies == 1:
            return inputs
        return reduce(inputs.reshape(-1, self.copies, self.head), axis=1).reshape(self.shape)

    def spread(self, factors: np.ndarray) -> np.ndarray:
        """Factors of the elements, as they are of a reader's columns."""
        if self.copies == 1:
            return factors
        heads = factors.reshape(-1, 1, self.head)
        return np.broadcast_to(heads, (len(heads), self.copies, self.head)).reshape(-1)

    def apply(
        self, values: Values, inputs: dict[str, InputStatistics], factors: np.ndarray, dtype: str
    ) -> None:
        """Multiplies a layer's matrices that read the elements by factors above 0, and divides what
        makes the elements: changes `values`, and the statistics of `inputs`. Norms are rounded to
        the `dtype` that they are stored in; factors then follow from the rounded norm.
        """
        if self.norm is not None:
            factors = self._divide_norm(values, factors, dtype)
        else:
            self._divide_rows(values, factors)
        columns = self.spread(factors).astype(np.float32)
        for path in self.readers:
            values[path] = values[path] * columns[..., None, :]
            if path in inputs:
                inputs[path] = inputs[path].scaled(1 / columns)

    def _divide_norm(self, values: Values, factors: np.ndarray, dtype: str) -> np.ndarray:
        assert self.norm is not None
        weight, bias = self.norm
        before = values[weight] + np.float32(self.offset)
        stored = (before / factors - self.offset).astype(jax.numpy.dtype(dtype)).astype(np.float32)
        after = stored + np.float32(self.offset)
        is_same = (after == 0) | (before == 0)
        values[weight] = np.where(is_same, values[weight], stored)
        factors = np.where(is_same, 1, before / np.where(is_same, 1, after))
        if bias is not None:
            values[bias] = (values[bias] / factors).astype(np.float32)
        return factors

    def _divide_rows(self, values: Values, factors: np.ndarray) -> None:
        assert self.rows is not None
        path, rows = self.rows
        divisor = factors.astype(np.float32)
        for name, factor in ((path, divisor[..., None]), (f"{path}_bias", divisor)):
            if name in values:
                inner = values[name].shape[-1:] if name == path else ()
                whole = values[name].reshape(*self.shape[:-1], -1, *inner).copy()
                at = (..., rows, slice(None)) if inner else (..., rows)
                whole[at] /= factor
                values[name] = whole.reshape(values[name].shape)


def of_layer(config: ModelConfig, index: int) -> list[Fold]:
    """Those of a layer, in the order in which they may be made."""
    declared = {"/".join(path): info
                for path, info in leaves(config.declared_layers[index])}  # fmt: skip
    layer = config.layers[index]
    readers: list[tuple[str, ...]] = [("mixer",), ("ffn",)]
    if layer.parallel_norms == 1:
        readers = [("mixer", "ffn")]
    readers = [] if layer.factors else readers  # whose norms go on
    folds = [_of_norm(config, parts, declared) for parts in readers]
    return [*(fold for fold in folds if fold is not None), *_of_rows(config, index)]


def normed_readers(part: str, declared: Collection[str]) -> list[str]:
    """Matrices that read what the norm before a part of a layer makes, and nothing else does."""
    names = _NORMED_READERS[part].split()
    if "ffn/latent_down" in declared:  # experts read what it makes
        names = [name for name in names if not name.startswith("experts/")]
    if part == "mixer" and "mixer/q_down" not in declared:
        names.append("indexer/q")
    return [path for path in (f"{part}/{name}" for name in names) if path in declared]


def _of_norm(
    config: ModelConfig, parts: Sequence[str], declared: Mapping[str, ParamInfo]
) -> Fold | None:
    """That of the norm of the first of the parts, which all of them read."""
    names: tuple[str, str | None] = (f"{parts[0]}_norm", None)
    if config.norm == "layer":
        names = (f"{parts[0]}_norm/weight", f"{parts[0]}_norm/bias")
    readers = [path for part in parts for path in normed_readers(part, declared)]
    if names[0] not in declared or not readers:
        return None
    return Fold((config.width,), tuple(readers), norm=names, offset=config.norm_offset)


def _of_rows(config: ModelConfig, index: int) -> Iterator[Fold]:
    layer = config.layers[index]
    mixer, ffn = layer.mixer, layer.ffn
    is_shared = any(spec.owner == index for spec in config.cache_specs)
    if isinstance(mixer, Attention) and mixer.has_values and not mixer.has_value_norm:
        N, K, H = mixer.num_heads, mixer.num_kv_heads, mixer.head_width
        V = mixer.value_width or H
        if mixer.owner is None and mixer.input_limit is None and not is_shared:
            rows = slice(mixer.query_rows + K * H, None)
            yield Fold((K * V,), ("mixer/out",), rows=("mixer/qkv", rows), head=V, copies=N // K)
    if isinstance(mixer, Latent):
        size = mixer.num_heads * mixer.value_width
        yield Fold((size,), ("mixer/out",), rows=("mixer/v_up", slice(None)))
    if isinstance(ffn, Gated):
        F = ffn.width
        yield Fold((F,), ("ffn/down",), rows=("ffn/gate_up", slice(F, None)))
    if isinstance(ffn, Experts) and ffn.is_gated:
        E, F, X = ffn.num_experts, ffn.width, ffn.shared_width
        if ffn.limit is None and not ffn.up_offset:
            yield Fold((E, F), ("ffn/experts/down",),
                       rows=("ffn/experts/gate_up", slice(F, None)))  # fmt: skip
        if X:
            yield Fold((X,), ("ffn/shared/down",),
                       rows=("ffn/shared/gate_up", slice(X, None)))  # fmt: skip
