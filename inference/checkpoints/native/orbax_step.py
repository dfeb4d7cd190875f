"""A step that a training loop wrote with Orbax: a tree of our parameters, sharded in any way.

Orbax itself reads it, one parameter at a time, whole, from whatever shards it was written in.
"""

import threading
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from configs.errors import InputError, reason
from inference.checkpoints import text_files
from inference.checkpoints.tensor_source import TensorSource
from layers import params

_METADATA = "_METADATA"
_ITEMS = (".", "default", "params", "state", "items", "model_params")  # where a step keeps its tree
_PARAMS = "params"  # the parameters' name in the state of a training loop


def is_step(path: Path) -> bool:
    """Whether a directory is a step of Orbax's, and no checkpoint with a configuration."""
    return _item(path) is not None and not (path / text_files.CONFIG).exists()


def open_tensors(path: Path) -> TensorSource:
    """The parameters of a step under our own paths: its tree, or what the tree calls `params`.

    Raises:
        InputError: Orbax cannot read it, or a leaf is no array.
    """
    import orbax.checkpoint as ocp  # 0.2 to 1 s, needed by nothing else that serves

    item = (_item(path) or path).absolute()
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    reading = threading.Lock()  # Orbax has an event loop of its own
    try:
        tree = checkpointer.metadata(item).item_metadata.tree
    except Exception as error:  # whatever its libraries raise
        raise InputError(f"{path}: Orbax cannot read this step: {reason(error)}") from None
    leaves, structure = jax.tree.flatten(tree, is_leaf=lambda node: hasattr(node, "shape"))
    paths = params.flatten(jax.tree.unflatten(structure, range(len(leaves))))  # path -> leaf
    if any(path.startswith(f"{_PARAMS}/") for path in paths):
        items = ((path.removeprefix(f"{_PARAMS}/"), index) for path, index in paths.items())
        paths = {path: index for path, index in items if f"{_PARAMS}/{path}" in paths}
    if wrong := [path for path, index in paths.items() if not hasattr(leaves[index], "dtype")]:
        raise InputError(f"{path}: {wrong[0]} is no array")
    as_numpy = [ocp.RestoreArgs(restore_type=np.ndarray)] * len(leaves)
    restore_args = jax.tree.unflatten(structure, as_numpy)

    def whole(name: str) -> np.ndarray:
        index: int = paths[name]
        targets = [ocp.PLACEHOLDER] * len(leaves)
        targets[index] = leaves[index]
        target_tree = jax.tree.unflatten(structure, targets)
        arguments = ocp.args.PyTreeRestore(item=target_tree, restore_args=restore_args)
        with reading:
            try:
                restored = jax.tree.leaves(checkpointer.restore(item, args=arguments))
            except Exception as error:
                raise InputError(f"{path}: Orbax cannot read {name}: {reason(error)}") from None
        return np.asarray(restored[index])

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        rows = whole(name)[start:stop]
        return rows[:, columns] if rows.ndim > 1 else rows

    def stream(name: str) -> Iterator[np.ndarray]:
        yield whole(name)

    shapes = {name: tuple(leaves[index].shape) for name, index in paths.items()}
    dtypes = {name: str(np.dtype(leaves[index].dtype)) for name, index in paths.items()}
    dtype = "bfloat16" if {*dtypes.values()} <= {"bfloat16"} else "float32"
    return TensorSource(str(path), shapes, read, dtype, stream, dtypes=dtypes)


def _item(path: Path) -> Path | None:
    items = (path / item for item in _ITEMS)
    return next((item for item in items if (item / _METADATA).is_file()), None)
