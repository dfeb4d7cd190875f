"""Training an adapter in place of a model's own weights (LoRA, Hu et al. 2021, arXiv 2106.09685).

What is trained are the two factors of each module, by the name that transformers gives it. The
decoder multiplies by them as an engine does that serves the adapter. The model below may have its
weights in few bits (QLoRA, Dettmers et al. 2023, arXiv 2305.14314): they stay so in memory.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from configs import adapters, precision
from configs.engine import Config
from configs.errors import InputError
from configs.kinds.params import ParamInfo
from configs.model import ModelConfig
from configs.precision import FORMATS
from configs.recipes.training import Recipe
from inference.adapters import peft_directory
from inference.adapters.modules import Module, modules_of
from inference.checkpoints import new_directory, weight_formats
from inference.checkpoints.checkpoint import Checkpoint
from inference.checkpoints.load import Progress
from inference.training.losses import Model
from layers import decoder, params
from layers.kernels.linear import adapted
from layers.kernels.linear import api as linear
from layers.params import Params
from sharding import mesh as meshes
from sharding import rules
from sharding.rules import Values

DOWN, UP = "down", "up"  # [R, D] and [F, R] of a module

_LINEAR = "reference"  # products that have derivatives


def with_base(recipe: Recipe, checkpoint: Checkpoint, weights: str | None) -> Recipe:
    """The recipe whose model has the formats of its checkpoint, or those that `weights` asks for,
    as `engine.weights` does. Raises InputError as `weight_formats.choose`, or if no gradient goes
    through products with one of them.
    """
    model = dataclasses.replace(recipe.model, formats=checkpoint.config.formats)
    config = Config(model).with_engine(weights=weights, linear=_LINEAR)
    config, _ = weight_formats.choose(config, checkpoint, None)
    formats = {name for _, of_parts in config.model.formats for name in of_parts}
    valid = [name for name in precision.ROW_FORMATS if FORMATS[name].activations is None]
    if rest := {name for name in formats if FORMATS[name].is_quantized} - {*valid}:
        raise InputError(
            f"{model.name} has weights in {', '.join(sorted(rest))}, through whose products no "
            f"gradient goes; adapters are trained above bfloat16, float32, {', '.join(valid)}"
        )
    return dataclasses.replace(recipe, model=config.model)


def modules(config: ModelConfig, endings: tuple[str, ...] = ()) -> dict[str, Module]:
    """The modules that are adapted, by name: all, or those whose names end so. Raises InputError if
    there are none of an ending.
    """
    chosen = modules_of(config)
    ends = {name.rpartition(".")[2] for name in chosen}
    for ending in endings:
        if ending not in ends:
            valid = ", ".join(sorted(ends))
            raise InputError(
                f"training.lora_modules: {config.name} has no module {ending}; valid: {valid}"
            )
    return {
        name: module
        for name, module in chosen.items()
        if not endings or name.rpartition(".")[2] in endings
    }


def masters(recipe: Recipe) -> Params:
    """Float32 factors that change nothing yet: A is drawn, as `peft` does it, and B is 0."""
    generator, rank = np.random.default_rng(recipe.training.seed), recipe.training.lora_rank
    mesh = meshes.of(recipe.mesh)
    where = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    factors = {}
    for name, module in modules(recipe.model, recipe.training.lora_modules).items():
        rows, columns = module.shape
        bound = 1 / math.sqrt(columns)  # of the uniform initialization of a linear layer
        factors[name] = {
            DOWN: generator.uniform(-bound, bound, (rank, columns)).astype(np.float32),
            UP: np.zeros((rows, rank), np.float32),
        }
    return jax.tree.map(lambda x: jax.device_put(x, where, may_alias=False), factors)


def base(recipe: Recipe, checkpoint: Checkpoint, progress: Progress | None = None) -> Params:
    """The model's own parameters in their declared formats, which are not trained."""
    mesh = meshes.of(recipe.mesh)
    convert = linear.placement(Config(recipe.model).with_engine(linear=_LINEAR))

    def place(path: str, info: ParamInfo, values: Values) -> linear.Leaf:
        leaf = convert(path, info, values)
        return leaf if mesh is None else jax.device_put(leaf, rules.layouts(path, info, leaf, mesh))

    return checkpoint.exact().load_params(decoder.param_infos(recipe.model), progress, place)


def model(recipe: Recipe) -> Model:
    """Of the factors, and of the parameters in `base`, those that the decoder computes with."""
    stacks, dtype = _stacks(recipe), recipe.model.dtype
    infos = adapters.adaptable(recipe.model)

    def with_adapter(factors: Params, frozen: object) -> Params:
        assert isinstance(frozen, dict)
        pairs = {path: (a.astype(dtype), b.astype(dtype)) for path, (a, b) in stacks(factors)}
        return adapted.bound(jax.lax.stop_gradient(frozen), pairs, infos)

    return with_adapter


def merged(recipe: Recipe) -> Model:
    """Of the factors, and of the parameters in `base`, a model's own that hold the sums of both,
    added in float32.
    """
    stacks, infos = _stacks(recipe), decoder.param_infos(recipe.model)
    ends = {path: adapters.module_ends(i) for path, i in adapters.adaptable(recipe.model).items()}

    def with_sums(factors: Params, frozen: object) -> Params:
        assert isinstance(frozen, dict)
        leaves = params.flatten(frozen)
        for path, (down_XD, up_FR) in stacks(factors):
            products = (
                rows_FR @ down_RD
                for rows_FR, down_RD in zip(
                    jnp.split(up_FR, ends[path][:-1]),
                    jnp.split(down_XD, len(ends[path])),
                    strict=True,
                )
            )
            sum_FD = leaves[path].astype(jnp.float32) + jnp.concatenate([*products])
            leaves[path] = sum_FD.astype(leaves[path].dtype)
        return params.unflatten(infos, leaves)

    return with_sums


def _stacks(
    recipe: Recipe,
) -> Callable[[Params], Iterable[tuple[str, tuple[jax.Array, jax.Array]]]]:
    """Of the factors, A and B of each matrix by path, float32 [P R, D] and [F, R], of a module's
    own rows and ranks.
    """
    training = recipe.training
    infos = adapters.adaptable(recipe.model)
    parts = modules(recipe.model, training.lora_modules)
    scale, rank = training.lora_alpha / training.lora_rank, training.lora_rank

    def stacks(factors: Params) -> Iterable[tuple[str, tuple[jax.Array, jax.Array]]]:
        by_path: dict[str, tuple[jax.Array, jax.Array]] = {}
        for name, module in parts.items():
            down_RD, up_FR = factors[name][DOWN], factors[name][UP] * scale
            for place, rows in module.places:
                info = infos[place.path]
                num_ranks = adapters.num_modules(info) * rank
                empty = jnp.zeros((num_ranks, info.shape[1])), jnp.zeros((info.shape[0], rank))
                down, up = by_path.get(place.path, empty)
                for nth in place.modules:
                    down = down.at[nth * rank : (nth + 1) * rank].set(down_RD)
                by_path[place.path] = down, up.at[place.rows].set(up_FR[rows])
        return by_path.items()

    return stacks


def write(factors: Params, recipe: Recipe, base_name: str, output: Path) -> None:
    """Writes an adapter into a new directory, as the `peft` package does. Raises InputError as
    `new_directory.create`.
    """
    values = {
        name: (np.asarray(both[DOWN]), np.asarray(both[UP])) for name, both in factors.items()
    }
    with new_directory.create(output) as folder:
        peft_directory.write(folder, values, base_name, recipe.training.lora_alpha)
