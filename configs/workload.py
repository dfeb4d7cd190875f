"""What a benchmark asks of the engine: how many requests, when they come, how long they are."""

import dataclasses
import math
import random
from collections.abc import Callable

from configs.errors import InputError

KINDS = ("closed", "poisson", "trace", "agents")
MOST_TOKENS = 1 << 20  # of one draw: no distribution has a longer tail

_TEXTS = "fixed:N, uniform:LOW:HIGH, lognormal:MEAN:SIGMA or lognormal:MEAN:SIGMA:MOST"


def _check_range(name: str, low: int, high: int) -> None:
    if not 1 <= low <= high <= MOST_TOKENS:
        raise InputError(
            f"{name} lengths are from 1 to {MOST_TOKENS} tokens and in order, not "
            f"{low if low == high else f'{low} to {high}'}"
        )


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Always as many tokens."""

    tokens: int

    def __post_init__(self) -> None:
        _check_range("fixed", self.tokens, self.tokens)

    @property
    def mean(self) -> float:
        return self.tokens

    def draw(self, rng: random.Random) -> int:
        return self.tokens


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Every length from `low` to `high`, equally often."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check_range("uniform", self.low, self.high)

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclasses.dataclass(frozen=True)
class LogNormal:
    """Many short ones and a long tail, as people's texts are.

    Attributes:
        mean: of the lengths, not of their logarithms; before they are cut to [1, most].
        sigma: standard deviation of the logarithms.
        most: longer draws become this long.
    """

    mean: float
    sigma: float
    most: int = MOST_TOKENS

    def __post_init__(self) -> None:
        _check_range("lognormal", 1, self.most)
        if not 1 <= self.mean <= self.most:
            raise InputError(f"lognormal's mean is from 1 to {self.most} tokens, not {self.mean}")
        if not 0 <= self.sigma <= 4:
            raise InputError(f"lognormal's sigma is from 0 to 4, not {self.sigma}")

    def draw(self, rng: random.Random) -> int:
        drawn = rng.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return max(1, min(self.most, round(drawn)))


Lengths = Fixed | Uniform | LogNormal

# Mean lengths of the conversations of ShareGPT (Kwon et al. 2023, arXiv 2309.06180, figure 11) and
# a spread like theirs.
SHAREGPT_PROMPT = LogNormal(161, 1.0)
SHAREGPT_OUTPUT = LogNormal(338, 1.0)
NAMED: dict[str, Lengths] = {
    "sharegpt-prompt": SHAREGPT_PROMPT,
    "sharegpt-output": SHAREGPT_OUTPUT,
}


def parse_lengths(text: str) -> Lengths:
    """A distribution as it is written: 'fixed:150', 'uniform:10:200', 'lognormal:150:1.0'.

    Raises:
        InputError: it is none.
    """
    if text in NAMED:
        return NAMED[text]
    name, *numbers = text.split(":")
    kinds: dict[tuple[str, int], Callable[..., Lengths]] = {
        ("fixed", 1): Fixed,
        ("uniform", 2): Uniform,
        ("lognormal", 2): LogNormal,
        ("lognormal", 3): LogNormal,
    }
    kind = kinds.get((name, len(numbers)))
    try:
        if kind is None:
            raise ValueError
        is_real = kind is LogNormal  # its mean and sigma may be fractions, nothing else
        values = [(float if is_real and n < 2 else int)(number) for n, number in enumerate(numbers)]
    except ValueError:
        names = ", ".join(NAMED)
        raise InputError(f"lengths are {_TEXTS}, or {names}; not {text[:80]!r}") from None
    return kind(*values)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests and when they come. Equal workloads are equal requests.

    Attributes:
        kind: 'closed' (`concurrency` requests at any time, the next as one ends), 'poisson' (`rate`
            requests a second on average, whatever the engine makes of them), 'trace' (as a file
            says) or 'agents' (as 'closed', of sessions with several turns, each of which begins
            with all that came before, and with tools that run between them).
        num_requests: how many, of agents sessions; of a trace, the first as many, None for all.
        rate: requests a second of 'poisson'.
        burstiness: of 'poisson': the times between requests have a gamma distribution of this
            shape; 1 is Poisson's, less comes in bursts, more is regular.
        concurrency: of 'closed' and 'agents'; None: all at once.
        prompt: lengths of prompts, besides the shared prefix; of agents those of first turns.
        output: tokens to generate.
        prefix_tokens: length of a prefix that some prompts share.
        prefix_share: the share of requests that begin with it.
        num_prefixes: different ones, which these requests have in turn.
        trace: path of the JSONL file of 'trace'.
        turns: of an agent's session.
        result: tokens of a tool's result, with which each further turn ends.
        tool_s: mean seconds that a tool runs, of an exponential distribution.
        seed: of everything drawn.
    """

    kind: str = "closed"
    num_requests: int | None = 64
    rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None
    prompt: Lengths = SHAREGPT_PROMPT
    output: Lengths = SHAREGPT_OUTPUT
    prefix_tokens: int = 0
    prefix_share: float = 0.0
    num_prefixes: int = 1
    trace: str | None = None
    turns: Lengths | None = None
    result: Lengths = Fixed(256)
    tool_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"workload.kind is one of {', '.join(KINDS)}, not {self.kind!r}")
        self._check_belongs("rate", "poisson", is_needed=True)
        self._check_belongs("concurrency", "closed", "agents", is_needed=False)
        self._check_belongs("trace", "trace", is_needed=True)
        self._check_belongs("turns", "agents", is_needed=True)
        if not 0 <= self.tool_s < math.inf:
            raise InputError(f"workload.tool_s is a number of seconds from 0, not {self.tool_s}")
        if self.num_requests is None and self.kind != "trace":
            raise InputError(f"workload.num_requests is needed where kind is {self.kind!r}")
        for name in ("num_requests", "concurrency", "num_prefixes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"workload.{name} is at least 1, not {value}")
        if self.rate is not None and not 0 < self.rate < math.inf:  # NaN fails too
            raise InputError(
                f"workload.rate is a number of requests a second above 0, not {self.rate}"
            )
        if self.burstiness != 1 and self.kind != "poisson":
            raise InputError(
                f"workload.burstiness goes with kind 'poisson', not with {self.kind!r}"
            )
        if not 0.001 <= self.burstiness <= 1000:
            raise InputError(f"workload.burstiness is from 0.001 to 1000, not {self.burstiness}")
        if not 0 <= self.prefix_tokens <= MOST_TOKENS:
            raise InputError(
                f"workload.prefix_tokens is from 0 to {MOST_TOKENS}, not {self.prefix_tokens}"
            )
        if not 0 <= self.prefix_share <= 1:
            raise InputError(f"workload.prefix_share is from 0 to 1, not {self.prefix_share}")

    @property
    def expected_tokens(self) -> int | None:
        """Tokens of a request at its end, on average; None where a trace says."""
        if self.kind == "trace":
            return None
        shared = self.prefix_share * self.prefix_tokens
        later = 0.0 if self.turns is None else self.turns.mean - 1
        return math.ceil(
            shared + self.prompt.mean + self.output.mean
            + later * (self.result.mean + self.output.mean)
        )  # fmt: skip

    def _check_belongs(self, name: str, *kinds: str, is_needed: bool) -> None:
        is_given, kind = getattr(self, name) is not None, " or ".join(map(repr, kinds))
        if is_given and self.kind not in kinds:
            raise InputError(f"workload.{name} goes with kind {kind}, not with {self.kind!r}")
        if is_needed and not is_given and self.kind in kinds:
            raise InputError(f"workload.{name} is needed where kind is {kind}")
