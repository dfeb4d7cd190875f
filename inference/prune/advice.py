"""Which smaller shape of a model to train, before anything is measured: predicted steps and bytes
of shapes, beside those of the parent in fewer bits, which need no training.
"""

import dataclasses
import shlex
from collections.abc import Mapping
from pathlib import Path

from configs.errors import InputError
from configs.model import ModelConfig
from inference.planner import acceptance, weights
from inference.planner.acceptance import Drafted
from inference.planner.cost import Precision
from inference.planner.deployment import Deployment
from inference.prune import shapes
from inference.prune.axes import LAYERS, WIDTH
from inference.prune.budget import Budget, Shape, within

_FEWER_BITS = "int8", "int4"
_DRAFT_SHARES = 0.5, 0.25, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002  # about, without embeddings
_COUNTS = LAYERS, "kv_heads", "latent_heads", "state_heads"  # axes that a draft has less of
_WIDTHS = WIDTH, "ffn_width", "expert_width", "state_channels"  # the same, in steps of a grid
_GRID = 32  # steps that a width is divided into


@dataclasses.dataclass(frozen=True)
class Option:
    """A model that could be served.

    Attributes:
        name: the parent, or a child by what it was sized for.
        weights: the format that its weights are stored in.
        widths: of the axes that a child changes.
        parameters: without those of embeddings.
        weight_bytes: all weights.
        step_s: predicted seconds of a decode step of one sequence.
        meets: whether it is within the budget; of a share of parameters, whether its weights have
            at most the bytes of the child's.
    """

    name: str
    weights: str
    widths: Mapping[str, int]
    parameters: int
    weight_bytes: float
    step_s: float
    meets: bool


@dataclasses.dataclass(frozen=True)
class ShapeAdvice:
    """Options for a budget, and what to run.

    Attributes:
        budget: the flag that says it.
        options: the parent, the child for the budget, and both at the bytes of fewer bits.
        is_quantizing_enough: whether the parent in fewer bits `meets` it.
        command: makes the child.
    """

    budget: str
    options: tuple[Option, ...]
    is_quantizing_enough: bool
    command: str


@dataclasses.dataclass(frozen=True)
class Draft:
    """A child as draft of its parent.

    Attributes:
        widths: of the axes that it changes.
        drafted: acceptance, drafts and speed.
        command: makes the child.
    """

    widths: Mapping[str, int]
    drafted: Drafted
    command: str


def advise(name: str, config: ModelConfig, budget: Budget) -> ShapeAdvice:
    """Returns the shape that a budget allows, with the parent and its fewer bits.

    Of shapes within a latency the one with most parameters, of shapes with so many parameters the
    one with the shortest step. Only shapes that a `config.json` of the family says are tried.

    Args:
        name: of the model, in the command.

    Raises:
        InputError: the parent meets the budget as it is, or no shape does.
    """
    if config.formats:
        raise InputError(f"{budget.flag}: {name} is quantized; name the model that it was made of")
    budget.check(config)
    child = _best(config, budget)
    most_bytes = Deployment(child.config, budget.hardware).weight_bytes

    def option(label: str, shape: Shape | None, format: str | None) -> Option:
        model = config if shape is None else shape.config
        precision = Precision.of(model)
        if format is not None:
            stored = weights.fitting(model, format)
            precision = dataclasses.replace(precision, weights=stored)
        deployment = Deployment(model, budget.hardware, precision)
        context = min(budget.context, model.max_context - 1)
        step_s, num_bytes = deployment.step_seconds(1, context), deployment.weight_bytes
        meets = num_bytes <= most_bytes if budget.latency_s is None else step_s <= budget.latency_s
        return Option(
            label, precision.weights.name, {} if shape is None else shape.widths,
            shapes.num_parameters(model), num_bytes, step_s, meets,
        )  # fmt: skip

    options = [option("parent", None, None), option("child", child, None)]
    enough = False
    for format in _FEWER_BITS:
        try:
            quantized = option("parent", None, format)
        except InputError:  # its rows have no whole groups
            continue
        options.append(quantized)
        enough = enough or quantized.meets
        try:
            equal = Budget(
                budget.hardware, weight_bytes=quantized.weight_bytes, context=budget.context
            )
            options.append(option(f"child of {format} bytes", _best(config, equal), None))
        except InputError:  # none is that small
            continue
    return ShapeAdvice(budget.flag, tuple(options), enough, _command(name, child.widths))


def drafts(
    name: str, deployment: Deployment, batch: int, context: int, is_greedy: bool
) -> list[Draft]:
    """Returns children of several sizes as drafts of their parent, the largest first; those that
    the chips have no room for, or whose parts do not go with each other, are left out.

    All axes shrink alike: where one alone did, a small draft would be deep or have many heads.

    Args:
        name: of the model, in commands.
    """
    config, results = deployment.config, []
    if config.formats:  # quantized: nothing is pruned of it
        return []
    sizes = shapes.sizes(config)
    grains = dict.fromkeys(_COUNTS, 1) | {
        axis: max(sizes[axis] // _GRID, 1) for axis in _WIDTHS if axis in sizes
    }
    for share in _DRAFT_SHARES:
        scale = share ** (1 / 3)  # models grow in depth, width and width of feed-forwards
        widths = {
            axis: max(round(sizes[axis] * scale / grain), 1) * grain
            for axis, grain in grains.items()
            if axis in sizes
        }
        try:
            shapes.check(config, widths)
            model = shapes.pruned(config, widths, _spread(config, widths[LAYERS]))
            drafted = acceptance.of_model(deployment, model, batch, context, is_greedy)
        except InputError:  # groups of heads that a mesh or a width would divide
            continue
        if drafted is not None:
            results.append(Draft(widths, drafted, f"{_command(name, widths)} --native"))
    return results


def _command(model: str, widths: Mapping[str, int]) -> str:
    sizes = ",".join(f"{name}={size}" for name, size in widths.items())
    output = f"{Path(model).name}-pruned"
    options = f"--model={model}", "--text=FILE", f"--widths={sizes}", f"--output={output}"
    return shlex.join(["python", "-m", "scripts.prune", *options])


def _best(config: ModelConfig, budget: Budget) -> Shape:
    def can_be(widths: Mapping[str, int], layers: tuple[int, ...]) -> bool:
        return shapes.refusal(config, widths, layers) is None

    def staying(count: int) -> tuple[int, ...]:
        return _spread(config, count)

    matches = within(config, budget, {}, staying, can_be, most_axes=1)
    if budget.latency_s is not None:
        return max(matches, key=lambda shape: shapes.num_parameters(shape.config))
    return min(matches, key=lambda shape: budget.step_s(shape.config))


def _spread(config: ModelConfig, count: int) -> tuple[int, ...]:
    """Layers that stay where none matters more: evenly spread ones leave."""
    owners = {spec.owner for spec in config.cache_specs} | config.choice_owners
    free = [index for index in range(config.num_layers) if index not in owners]
    leaving = config.num_layers - count
    if leaving > len(free):
        raise InputError(f"--widths=layers={count}: layers that others read must stay")
    gone = {free[(2 * nth + 1) * len(free) // (2 * leaving)] for nth in range(leaving)}
    return tuple(index for index in range(config.num_layers) if index not in gone)
