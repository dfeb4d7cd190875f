"""What every layer kind answers, and which kinds there are.

A kind is a frozen dataclass with a name: `class Attention(Mixer, name="attention")`. It says what a
layer declares; `layers/` registers the function that applies it.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import ClassVar, Protocol, Self

from configs.cache import CacheSpec
from configs.errors import InputError, shown
from configs.kinds import operations
from configs.kinds.operations import Operation
from configs.kinds.params import Declared, Widths
from configs.kinds.rope import Rope

# What a width or a number of heads may be, whoever names it: a checkpoint's reader asks no more.
MOST_WIDTH = 1 << 24
MOST_MATRICES = 1 << 12  # of a stack: each has a name of its own in some checkpoints


class Kind:
    """A mixer or a feed-forward.

    Attributes:
        name: in files and messages; no other kind has it.
        divided: names of the fields that chips along `model` divide.
    """

    name: ClassVar[str]
    divided: ClassVar[tuple[str, ...]] = ()
    kinds: "ClassVar[dict[str, type[Kind]]]"  # by name

    def __init_subclass__(cls, name: str | None = None, **arguments: object) -> None:
        """Registers a kind under its name; a base class of kinds has none.

        Raises:
            InputError: another kind has that name.
        """
        super().__init_subclass__(**arguments)
        if name is None:
            return
        other = cls.kinds.get(name)
        if other is not None and _written(other) != _written(cls):
            raise InputError(f"{_written(cls)}: {_written(other)} is named {name!r} already")
        cls.name = name
        cls.kinds[name] = cls

    @property
    def to_come(self) -> str | None:
        """What of it is planned and not run yet; None: nothing."""
        return None

    @property
    def parts(self) -> "tuple[Kind, ...]":
        """The kinds that it is made of, whose parameters nest in its own by their names; itself,
        where it is made of none.
        """
        return (self,)

    def changed(self, changes: Mapping[str, object]) -> Self:
        """Itself with those of these fields that it, or what it is made of, has."""
        fields = {name: value for name, value in changes.items() if hasattr(self, name)}
        replace: Callable[..., Self] = dataclasses.replace
        return replace(self, **fields) if fields else self

    def parameters(self, model: Widths) -> Declared:
        """Its parameters by name, matrices [out, in]; a part of it may nest its own.

        Raises:
            InputError: its fields do not go with each other or with the model.
        """
        raise NotImplementedError

    def can_divide(self, chips: int) -> bool:
        """Whether so many chips along `model` can divide it."""
        return all(getattr(self, field) % chips == 0 for field in self.divided)

    def per_chip(self, chips: int) -> Self:
        """Itself on one of `chips` that divide it: sizes that they do not divide are rounded up,
        and what a chip has less than others is zeros.

        Raises:
            InputError: nothing divides this kind yet.
        """
        if not self.divided:
            raise InputError(
                f"{self.name} layers are not divided over chips yet: leave mesh.model=1"
            )
        return self.changed({field: -(-getattr(self, field) // chips) for field in self.divided})

    def shares(self, axis: str, chips: int) -> tuple[range, ...]:
        """What each of `chips` holds of a logical axis: of 'heads', of 'kv_heads' or of the columns
        of 'ffn'; by default equal parts of the first of the `divided` fields.
        """
        return equal_shares(getattr(self, self.divided[0]), chips)

    @property
    def norms_input(self) -> bool:
        """Whether it reads the residual stream as it is, and has norms of its own for that."""
        return False

    @property
    def reads_float32(self) -> bool:
        """Whether it computes with what it reads in float32, apart from products, whose inputs have
        the type of the model's activations.
        """
        return False

    @property
    def experts(self) -> tuple[int, int] | None:
        """(experts, those that a token visits) of a mixture; None: it is none."""
        return None


class Mixer(Kind):
    """What moves information between tokens.

    Attributes:
        cached_heads: name of the field that counts the heads that a cache is divided by.
        cached_products: names of the matrices that make nothing but the cache.
    """

    cached_heads: ClassVar[str | None] = None
    cached_products: ClassVar[tuple[str, ...]] = ()
    kinds: "ClassVar[dict[str, type[Kind]]]" = {}

    @property
    def parts(self) -> "tuple[Mixer, ...]":
        return (self,)

    def cache(self, model: Widths) -> CacheSpec:
        """What a layer keeps of the past."""
        raise NotImplementedError

    def cached(self, model: Widths) -> tuple[tuple[CacheSpec, int], ...]:
        """What it keeps, and over how many chips each part of that can be divided; more of them
        hold copies.
        """
        return tuple((part, self.cache_parts) for part in self.cache(model).parts)

    def check_owner(self, stored: CacheSpec, owner: "Mixer") -> None:
        """Whether a layer that reads an earlier one's cache can read this one, of this mixer.

        Raises:
            InputError: it holds something else.
        """

    def operations(self, model: Widths, stored: CacheSpec) -> tuple[Operation, ...]:
        """What it costs: by default the products with its matrices alone.

        Args:
            model: the widths.
            stored: what the layer reads: its own cache, or its owner's.
        """
        declared = self.parameters(model)
        return operations.products(self.name, model, declared, cached=self.cached_products)

    def can_divide(self, chips: int) -> bool:
        """See `Kind`: more chips than the cache has parts hold equal numbers of copies."""
        parts = self.cache_parts
        is_cached = not self.cached_heads or parts % chips == 0 or chips % parts == 0
        return is_cached and super().can_divide(chips)

    @property
    def rotation(self) -> tuple[Rope, int] | None:
        """Rotary positions of its heads and their width H; None: nothing rotates."""
        return None

    @property
    def query_heads(self) -> int:
        """N, where an implementation of attention (`layers/kernels/attention/`) reads its pages; 0:
        none does.
        """
        return 0

    @property
    def chooses(self) -> bool:
        """Whether a query chooses what it reads of the tokens that it sees."""
        return False

    @property
    def choice_owner(self) -> int | None:
        """The earlier layer whose queries' choice a query reads; None: it reads no other's."""
        return None

    def check_choice_owner(self, owner: "Mixer") -> None:
        """Whether what an earlier layer of this mixer chooses is a choice for this one.

        Raises:
            InputError: it chooses something else.
        """

    @property
    def num_sums(self) -> int:
        """Vectors of width D a token that chips along `model` sum."""
        return 1

    @property
    def num_divided_norms(self) -> int:
        """Norms over heads that chips along `model` divide: each needs the sum of their squares."""
        return 0

    @property
    def num_chosen(self) -> int:
        """Elements that a token chooses by products whose columns chips along `model` divide: they
        are summed before the layer goes on.
        """
        return 0

    @property
    def cache_parts(self) -> int:
        """Chips that its cache can be divided over; more of them hold copies."""
        return getattr(self, self.cached_heads) if self.cached_heads else 1


class FeedForward(Kind):
    """What computes on each token alone."""

    kinds: "ClassVar[dict[str, type[Kind]]]" = {}

    @property
    def num_sums(self) -> int:
        """Vectors of width D a token that chips along `model` sum."""
        return 1

    @property
    def reads_tokens(self) -> bool:
        """Whether it reads ids of tokens, beside what layers made of them."""
        return False

    def met_width(self, model: Widths) -> int:
        """Elements of a token as experts meet it."""
        return model.width

    def per_expert_chip(self, chips: int) -> Self:
        """Itself on one of `chips` along `expert`, which divide a mixture's experts."""
        return self

    def operations(self, model: Widths) -> tuple[Operation, ...]:
        """What it costs: by default the products with its matrices."""
        return operations.products(self.name, model, self.parameters(model))


