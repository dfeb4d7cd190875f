"""Parameters as packages of Flax keep them, live or in a step of Orbax's, and back.

A tree is read as a checkpoint of transformers' tensors (`Family.flax` says which leaf has which).
Flax is not imported: an `nnx.State`, a dictionary of Linen's and a tree of shapes are pytrees as
others are.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from configs.errors import InputError, shown
from configs.kinds.attention import Attention
from configs.kinds.rope import Llama3
from configs.model import ModelConfig
from inference.checkpoints import names
from inference.checkpoints.tensor_source import TensorSource
from inference.families import families
from inference.families.shared.flax_names import AXES, Leaf, Names
from layers import params
from layers.params import Params

_ROOTS = ("params/", "transformer/")  # what a tree may be wrapped in, more than once
_VARIABLE = "/value"  # an `nnx.Variable`, or a box of Linen's, around an array
_UNNAMED = re.compile(r"(?<=gating_einsum)/w$|(?<=mlp/linear)/w$")  # in some versions of `gemma`
_DTYPES = ("float32", "bfloat16", "float16")

Index = tuple[slice | int, ...]


@dataclasses.dataclass(frozen=True)
class FlaxTree:
    """Leaves by their paths, as `_path` spells them.

    Attributes:
        label: where they are, for messages.
        shapes, dtypes: of each leaf.
        read: a leaf's elements at an index.
    """

    label: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]
    read: Callable[[str, Index], np.ndarray]


class _Place(NamedTuple):
    """Where a tensor is: in a leaf, of a layer of it, with sizes of axes by their letters."""

    leaf: Leaf
    path: str
    layer: int | None
    sizes: Mapping[str, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the leaf."""
        return _shape(self.leaf.axes.split(), self.sizes)

    @property
    def part(self) -> Index:
        """Of the tensor in the leaf."""
        chosen = {"L": self.layer}
        return tuple(
            index if (index := self.leaf.index if axis.isdigit() else chosen.get(axis)) is not None
            else slice(None)
            for axis in self.leaf.axes.split()
        )  # fmt: skip

    @property
    def axes(self) -> list[str]:
        """Of that part of the leaf."""
        return [axis for axis in self.leaf.axes.split() if axis != "L" and not axis.isdigit()]


def of_arrays(tree: object) -> FlaxTree:
    """A tree of arrays, or of their shapes, on whatever devices of this process; raises InputError
    if two leaves have one path.
    """
    flattened = _named(tree)
    stored = _stored("the tree", [name for name, _ in flattened])
    leaves = dict(zip(stored, (leaf for _, leaf in flattened), strict=True))

    def read(path: str, index: Index) -> np.ndarray:
        leaf = leaves[path]
        if not getattr(leaf, "is_fully_addressable", True):
            raise InputError(
                f"{path} lies on devices of other processes too: gather the tree on this one first"
            )
        is_whole = all(isinstance(part, slice) for part in index)
        return np.asarray(leaf if is_whole else leaf[index])

    shapes = {path: tuple(getattr(leaf, "shape", ())) for path, leaf in leaves.items()}
    dtypes = {p: str(getattr(leaf, "dtype", type(leaf).__name__)) for p, leaf in leaves.items()}
    return FlaxTree("the tree", shapes, dtypes, read)


def of_step(source: TensorSource) -> FlaxTree:
    """The tree of a step, as `orbax_step.open_tensors` opens it; a leaf of several tensors is read
    once, and stays in memory. Raises InputError if two leaves have one path.
    """
    stored = _stored(source.label, source.shapes)

    @functools.cache
    def whole(path: str) -> np.ndarray:
        return next(source.blocks(stored[path]))

    def read(path: str, index: Index) -> np.ndarray:
        is_whole = all(isinstance(part, slice) for part in index)
        return next(source.blocks(stored[path])) if is_whole else whole(path)[index]

    shapes = {path: source.shapes[name] for path, name in stored.items()}
    dtypes = {path: source.dtypes.get(name, source.dtype) for path, name in stored.items()}
    return FlaxTree(source.label, shapes, dtypes, read)


