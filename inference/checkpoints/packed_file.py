"""Parameters as a CPU's kernels read them, kept beside what they were made from: later starts map
them, so nothing is packed, or even copied, again.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from configs.errors import InputError
from inference.checkpoints import converted, safetensors_file
from inference.files import atomic, digests
from layers.kernels.cpu import library
from layers.params import Params


def load(folder: Path, expected: Params, read: Callable[[], Params]) -> Params:
    """Parameters from the file in a folder; where it is missing, unsound or of another layout,
    they are read, and written there.

    Args:
        folder: for what is made of one checkpoint.
        expected: shapes and dtypes of all leaves, packed ones among them.
    """
    leaves, tree = jax.tree.flatten(expected)
    described = [(list(leaf.shape), str(leaf.dtype)) for leaf in leaves]
    digest = hashlib.sha256(repr((str(tree), described)).encode()).hexdigest()[:16]
    path = folder / f"packed-{library.LAYOUT}-{digest}.safetensors"
    if path.exists():
        try:
            return jax.tree.unflatten(tree, _mapped(path, described))
        except InputError as error:
            logging.warning("%s; weights are packed again", error)
    params = read()
    try:
        for old in folder.glob("packed-*"):
            if not old.name.startswith(f"packed-{library.LAYOUT}-"):
                logging.warning("weights packed in another layout are packed again")
                old.unlink(missing_ok=True)
        _write(path, jax.tree.leaves(params))
    except OSError as error:
        logging.warning("packed weights are not kept: %s: %s", path, error.strerror)
    return params


def _mapped(path: Path, described: list[tuple[list[int], str]]) -> list[jax.Array]:
    arrays = converted.map_kept(path)
    leaves = [arrays.get(str(index)) for index in range(len(described))]
    if [leaf is not None and (list(leaf.shape), str(leaf.dtype)) for leaf in leaves] != described:
        raise InputError(f"{path}: holds other arrays")
    return [jax.device_put(leaf) for leaf in leaves]  # adopted where aligned, as all matrices are


def _write(path: Path, leaves: list[jax.Array]) -> None:
    """Whole cache lines first: what follows them may lie anywhere."""
    sizes = {str(index): leaf.nbytes for index, leaf in enumerate(leaves)}
    order = sorted(sizes, key=lambda name: sizes[name] % safetensors_file.ALIGNMENT != 0)
    arrays = {name: np.asarray(leaves[int(name)]) for name in order}
    with atomic.open_file(path, is_kept=True) as file:
        tensors = {name: (array.shape, str(array.dtype)) for name, array in arrays.items()}
        safetensors_file.write_header(file, tensors, digests.UNSEALED)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
        digests.seal(file)
