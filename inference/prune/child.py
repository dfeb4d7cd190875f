"""The tensors of a pruned model: rows and columns of its parent's, read when called for."""

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from configs.kinds.params import ParamInfo, leaves
from configs.model import ModelConfig
from inference.checkpoints import load, names
from inference.checkpoints.checkpoint import Contents
from inference.checkpoints.tensor_source import TensorSource
from inference.prune import axes
from inference.prune.refit import Refitted
from inference.prune.selection import Selection


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How a parameter follows from the parent's.

    Attributes:
        path: of the parent's.
        info: the parent's declaration.
        stays: by dimension which elements stay: bool [n], or [E, n] of each matrix of a stack.
        factor, offset: x becomes (x + offset) factor - offset, where the factor is not 1.
        refit: the matrix without the columns that go, in place of the parent's.
    """

    path: str
    info: ParamInfo
    stays: dict[int, np.ndarray]
    factor: float = 1.0
    offset: float = 0.0
    refit: Callable[[], np.ndarray] | None = None

    def blocks(self, parent: Contents) -> Iterator[np.ndarray]:
        """Yields the parameter's rows some at a time, of a stack as those of one matrix."""
        if self.refit is not None:
            cut = self._scaled(self._cut(self.refit()))
            yield cut.reshape(-1, cut.shape[-1])
            return
        parts = load.rows_of(parent.source, parent.name_map(self.path))
        if set(self.stays) - {1} or len(self.info.shape) != 2:
            whole = np.concatenate(list(parts)).reshape(self.info.shape)
            cut = self._scaled(self._cut(whole))
            yield cut.reshape(-1, cut.shape[-1]) if cut.ndim > 1 else cut
            return
        for block in parts:
            yield self._scaled(self._cut(block))

    def _cut(self, whole: np.ndarray) -> np.ndarray:
        for dim, stays in self.stays.items():
            if stays.ndim == 1:
                whole = np.compress(stays, whole, axis=dim)
            else:
                pairs = zip(stays, whole, strict=True)
                whole = np.stack([np.compress(row, matrix, axis=dim - 1) for row, matrix in pairs])
        return whole

    def _scaled(self, values: np.ndarray) -> np.ndarray:
        if self.factor == 1:
            return values
        wide = (np.asarray(values, np.float64) + self.offset) * self.factor - self.offset
        return wide.astype(np.float32)


def contents(
    config: ModelConfig,
    child: ModelConfig,
    parent: Contents,
    selection: Selection,
    refitted: Refitted,
) -> Contents:
    """Returns what a checkpoint holds, as the model that it becomes.

    Args:
        config: of the parent.
        child: of `shapes.pruned`, in the selection's shape.
        refitted: matrices in place of the parent's, by the parent's path.
    """
    infos = {"/".join(path): info for path, info in leaves(child.parameters())}
    cuts = _cuts(config, child, selection, refitted)

    def stream(path: str) -> Iterator[np.ndarray]:
        yield from cuts[path].blocks(parent)

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        rows = np.concatenate(list(stream(name)))[start:stop]
        return rows[:, columns] if rows.ndim > 1 else rows

    def dtype(path: str) -> str:
        return parent.source.widest(parent.name_map(cuts[path].path).names)

    source = TensorSource(
        parent.source.label, {path: info.in_rows for path, info in infos.items()}, read,
        parent.source.dtype, stream, dtypes={path: dtype(path) for path in infos},
    )  # fmt: skip
    return Contents(source, names.identity, parent.read_files)


def _cuts(
    config: ModelConfig, child: ModelConfig, selection: Selection, refitted: Refitted
) -> dict[str, _Cut]:
    plain = dataclasses.replace(config, formats=())
    before = {"/".join(path): info for path, info in leaves(plain.parameters())}
    factors = _factors(config, child)
    cuts = {}
    for path, info in ((("/".join(path)), info) for path, info in leaves(child.parameters())):
        origin, stays = path, {}
        parts = path.split("/")
        if parts[0] == "layers":
            layer = selection.layers[int(parts[1])]
            origin = "/".join(("layers", str(layer), *parts[2:]))
            stays = _units(config, selection, layer, "/".join(parts[2:]), before[origin])
        old = before[origin]
        for dim, name in enumerate(old.logical_axes):
            if name == "embed" and old.shape[dim] != info.shape[dim]:
                stays[dim] = selection.channels
        refit = refitted.get(origin)
        if refit is not None:
            del stays[len(old.shape) - 1]
        cuts[path] = _Cut(origin, old, stays, *factors.get(path, (1.0, 0.0)), refit)
    return cuts


def _units(
    config: ModelConfig, selection: Selection, layer: int, path: str, info: ParamInfo
) -> dict[int, np.ndarray]:
    """Which elements of a layer's parameter stay, by dimension; experts' own units come first, of
    all experts.
    """
    stays: dict[int, np.ndarray] = {}
    spec = config.layers[layer]
    ordered = sorted(axes.of_layer(spec), key=lambda item: not item[0].is_stacked)
    for axis, part in ordered:
        units = selection.units.get((layer, axis.name))
        places = axis.places(part.kind)
        name = path.removeprefix(f"{part.prefix}/")
        if units is None or name == path or name not in places:
            continue
        dim, unit_of = places[name]
        staying = units[..., np.maximum(unit_of, 0)] | (unit_of == axes.ALWAYS)
        stays[len(info.shape) + dim] = staying
    return stays


def _factors(config: ModelConfig, child: ModelConfig) -> dict[str, tuple[float, float]]:
    """Factors and offsets of parameters, by path: where a family multiplies embedded tokens by the
    root of the width, rows of the table grow as much as the root shrinks; if the table is the head,
    too, the last norm gives that back.
    """
    if child.embedding_scale == config.embedding_scale:
        return {}
    growth = config.embedding_scale / child.embedding_scale
    factors = {"embed/table": (growth, 0.0)}
    if config.tied:
        shrinking = 1 / growth, config.norm_offset
        factors["final_norm"] = shrinking
        factors |= {"final_norm/weight": shrinking, "final_norm/bias": (1 / growth, 0.0)}
    return factors
