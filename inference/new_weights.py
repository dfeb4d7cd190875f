"""Weights that an engine starts with or changes to, from a tree or files, and their versions."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from configs.engine import Config
from configs.errors import InputError, shown
from configs.heads import Heads
from configs.model import ModelConfig
from inference.checkpoints import (
    classifiers,
    flax_tree,
    load,
    names,
    provenance,
    resolve,
    weight_formats,
)
from inference.checkpoints.checkpoint import Checkpoint
from inference.checkpoints.load import Progress
from inference.checkpoints.names import NameMap
from inference.checkpoints.native import orbax_step
from inference.checkpoints.tensor_source import TensorSource
from inference.classifier import Classifier
from inference.files import mirror
from inference.scheduling.sequence import Sequence
from inference.text.tokenizer import Tokenizer
from layers import decoder, params
from layers.kernels.linear import api as linear
from layers.kernels.linear.packed import Packed
from layers.params import Params
from sharding import mesh as meshes

# How weights and cache are stored, and how far they are used.
_NO_FUNCTION = frozenset(("name", "dtype", "formats", "cache_format", "max_context"))


class ParamsVersions:
    """Counts the weights that an engine has had, and names in sequences which they came from.

    Attributes:
        current: 0 at first.
    """

    def __init__(self) -> None:
        self.current = 0
        self._cached: tuple[int, ...] = ()  # older ones, whose pages may still be cached

    def check(self, version: int | None) -> None:
        """Raises InputError unless a version, if there is one, is above the current one."""
        if version is not None and version <= self.current:
            raise InputError(
                f"weight_version={version}: must be above {self.current}, the version of the "
                "engine's weights"
            )

    def advance(
        self, keeps_pages: bool, unfinished: Iterable[Sequence], version: int | None = None
    ) -> None:
        """Counts new weights, of this version or the next; with `keeps_pages` unfinished sequences
        name the old ones, too.
        """
        if keeps_pages:
            for sequence in unfinished:
                if sequence.num_computed_tokens or sequence.leader:
                    sequence.note_params(self.current)
            self._cached += (self.current,)
        self.current = self.current + 1 if version is None else version

    def forget_pages(self) -> None:
        """Forgets older weights, because no page is cached any more."""
        self._cached = ()

    def note(self, sequence: Sequence, has_read_pages: bool) -> None:
        """Names in a sequence the weights of its newest results; with `has_read_pages` those of
        pages that other sequences computed, too.
        """
        for version in (*(self._cached if has_read_pages else ()), self.current):
            sequence.note_params(version)
        sequence.note_version(self.current)


@dataclasses.dataclass(frozen=True)
class NewWeights:
    """Weights that were read for a running engine, and the head of one that labels texts."""

    params: Params
    classifier: Classifier | None


def reader(
    config: Config,
    checkpoint: Checkpoint,
    progress: Progress | None = None,
    draft: Checkpoint | None = None,
) -> Callable[[], Params]:
    """Returns a function that reads a checkpoint's parameters in the layout of the engine's
    products, in the formats that `weight_formats.choose` chose; raises InputError if heads were
    trained for another model.
    """
    if draft is not None:
        if isinstance(config.draft, Heads):
            provenance.check_target(config.draft, checkpoint)
        read, drafting = reader(config, checkpoint, progress), reader(config.for_draft(), draft)
        return lambda: read() | {"draft": drafting()}
    infos, mesh = decoder.param_infos(config.model), meshes.of(config.mesh)
    packs = config.engine.kernels.linear == "ffi_cpu" and mesh is None
    return functools.partial(
        checkpoint.load_params, infos, progress, linear.placement(config, mesh),
        linear.abstract(config, infos) if packs else None,
        in_part=mesh is not None and mesh.is_multi_process,
    )  # fmt: skip


def find(
    source: Params | str | Path,
    config: Config,
    declared: ModelConfig,
    progress: Progress | None = None,
) -> Callable[[], Params]:
    """Returns a function that makes or reads weights for a running engine.

    Checks their names and shapes and, of a checkpoint, that its model computes what the engine's
    does.

    The user may have changed fields of the engine's model. So each field of a checkpoint is either
    what the engine's first checkpoint said, or what the engine runs. A tree is taken as it is.

    Args:
        source: a tree of the engine's parameters on whatever devices, of its dtypes; one of a
            package that `Family.flax` names; what `--model` takes; or a step that Orbax wrote of
            either tree, sharded however.
        declared: its model, as the checkpoint that it started with says.

    Raises:
        InputError: they are not this model's.
    """
    infos = decoder.param_infos(config.model)

    def loader(tensors: TensorSource, name_map: NameMap) -> Callable[[], Params]:
        load.check(params.flatten(infos), tensors, name_map)
        place = linear.placement(config, meshes.of(config.mesh))
        return functools.partial(load.load_params, infos, tensors, name_map, progress, place)

    if not isinstance(source, str | Path):
        tensors = flax_tree.tensors(config.model, flax_tree.of_arrays(source))
        if tensors is not None:
            return loader(tensors, names.huggingface(config.model))
        return functools.partial(linear.copy_params, config, source, meshes.of(config.mesh))
    path = mirror.path_of(str(source))
    if orbax_step.is_step(path):
        mirror.complete(path)  # Orbax reads it
        step = orbax_step.open_tensors(path)
        tensors = flax_tree.tensors(config.model, flax_tree.of_step(step))
        if tensors is not None:
            return loader(tensors, names.huggingface(config.model))
        return loader(step, names.identity)
    resolved = resolve.resolve(str(source))
    shapes, engine_shapes = (
        {path: info.shape for path, info in params.flatten(declared_infos).items()}
        for declared_infos in (decoder.param_infos(resolved.config), infos)
    )
    if shapes != engine_shapes or resolved.config.family != config.model.family:
        raise InputError(f"{shown(str(source))} is another model than {config.model.name}")
    _check_function(str(source), resolved.config, config.model, declared)
    chosen, checkpoint = weight_formats.choose(
        config, resolved.open(progress), config.engine.kernels.linear
    )
    stored = resolved.config.formats if config.engine.weights is None else chosen.model.formats
    if stored != config.model.formats:
        raise InputError(f"{shown(str(source))} has its weights in other formats than the engine")
    return reader(config, checkpoint, progress)


def read(
    source: Params | str | Path,
    config: Config,
    declared: ModelConfig,
    tokenizer: Tokenizer | None,
    has_classifier: bool,
    progress: Progress | None = None,
) -> NewWeights:
    """Reads weights for a running engine, as `find` takes them, and the head of one that labels
    texts; raises InputError as `find` and `find_classifier` do, or if files hold NaN or infinity.
    """
    classifier = None
    if has_classifier:
        tokens = config.engine.requests.classifier_tokens
        classifier = find_classifier(source, tokenizer, tokens)
    weights = find(source, config, declared, progress)()
    if isinstance(source, str | Path):
        _check_finite(str(source), weights)
    return NewWeights(weights, classifier)


def _check_finite(source: str, weights: Params) -> None:
    """Raises InputError, naming the first leaf, if a number is NaN or infinite; blocks of few bits
    are not looked into.
    """
    leaves = params.flatten(weights, lambda node: isinstance(node, Packed))
    for path, leaf in leaves.items():
        numbers = _numbers(leaf)
        if jnp.issubdtype(numbers.dtype, jnp.floating) and not _all_finite(numbers):
            raise InputError(
                f"{shown(source)}: {path} holds NaN or infinity; give weights that are finite"
            )


def _numbers(leaf: Packed | jax.Array) -> jax.Array:
    return leaf.numbers if isinstance(leaf, Packed) else leaf


@jax.jit
def _all_finite(leaf: jax.Array) -> jax.Array:
    return jnp.isfinite(leaf).all()


def find_classifier(
    source: Params | str | Path, tokenizer: Tokenizer | None, tokens: str | None
) -> Classifier:
    """Returns the head that labels texts of new weights; `tokens` as `classifiers` has them.

    Raises:
        InputError: nothing but parameters is there, or no such head.
    """
    classifier = None
    if isinstance(source, str | Path) and not orbax_step.is_step(mirror.path_of(str(source))):
        checkpoint = resolve.resolve(str(source)).open(None)
        classifier = classifiers.of_checkpoint(checkpoint, tokenizer, tokens)
    if classifier is None:
        raise InputError(
            "new weights of a classifier come with its head, and these have none: name a directory"
        )
    return classifier


def _check_function(
    source: str, model: ModelConfig, engine_model: ModelConfig, declared: ModelConfig
) -> None:
    """Refuses a model that computes something else with the same weights than either of two."""
    valid = [dict(_fields(model)) for model in (engine_model, declared)]
    differences = [
        f"{path} is {shown(value)}, not {shown(valid[0].get(path))}"
        for path, value in _fields(model)
        if not any(path in fields and _is_close(value, fields[path]) for fields in valid)
    ]
    if differences:
        more = f", the first of {len(differences)} differences" if differences[1:] else ""
        raise InputError(
            f"{shown(source)} is another model than {engine_model.name}: {differences[0]}{more}; "
            "a tree of parameters is taken as it is"
        )


def _fields(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The fields that a model's function depends on, by path; of a section its kind, too."""
    if isinstance(node, ModelConfig):
        for field in dataclasses.fields(node):
            if field.name == "pattern":
                yield from _fields(node.layers, "layers")
            elif field.name not in _NO_FUNCTION:
                yield field.name, getattr(node, field.name)
    elif dataclasses.is_dataclass(node):
        yield path, type(node).__name__
        for field in dataclasses.fields(node):
            yield from _fields(getattr(node, field.name), f"{path}/{field.name}")
    elif isinstance(node, tuple) and node and dataclasses.is_dataclass(node[0]):
        for index, item in enumerate(node):
            yield from _fields(item, f"{path}/{index}")
    else:
        yield path, node


def _is_close(value: object, other: object) -> bool:
    """Whether two values are equal up to the rounding of formats that store float32."""
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_is_close, value, other))
    if isinstance(value, float) and isinstance(other, float):
        return math.isclose(value, other, rel_tol=1e-6)
    return bool(value == other)
