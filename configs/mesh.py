"""How one model is spread over chips."""

import dataclasses
import math

from configs.errors import InputError
from configs.model import ModelConfig

MOST_CHIPS = 1_000_000  # along an axis, and replicas: beyond any installation


@dataclasses.dataclass(frozen=True)
class Mesh:
    """Chips of one replica along each axis.

    Attributes:
        data: groups that hold the same weights and different sequences, and step together.
        model: chips that divide heads and feed-forward columns of each layer.
        expert: chips that divide the experts of each mixture; for all else each of them works for
            sequences of its own, like `data`.
        context: chips that divide the cached tokens of each sequence: chip c has those whose
            position is c modulo this number. What else `model` divides, heads aside, is divided
            along both axes.
    """

    data: int = 1
    model: int = 1
    expert: int = 1
    context: int = 1

    @property
    def num_chips(self) -> int:
        """Chips of one replica."""
        return self.data * self.expert * self.group_chips

    @property
    def group_chips(self) -> int:
        """Chips that work for the same sequences: parts of feed-forwards and of the vocabulary."""
        return self.model * self.context

    @property
    def num_groups(self) -> int:
        """Parts that the sequences of a step are divided into."""
        return self.data * self.expert

    def along(self, axes: str) -> int:
        """Chips along an axis, or along several: 'model,context'."""
        return math.prod(getattr(self, axis) for axis in axes.split(","))

    def __str__(self) -> str:
        """As `parse` reads it: 'model=2', or 'one chip'."""
        sizes = [f"{axis}={size}" for axis, size in dataclasses.asdict(self).items() if size > 1]
        return ",".join(sizes) or "one chip"

    def is_even(self, config: ModelConfig) -> bool:
        """Whether chips along `model` and `context` get equal parts of it, none of them zeros."""
        chips, heads = self.model, config.cached_heads
        return (
            all(size % chips == 0 for size in config.divided)
            and all(cached % chips == 0 or chips % cached == 0 for cached in heads)
            and all(size % self.group_chips == 0 for size in columns(config))
        )

    def check(self, config: ModelConfig) -> None:
        """Whether the model can be divided so.

        Raises:
            InputError: an axis is below 1, or does not divide what it would split.
        """
        for axis in ("data", "model", "expert", "context"):
            if getattr(self, axis) < 1:
                raise InputError(f"mesh axis {axis} is at least 1, not {getattr(self, axis)}")
            if getattr(self, axis) > MOST_CHIPS:
                raise InputError(f"mesh axis {axis} is at most {MOST_CHIPS} chips")
        mixers = {layer.mixer for layer in config.pattern}
        ffns = {layer.ffn for layer in config.pattern if layer.ffn}

        def can_divide(chips: int) -> bool:
            parts = chips * self.context
            return all(kind.can_divide(chips) for kind in mixers) and all(
                kind.can_divide(parts) for kind in ffns
            )

        if not can_divide(self.model):
            smallest = min(config.divided or config.cached_heads)
            valid = [n for n in range(1, smallest + 1) if can_divide(n)]
            at = f" with context={self.context}" if self.context > 1 else ""
            raise InputError(
                f"mesh {self} does not divide the heads and feed-forward widths "
                f"{sorted(config.divided)} and the cached heads {sorted(set(config.cached_heads))} "
                f"of {config.name}; valid{at}: {_ranges(valid) or 'none'}"
            )
        if self.context > 1 and (reason := _undivided(config)):
            raise InputError(
                f"mesh context={self.context}: {config.name} {reason}, which is not divided by "
                "position yet; valid: context=1"
            )
        experts = {num_experts for num_experts, _ in config.experts}
        if self.expert > 1 and not experts:
            raise InputError(f"mesh expert={self.expert}: {config.name} has no experts to divide")
        shared = math.gcd(*experts)
        if experts and shared % self.expert:
            valid = [n for n in range(1, shared + 1) if shared % n == 0]
            raise InputError(
                f"mesh expert={self.expert} does not divide the {shared} experts of "
                f"{config.name}; valid: {', '.join(map(str, valid))}"
            )


def columns(config: ModelConfig) -> set[int]:
    """Sizes of feed-forwards, which chips along `model` and `context` divide."""
    ffns = {layer.ffn for layer in config.pattern if layer.ffn}
    return {getattr(ffn, field) for ffn in ffns for field in ffn.divided} - {0}


def _undivided(config: ModelConfig) -> str | None:
    """What a model caches that chips along `context` do not divide."""
    specs = [spec for spec in config.cache_specs if spec.owner is None]
    reasons = {
        "chooses tokens by an indexer": any(spec.index_width for spec in specs),
        "chooses pages by their extremes": any(spec.has_extremes for spec in specs),
        "caches entries of several tokens": any(
            spec.stride > 1 or spec.beside is not None for spec in specs
        ),
        "caches states alone": not any(spec.elements_per_token for spec in specs),
    }
    return next((reason for reason, is_true in reasons.items() if is_true), None)


def check_context(mesh: Mesh, has_tree: bool, has_budgets: bool, prefill_chips: int) -> None:
    """Whether an engine's features go with cached tokens that chips divide.

    Raises:
        InputError: one knows where tokens lie.
    """
    reasons = {
        "engine.drafts: a tree's branches lie": has_tree,
        "engine.requests.prompt_budgets: pages that a prompt gives up lie": has_budgets,
        f"prefill.chips={prefill_chips}: pages that move between chips lie": prefill_chips > 0,
    }
    for reason, is_true in reasons.items():
        if is_true:
            raise InputError(
                f"{reason} whole on one chip, and mesh.context={mesh.context} divides them: leave "
                "one of the two out"
            )


def _ranges(numbers: list[int]) -> str:
    """'1 to 9' or '1, 2, 4': rising numbers from 1."""
    is_whole = len(numbers) > 2 and numbers == list(range(1, len(numbers) + 1))
    return f"1 to {numbers[-1]}" if is_whole else ", ".join(map(str, numbers))


ONE_CHIP = Mesh()


def parse(text: str) -> Mesh:
    """The mesh that 'data=2,model=4' names.

    Raises:
        InputError: another form, an unknown axis, or a size that is no whole number.
    """
    sizes: dict[str, int] = {}
    names = [field.name for field in dataclasses.fields(Mesh)]
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        is_size = size.isascii() and size.isdigit() and len(size) < 16
        if axis not in names or axis in sizes or not is_size:
            raise InputError(
                f"a mesh is like data=2,model=4 with the axes {', '.join(names)}, not {text[:80]!r}"
            )
        sizes[axis] = int(size)
    return Mesh(**sizes)
