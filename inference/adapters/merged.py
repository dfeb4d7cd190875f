"""A checkpoint with an adapter added to its weights, to be converted."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from configs import adapters
from configs.errors import InputError
from inference.checkpoints import load, names, provenance
from inference.checkpoints.checkpoint import Checkpoint, Contents, NewCheckpoint
from inference.checkpoints.tensor_source import TensorSource
from inference.runtime.adapter_weights import AdapterWeights
from inference.text.tokenizer import Tokenizer
from layers import decoder, params


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Merged(NewCheckpoint):
    base: Checkpoint

    def build_tokenizer(self) -> Tokenizer:
        return self.base.load_tokenizer()


def checkpoint(base: Checkpoint, adapter: AdapterWeights) -> NewCheckpoint:
    """A checkpoint of the same model, whose numbers are sums in float32; blocks become numbers.

    Raises:
        InputError: the checkpoint does not hold its model, or the adapter changes one use of a
            table that is both embedding and head.
    """
    stored, config = base.contents(), dataclasses.replace(base.config, formats=())
    infos = params.flatten(decoder.param_infos(config))
    load.check(infos, stored.source, stored.name_map)
    changed = {place.path for place in adapter.factors}
    if config.tied and changed & {adapters.EMBEDDING, adapters.HEAD}:
        raise InputError(
            f"{adapter.path}: changes the embedding or the head of {config.name}, which are one "
            "table: no merged model has both; serve the adapter beside its model (serve --adapters)"
        )

    def stream(path: str) -> Iterator[np.ndarray]:
        first, delta_FD = 0, _delta(adapter, path, infos[path].in_rows) if path in changed else None
        for rows in load.rows_of(stored.source, stored.name_map(path)):
            if delta_FD is not None:
                rows = rows.astype(np.float32) + delta_FD[first : first + len(rows)]
            first += len(rows)
            yield rows

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        rows = np.concatenate(list(stream(name)))[start:stop]
        return rows[:, columns] if rows.ndim > 1 else rows

    source = TensorSource(
        stored.source.label, {path: info.in_rows for path, info in infos.items()}, read,
        stored.source.dtype, stream,
        dtypes={path: stored.source.widest(stored.name_map(path).names) for path in infos},
    )  # fmt: skip

    def read_files() -> dict[str, bytes]:
        stage = {"made_by": "convert", "parent": provenance.weights_digest(base), "data": None}
        return provenance.appended(stored.read_files(), {**stage, "adapter": adapter.digest})

    raw_config = None if base.config.formats else stored.raw_config
    contents = Contents(source, names.identity, read_files, raw_config)
    return _Merged(config=config, eos_ids=base.eos_ids, base=base, new_contents=contents)


def _delta(adapter: AdapterWeights, path: str, shape: tuple[int, ...]) -> np.ndarray:
    delta_FD = np.zeros(shape, np.float32)
    for place, (down_RD, up_FR) in adapter.factors.items():
        if place.path == path:
            delta_FD[place.rows] += up_FR.astype(np.float32) @ down_RD.astype(np.float32)
    return delta_FD