def tensors(config: ModelConfig, tree: FlaxTree) -> TensorSource | None:
    """The tree as transformers' tensors of a model; None: no package keeps the model under such
    paths.

    Raises:
        InputError: naming the first leaf that is missing, has no place, has another shape or type,
            or may be either of two; `read` raises it for one that holds NaN or infinity.
    """
    naming = _naming(config, tree)
    if naming is None:
        return None
    places = _checked(config, tree, naming)

    def tensor(name: str) -> np.ndarray:
        place = places[name]
        values = tree.read(place.path, place.part)
        if not np.isfinite(values).all():
            raise InputError(f"{tree.label}: {place.path} holds NaN or infinity")
        if place.leaf.is_divided:
            values = _times(values, place.sizes["H"] ** 0.5)
        return _rearranged(values, place.axes, _axes(name), place.sizes)

    def read(name: str, start: int, stop: int, columns: slice = slice(None)) -> np.ndarray:
        rows = tensor(name)[start:stop]
        return rows[:, columns] if rows.ndim > 1 else rows

    def stream(name: str) -> Iterator[np.ndarray]:
        yield tensor(name)

    shapes = {name: _shape(_axes(name), place.sizes) for name, place in places.items()}
    dtypes = {
        name: "bfloat16" if tree.dtypes[place.path] == "bfloat16" else "float32"
        for name, place in places.items()
    }
    widest = "float32" if "float32" in dtypes.values() else "bfloat16"
    return TensorSource(tree.label, shapes, read, widest, stream, dtypes=dtypes)


def export(config: ModelConfig, values: Params, like: object) -> Any:
    """Parameters as a tree of Flax, through the host.

    Args:
        values: as the model declares them.
        like: the tree, or one of shapes (`nnx.eval_shape`): its structure, dtypes and shardings
            are those of the result, as are its leaves that read images.

    Raises:
        InputError: as `tensors`, or no package keeps the model under such paths.
    """
    tree = of_arrays(like)
    naming = _naming(config, tree)
    if naming is None:
        raise InputError(
            f"no leaf of the tree is one of {config.name}: its family {config.family} goes to "
            f"{_packages(config)}"
        )
    places = _checked(config, tree, naming)
    made = {
        place.path: np.empty(place.shape, jax.numpy.dtype(tree.dtypes[place.path]))
        for place in places.values()
    }
    for name, tensor in _cut(config, values):
        place = places[name]
        part = _rearranged(tensor, _axes(name), place.axes, place.sizes)
        if place.leaf.is_divided:
            part = _times(part, place.sizes["H"] ** -0.5)
        made[place.path][place.part] = part
    leaves = [_placed(made.get(_path(path)), leaf) for path, leaf in _named(like)]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _placed(values: np.ndarray | None, like: object) -> object:
    if values is None:
        return like
    if isinstance(like, np.ndarray):
        return values
    return jax.device_put(values, getattr(like, "sharding", None))


def _named(tree: object) -> list[tuple[str, Any]]:
    """Leaves with their keys, "/" between them; a key may have some of its own."""
    leaves, _ = jax.tree.flatten_with_path(tree)
    return [("/".join(map(_key, path)), leaf) for path, leaf in leaves]


def _key(key: object) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _path(path: str) -> str:
    """A leaf's path without what it is wrapped in."""
    while path.startswith(_ROOTS):
        path = path.partition("/")[2]
    return _UNNAMED.sub("", path.removesuffix(_VARIABLE))


def _stored(label: str, leaf_names: Iterable[str]) -> dict[str, str]:
    """Leaves' names by their paths, in the same order."""
    stored: dict[str, str] = {}
    for name in leaf_names:
        path = _path(name)
        if path in stored:
            twice = f"{shown(stored[path])} and {shown(name)}"
            raise InputError(f"{label}: {twice} are one leaf, of which a tree has one")
        stored[path] = name
    return stored


def _packages(config: ModelConfig) -> str:
    packages = dict.fromkeys(naming.package for naming in families.of(config).flax)
    return ", ".join(packages) or "no package of Flax"


def _namings(config: ModelConfig) -> list[Names]:
    if config.family not in families.ALL:
        return []
    ropes = [mixer.rope for mixer in config.mixers(Attention)]
    is_scaled = any(rope is not None and isinstance(rope.scaling, Llama3) for rope in ropes)
    return [n for n in families.of(config).flax if n.is_scaled in (None, is_scaled)]


def _naming(config: ModelConfig, tree: FlaxTree) -> Names | None:
    """The naming that has most of the tree's leaves, with their shapes.

    Raises:
        InputError: two have the same leaves with the same shapes, all of them the tree's.
    """
    best, most = None, 0
    best_places: dict[str, _Place] = {}
    for naming in _namings(config):
        places = _places(config, naming)
        expected = _shapes(places)
        same = [path for path in expected if path in tree.shapes]
        alike = sum(expected[path] == tree.shapes[path] for path in same)
        if len(same) + alike > most:
            best, most, best_places = naming, len(same) + alike, places
        elif best and alike == len(expected) and expected == _shapes(best_places):
            pairs = ((best_places[name], place) for name, place in places.items())
            first, second = next(pair for pair in pairs if pair[0].leaf != pair[1].leaf)
            raise InputError(
                f"{tree.label}: {first.path} is {[*first.shape]}, which in {naming.package} is "
                f"{first.leaf.axes} or {second.leaf.axes}: the sizes of {config.name} cannot tell "
                "the two apart; give transformers' tensors instead"
            )
    return best


