"""Matrices behind removed units, fitted to what they returned before: a least-squares problem in
closed form, with one layer in memory at a time.

What removed units made is predicted from those that stay, as far as it follows from them on the
calibration text (as the columns that stay make up for pruned ones in Frantar & Alistarh 2023, arXiv
2301.00774). Inputs are the parent's.
"""

import functools
import hashlib
from collections.abc import Callable, Mapping

import numpy as np

from inference.checkpoints.load import Progress
from inference.layerwise import input_statistics
from inference.layerwise.input_statistics import InputStatistics
from inference.layerwise.parts import Parts
from inference.layerwise.reader import Reader
from inference.prune import axes
from inference.prune.importance import start
from inference.prune.selection import Selection

# By path of a parent's parameter: its values, float32, without the columns that go.
Refitted = Mapping[str, Callable[[], np.ndarray]]

# Axes whose units pass a norm over all of them before the matrix: a child's inputs are others.
_NORMED = "state_heads", "query_rank"
_DAMPING = 0.01  # of the mean square of inputs, as GPTQ's


def run(
    reader: Reader,
    selection: Selection,
    tokens_YW: np.ndarray,
    parts: Parts,
    progress: Progress | None = None,
) -> Refitted:
    """Fits the matrices of the layers that stay on windows of ids, i32 [Y, W]; what is finished
    goes to `parts`, one part a layer. Raises InputError if a part cannot be written.
    """
    count = reader.config.num_layers
    targets = {layer: _targets(reader, selection, layer) for layer in selection.layers}
    digest = _digest(targets)
    names = {layer: f"refit-{digest}-{layer:04d}" for layer in targets if targets[layer]}
    if not all(map(parts.has, names.values())):
        stream = start(reader, tokens_YW)
        for index in range(max(names) + 1):
            if progress:
                progress(index, count, "fitting matrices")
            values = reader.layer(index)
            if index in names and not parts.has(names[index]):
                stays = targets[index]
                noted = input_statistics.observed(stream, index, values, stays, has_products=True)
                fitted = {path: _fitted(values[path], stays[path], noted[path]) for path in stays}
                parts.write(names[index], fitted, {})
            if index < max(names):
                stream.advance(index, values)
        if progress:
            progress(count, count, "fitting matrices")

    def read(name: str, path: str) -> np.ndarray:
        return np.asarray(parts.read(name)[path])

    return {
        f"layers/{layer}/{path}": functools.partial(read, name, path)
        for layer, name in names.items()
        for path in targets[layer]
    }


def _targets(reader: Reader, selection: Selection, layer: int) -> dict[str, np.ndarray]:
    """The matrices of a layer some of whose inputs go: which stay, bool [D] or [E, D], by path."""
    targets: dict[str, np.ndarray] = {}
    for axis, part in axes.of_layer(reader.config.layers[layer]):
        if axis.name in _NORMED:
            continue
        units = selection.units.get((layer, axis.name))
        dim, unit_of = axis.places(part.kind)[axis.scored]
        if units is None or units.all() or dim != -1 or axis.of_results:
            continue
        targets[f"{part.prefix}/{axis.scored}"] = units[..., unit_of]
    return targets


def _digest(targets: Mapping[int, Mapping[str, np.ndarray]]) -> str:
    whole = hashlib.sha256()
    for layer, stays in targets.items():
        for path, columns in stays.items():
            whole.update(f"{layer} {path}".encode() + np.packbits(columns).tobytes())
    return whole.hexdigest()[:12]


def _fitted(matrix: np.ndarray, stays: np.ndarray, statistics: InputStatistics) -> np.ndarray:
    """A matrix [F, D] without the columns that go, or each of a stack [E, F, D]."""
    if matrix.ndim == 3:
        columns = np.broadcast_to(stays, (len(matrix), stays.shape[-1]))
        return np.stack([
            _fitted(*of_one, statistics.of(nth))
            for nth, of_one in enumerate(zip(matrix, columns, strict=True))
        ])  # fmt: skip
    products = statistics.products_DD
    assert products is not None
    staying, going = np.flatnonzero(stays), np.flatnonzero(~stays)
    among = products[np.ix_(staying, staying)]
    damping = _DAMPING * np.diag(among).mean()
    if not damping > 0:  # an expert without tokens
        return matrix[:, staying]
    among[np.diag_indices_from(among)] += damping
    shares = np.linalg.solve(among, products[np.ix_(staying, going)])  # [staying, going]
    fitted = matrix[:, staying] + matrix[:, going] @ shares.T
    return fitted.astype(np.float32)
