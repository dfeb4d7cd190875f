"""Which function applies a layer kind, and what it is told of the step."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar, cast

import jax

from configs.cache import CacheSpec, PageFormat
from configs.errors import InputError
from configs.kinds.kind import FeedForward, Kind, Mixer
from layers.kv_cache import CacheLeaf
from layers.ragged import Ragged

K = TypeVar("K", bound=Kind)
Apply = TypeVar("Apply")
Leaf = CacheLeaf | None  # None: there is no cache, and no earlier layer's keys


class Chosen(NamedTuple):
    """A leaf beside what the queries of a step choose to read, where another layer chooses for
    this one, or this one for others (`Mixer.choice_owner`).

    Attributes:
        choices: arrays of each rectangle, as the mixer has them; None where its queries read all.
    """

    leaf: Leaf
    choices: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class StepContext:
    """Inputs of a layer besides its parameters, tokens and cache leaf.

    Attributes:
        angles: cos and sin of the layer's RoPE, float32 [T, X] each for X rotating pairs; None
            where it has none.
        spec: of the cache leaf: the layer's own `CacheSpec`, a sharer's is its owner's.
        group: index of the leaf's page group in `Rectangle.tables`.
        is_owner: False where the cache leaf belongs to an earlier layer (read it, write nothing).
        deterministic: a token's bits may depend on its own history only.
        attention: the chosen implementation of attention over pages (`api.choose`).
        page_format: of the leaf's pages, if it has any.
        group_beside: index of the page group of `CacheSpec.beside`.
        tokens_T: i32[T] token ids, where a part of the layer reads them.
        is_choice_owner: later layers read what the layer's queries choose: the mixer returns
            `Chosen`.
    """

    ragged: Ragged
    angles: tuple[jax.Array, jax.Array] | None
    spec: CacheSpec
    group: int
    is_owner: bool
    deterministic: bool
    attention: str = "reference"
    page_format: PageFormat | None = None
    group_beside: int = 0
    is_choice_owner: bool = False
    tokens_T: jax.Array | None = None


# (params, config, kind, x_TD, leaf, context) -> (float32 [T, D], leaf). The leaf is the cache's;
# without a cache None, and for layers that share keys what their owner returned. Layers that read
# an earlier one's choice get `Chosen` in its place, which that layer returns.
ApplyMixer = Callable[..., tuple[jax.Array, Leaf | Chosen]]


class RoutedTokens(NamedTuple):
    """Tokens routed to each expert, in one mixture [E] or in all of a model's [L, E]: their i32
    number, and the float32 mean over valid tokens of the router's scores, which sum to 1.
    """

    num_tokens: jax.Array
    share: jax.Array


# (params, config, kind, x_TD, context) -> (float32 [T, D], routed tokens: None without experts)
ApplyFeedForward = Callable[..., tuple[jax.Array, RoutedTokens | None]]

_MIXERS: dict[type[Mixer], ApplyMixer] = {}
_FEED_FORWARDS: dict[type[FeedForward], ApplyFeedForward] = {}


def register(kind: type[Kind], apply: ApplyMixer | ApplyFeedForward) -> None:
    """Names the function that applies a kind."""
    if issubclass(kind, Mixer):
        _MIXERS[kind] = cast("ApplyMixer", apply)
    elif issubclass(kind, FeedForward):
        _FEED_FORWARDS[kind] = cast("ApplyFeedForward", apply)


def apply_mixer(kind: Mixer) -> ApplyMixer:
    """Returns the function that applies a mixer; raises InputError if there is none yet."""
    return _find(kind, "mixer", _MIXERS)


def apply_feed_forward(kind: FeedForward) -> ApplyFeedForward:
    """Returns the function that applies a feed-forward; raises InputError if there is none yet."""
    return _find(kind, "ffn", _FEED_FORWARDS)


def _find(kind: K, part: str, functions: Mapping[type[K], Apply]) -> Apply:
    if kind.to_come is not None:
        raise InputError(
            f"the {part} {kind.name!r} with {kind.to_come} is planned but does not run yet"
        )
    if type(kind) not in functions:
        runs = ", ".join(runnable.name for runnable in functions)
        raise InputError(f"the {part} {kind.name!r} is planned but does not run yet; {runs} do")
    return functions[type(kind)]