def _places(config: ModelConfig, naming: Names) -> dict[str, _Place]:
    """Where each of a model's tensors is, by its name; without those that the package lacks."""
    family = families.of(config)
    places = {}
    for name in _tensor_names(config):
        number, _, in_layer = name.removeprefix(f"{family.layers}.").partition(".")
        layer = int(number) if name.startswith(f"{family.layers}.") else None
        leaf = naming.leaves.get(name if layer is None else in_layer)
        if leaf is not None:
            prefix = "" if layer is None else f"{naming.layer.format(layer)}/"
            sizes = _sizes(config, layer or 0)
            places[name] = _Place(leaf, _path(prefix + leaf.path), layer, sizes)
    return places


def _shapes(places: Mapping[str, _Place]) -> dict[str, tuple[int, ...]]:
    """Of the leaves, by their paths."""
    return {place.path: place.shape for place in places.values()}


def _tensor_names(config: ModelConfig) -> list[str]:
    name_map = names.huggingface(config)
    return [name for path in params.flatten(config.parameters()) for name in name_map(path).names]


def _sizes(config: ModelConfig, layer: int) -> dict[str, int]:
    spec = config.layers[layer]
    assert isinstance(spec.mixer, Attention)
    H = spec.mixer.head_width
    return {
        "D": config.width, "V": config.vocab_size, "L": config.num_layers,
        "N": spec.mixer.num_heads, "K": spec.mixer.num_kv_heads, "H": H, "a": 2, "b": H // 2,
        "F": getattr(spec.ffn, "width", 0),
    }  # fmt: skip


def _checked(config: ModelConfig, tree: FlaxTree, naming: Names) -> dict[str, _Place]:
    places = _places(config, naming)
    expected = _shapes(places)
    extra = sorted(
        path
        for path in tree.shapes
        if path not in expected and not path.startswith(naming.ignored or "\0")
    )
    for name in _tensor_names(config):
        if name not in places:
            raise InputError(f"{config.name} has {name}, which no tree of {naming.package} has")
    for path, shape in expected.items():
        if path not in tree.shapes:
            other = f"; there is {shown(extra[0])}, which has no place" if extra else ""
            raise InputError(
                f"{tree.label}: {path} of {naming.package} is missing, {[*shape]}{other}"
            )
        if tree.shapes[path] != shape:
            raise InputError(
                f"{tree.label}: {path} is {[*tree.shapes[path]]}; {config.name} has {[*shape]}"
            )
        if tree.dtypes[path] not in _DTYPES:
            raise InputError(
                f"{tree.label}: {path} is {tree.dtypes[path]}; valid: {', '.join(_DTYPES)}"
            )
    if extra:
        more = f" and {len(extra) - 1} more" if extra[1:] else ""
        raise InputError(f"{tree.label}: {config.name} has no place for {shown(extra[0])}{more}")
    return places


def _axes(name: str) -> list[str]:
    return AXES.get(".".join(name.split(".")[-2:]), "D").split()


def _shape(axes: list[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(
        int(axis) if axis.isdigit() else math.prod(sizes[letter] for letter in axis)
        for axis in axes
    )


def _rearranged(
    values: np.ndarray, source: list[str], target: list[str], sizes: Mapping[str, int]
) -> np.ndarray:
    """An array of some axes with others of the same letters; H stands for `a` and `b`."""
    letters, wanted = "".join(source), "".join(target)
    if "a" in letters + wanted:
        letters, wanted = letters.replace("H", "ab"), wanted.replace("H", "ab")
    parts = values.reshape([sizes[letter] for letter in letters])
    turned = parts.transpose([letters.index(letter) for letter in wanted])
    return turned.reshape(_shape(target, sizes))


def _times(values: np.ndarray, factor: float) -> np.ndarray:
    """Rounds once, as MaxText's own conversion does; exact where the factor is a power of two."""
    return (values.astype(np.float32) * np.float32(factor)).astype(values.dtype)


def _cut(config: ModelConfig, values: Params) -> Iterator[tuple[str, np.ndarray]]:
    """Transformers' tensors of our parameters."""
    name_map, leaves = names.huggingface(config), params.flatten(values)
    for path, info in params.flatten(config.parameters()).items():
        whole, tensor_names = np.asarray(leaves[path]), name_map(path).names
        if len(tensor_names) == 1:
            yield tensor_names[0], whole
        else:
            yield from zip(tensor_names, np.split(whole, np.cumsum(info.stacked)[:-1]), strict=True)