def check_rotated(kind: Mixer, owner: Mixer) -> None:
    """Refuses queries that rotate otherwise than the keys that they meet.

    Raises:
        InputError: with both ropes.
    """
    if kind.rotation != owner.rotation:
        query, key = (mixer.rotation and mixer.rotation[0] for mixer in (kind, owner))
        raise InputError(f"{kind.name} with rope={query} reads keys that were rotated by {key}")


def equal_shares(whole: int, chips: int) -> tuple[range, ...]:
    """Parts of `whole` things for each chip, in their order; all but the last ones are equal."""
    size = -(-whole // chips)
    return tuple(range(min(whole, c * size), min(whole, (c + 1) * size)) for c in range(chips))


def grouped_shares(num_heads: int, num_groups: int, axis: str, chips: int) -> tuple[range, ...]:
    """What each of `chips` holds of heads in groups, of 'kv_heads' or (any other axis) of 'heads':
    groups with all their heads where there are enough of them, else copies of one group, whose
    heads are divided.
    """
    size = num_heads // num_groups
    if chips <= num_groups:
        unit = 1 if axis == "kv_heads" else size
        groups = equal_shares(num_groups, chips)
        return tuple(range(unit * group.start, unit * group.stop) for group in groups)
    group_of_chip = [chip * num_groups // chips for chip in range(chips)]
    if axis == "kv_heads":
        return tuple(range(group, group + 1) for group in group_of_chip)
    share, ranges = -(-size // (chips // num_groups)), []
    for chip, group in enumerate(group_of_chip):
        start = group * size + min(size, (chip - group_of_chip.index(group)) * share)
        ranges.append(range(start, min(start + share, (group + 1) * size)))
    return tuple(ranges)


def _written(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class Named(Protocol):
    """A kind, or a part of one."""

    @property
    def name(self) -> str: ...


def check_sizes(kind: Named, *names: str, most: int = MOST_WIDTH) -> None:
    """Refuses fields below 1 or above `most`; None is no size.

    Raises:
        InputError: with the kind and the field.
    """
    for field in names:
        size = getattr(kind, field)
        if size is not None and not 1 <= size <= most:
            limit = "at least 1" if size < 1 else f"at most {most}"
            raise InputError(f"{kind.name} {field} is {limit}, not {shown(size)}")


def check_choice(kind: Named, field: str, valid: tuple[object, ...]) -> None:
    """Refuses a value that is none of the valid ones.

    Raises:
        InputError: with the kind, the field and what is valid.
    """
    value = getattr(kind, field)
    if value not in valid:
        raise InputError(f"{kind.name} {field} is {' or '.join(map(repr, valid))}, not {value!r}")


def check_multiple(kind: Named, field: str, divisor: str) -> None:
    """Refuses a field that is no multiple of another.

    Raises:
        InputError: with the kind and both fields.
    """
    size, unit = getattr(kind, field), getattr(kind, divisor)
    if size % unit:
        raise InputError(f"{kind.name} {field}={size} is not a multiple of {divisor}={unit}")


def check_biases(kind: Named, biases: Collection[str], *valid: str) -> None:
    """Refuses biases other than some of the valid ones, each once.

    Raises:
        InputError: with the kind and what is valid.
    """
    if set(biases) - set(valid) or len(set(biases)) != len(biases):
        raise InputError(
            f"{kind.name} biases names each of {', '.join(valid)} at most once, not {biases}"
        )
