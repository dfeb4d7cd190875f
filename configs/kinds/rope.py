"""Rotary positions as data: the base, the share of a head that turns, and how frequencies are
stretched beyond the context a model was trained with. `layers/rope.py` has the formulas.
"""

import dataclasses
import math

from configs.errors import InputError, check_positive


@dataclasses.dataclass(frozen=True)
class Linear:
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): all frequencies / factor."""

    factor: float

    def __post_init__(self) -> None:
        check_positive(self, "rope ", "factor")


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Llama 3.1 (Grattafiori et al. 2024, arXiv 2407.21783): low frequencies / factor, a smooth
    ramp between `low_freq_factor` and `high_freq_factor` turns per `original_context`, or a step
    where these are equal (Llama 4 Scout).
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        check_positive(
            self, "rope ", "factor", "low_freq_factor", "high_freq_factor", "original_context"
        )
        if self.low_freq_factor > self.high_freq_factor:
            raise InputError(
                f"rope low_freq_factor={self.low_freq_factor} is at most "
                f"high_freq_factor={self.high_freq_factor}"
            )


@dataclasses.dataclass(frozen=True)
class Dynamic:
    """Dynamic NTK (emozilla 2023; Peng et al. 2023, arXiv 2309.00071, section 3.3): the base grows
    with the length, once it exceeds `original_context`.

    The length is a token's own position + 1, so that its rotation never changes after it was
    cached: what transformers computes while it decodes token by token.
    """

    factor: float
    original_context: int

    def __post_init__(self) -> None:
        check_positive(self, "rope ", "factor", "original_context")
        if self.factor < 1:
            raise InputError(f"rope factor is at least 1 for dynamic scaling, not {self.factor}")


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): pairs that turn less than `beta_slow` times in
    `original_context` are interpolated, those above `beta_fast` kept, a ramp between.

    Attributes:
        attention_factor: on cos and sin; None is the paper's 0.1 ln(factor) + 1.
        truncate: the ramp's ends are whole pairs.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        turns = "beta_fast", "beta_slow"
        check_positive(self, "rope ", "factor", "original_context", *turns, "attention_factor")


@dataclasses.dataclass(frozen=True)
class LongRope:
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): every pair has a divisor of its own.

    Attributes:
        short, long: divisors, one a rotating pair. The long ones hold for every token of a model
            whose `max_context` exceeds `original_context`, the short ones otherwise: a choice by
            the moment's length would have to rotate cached keys again.
        original_context: tokens of the training context.
        attention_factor: on cos and sin.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    attention_factor: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, "rope ", "original_context", "attention_factor")
        if len(self.short) != len(self.long):
            raise InputError(
                f"longrope has {len(self.short)} short and {len(self.long)} long factors; "
                "one of each a rotating pair"
            )
        if not all(0 < factor < math.inf for factor in self.short + self.long):
            raise InputError("longrope factors are finite numbers above 0")


@dataclasses.dataclass(frozen=True)
class Proportional:
    """p-RoPE (Barbero et al. 2024, arXiv 2410.06205): of a head's pairs only the share that turns
    fastest turns at all, as fast as if all did.

    Attributes:
        share: of the pairs.
        factor: what the frequencies are divided by.
    """

    share: float
    factor: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, "rope ", "share", "factor")
        if self.share > 1:
            raise InputError(f"rope share is at most 1, not {self.share}")


Scaling = Linear | Llama3 | Dynamic | Yarn | LongRope | Proportional


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864).

    Attributes:
        theta: the base of the frequencies.
        scaling: how they are stretched; None: not.
        share: of a head's elements, the first ones, that rotates.
        neighbours: pairs are interleaved, (0, 1), (2, 3), ... instead of an element of each half;
            the turned head has all first ones before all second ones.
    """

    theta: float = 10_000.0
    scaling: Scaling | None = None
    share: float = 1.0
    neighbours: bool = False

    def __post_init__(self) -> None:
        check_positive(self, "rope ", "theta")
        if self.scaling is not None and not isinstance(self.scaling, Scaling):
            raise InputError(
                f"rope scaling is a class of configs/kinds/rope.py, not {self.scaling!r}"
            )
        if isinstance(self.scaling, Yarn) and self.theta <= 1:
            raise InputError(f"yarn needs a theta above 1, not {self.theta}")
        if not 0 < self.share <= 1:
            raise InputError(f"rope share is above 0 and at most 1, not {self.share}")

    def rotating(self, head_width: int) -> int:
        """Elements of a head that rotate.

        Raises:
            InputError: they make no pairs, or not one for each longrope factor.
        """
        width = int(head_width * self.share)
        if width % 2 or not width:
            raise InputError(
                f"head_width is even where attention rotates, not {width}"
                if self.share == 1
                else f"rope share {self.share} of a head of {head_width} is {width}: not pairs"
            )
        if isinstance(self.scaling, LongRope) and len(self.scaling.short) != width // 2:
            raise InputError(
                f"longrope has {len(self.scaling.short)} factors for {width // 2} rotating pairs"
            )
        return width
