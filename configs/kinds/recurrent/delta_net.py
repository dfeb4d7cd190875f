"""Linear attention by the delta rule: a matrix of fixed size a head instead of a growing cache."""

import dataclasses
import functools

from configs import cache
from configs.cache import CacheSpec
from configs.errors import InputError, check_positive
from configs.kinds import operations
from configs.kinds.kind import Mixer, check_choice, check_multiple, check_sizes, grouped_shares
from configs.kinds.operations import Operation
from configs.kinds.params import Declaration, Declared, ParamInfo, Widths


@dataclasses.dataclass(frozen=True)
class DeltaNet(Mixer, name="delta_net"):
    """Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464) and Kimi Delta Attention (Kimi Team 2025,
    arXiv 2510.26692): a head's state decays, and a token corrects what it says of its key.

    Attributes:
        num_heads: N, of values; `num_key_heads` of queries and keys, each of which so many
            neighbours share.
        key_width, value_width: M and H of the axis key.
        conv_width: taps of the causal convolution of queries, keys and values.
        decay_rank: elements between a token and its decays, one a key channel; None: one a head,
            projected at once.
        gate_rank: elements between a token and the gates of what leaves; None: they are projected
            at once.
        gate: what makes a gate of a number: 'silu' or 'sigmoid'.
        most_beta: how much of the difference between its value and what the state says a token
            writes at most; above 1 the state's eigenvalues may be negative (Grazzi et al. 2024,
            arXiv 2411.12537).
        norm_eps: of the norm of each head that leaves; None: the model's.
    """

    divided = ("num_heads",)
    cached_heads = "num_heads"

    num_heads: int
    num_key_heads: int
    key_width: int
    value_width: int
    conv_width: int = 4
    decay_rank: int | None = None
    gate_rank: int | None = None
    gate: str = "silu"
    most_beta: float = 1.0
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        sizes = "num_heads", "num_key_heads", "key_width", "value_width", "conv_width"
        check_sizes(self, *sizes, "decay_rank", "gate_rank")
        check_multiple(self, "num_heads", "num_key_heads")
        if self.conv_width < 2:
            raise InputError(f"delta_net conv_width is at least 2, not {self.conv_width}")
        check_choice(self, "gate", ("silu", "sigmoid"))
        if not 0 < self.most_beta <= 2:
            raise InputError(
                f"delta_net most_beta is above 0 and at most 2, beyond which states grow, not "
                f"{self.most_beta}"
            )
        check_positive(self, "delta_net ", "norm_eps")

    @property
    def inner_width(self) -> int:
        """Elements of all heads' values."""
        return self.num_heads * self.value_width

    @property
    def channels(self) -> tuple[int, int, int]:
        """Of the convolution: values, and each key head's queries and keys."""
        keys = self.num_key_heads * self.key_width
        return self.inner_width, keys, keys

    @property
    def gates(self) -> dict[str, int]:
        """Rows of what is projected at once: gates of what leaves, betas, and decays."""
        rows = {"gate": self.inner_width, "beta": self.num_heads, "decay": self.num_heads}
        ranks = {"gate": self.gate_rank, "decay": self.decay_rank}
        return {name: count for name, count in rows.items() if ranks.get(name) is None}

    @property
    def ranks(self) -> dict[str, int]:
        """Rows of what is projected in two steps, of the first."""
        ranks = {"decay": self.decay_rank, "gate": self.gate_rank}
        return {name: rank for name, rank in ranks.items() if rank is not None}

    def parameters(self, model: Widths) -> Declared:
        """What is convolved, [values, queries, keys]; what is projected at once, and in two steps;
        the convolution; of each head a decay rate and (or of each key channel) a bias of what it is
        multiplied with; the norm of a head, and the way out.
        """
        D, N, inner, dtype = model.width, self.num_heads, self.inner_width, model.dtype
        declare = functools.partial(ParamInfo, stacked=self.channels, kv_heads=self.num_key_heads)
        rows, gates = sum(self.channels), self.gates.values()
        decays = N if self.decay_rank is None else N * self.key_width
        vector = ParamInfo((N,), "float32", ("heads",), "zeros")
        declared: dict[str, Declaration] = {
            "in": declare((rows, D), dtype, ("heads", "embed")),
            "gates": ParamInfo(
                (sum(gates), D), dtype, ("heads", "embed"), stacked=self._stacked(self.gates)
            ),
        }
        if self.ranks:
            declared["down"] = ParamInfo(
                (sum(self.ranks.values()), D), dtype, (None, "embed"),
                stacked=self._stacked(self.ranks),
            )  # fmt: skip
        for name, rank in self.ranks.items():
            up = inner if name == "gate" else decays
            declared[f"{name}_up"] = ParamInfo((up, rank), dtype, ("heads", None))
        return declared | {
            "conv": declare((rows, self.conv_width), dtype, ("heads", "taps")),
            "rate": vector,
            "step_bias": dataclasses.replace(vector, shape=(decays,), is_bias=True),
            "out_norm": ParamInfo((self.value_width,), dtype, (None,), "ones"),
            "out": ParamInfo((D, inner), dtype, ("embed", "heads")),
        }

    @staticmethod
    def _stacked(rows: dict[str, int]) -> tuple[int, ...]:
        return tuple(rows.values()) if len(rows) > 1 else ()

    def cache(self, model: Widths) -> CacheSpec:
        """The newest inputs of the convolution, and each head's state."""
        tail = self.conv_width - 1, sum(self.channels)
        return cache.recurrent(tail, (self.num_heads, self.key_width, self.value_width))

    def per_chip(self, chips: int) -> "DeltaNet":
        """See `Kind`: key heads with all their values' heads where there are enough, else copies of
        one.
        """
        keys = max(1, self.num_key_heads // chips)
        return dataclasses.replace(self, num_heads=self.num_heads // chips, num_key_heads=keys)

    def can_divide(self, chips: int) -> bool:
        keys = self.num_key_heads
        return (keys % chips == 0 or chips % keys == 0) and super().can_divide(chips)

    def shares(self, axis: str, chips: int) -> tuple[range, ...]:
        return grouped_shares(self.num_heads, self.num_key_heads, axis, chips)

    def operations(self, model: Widths, stored: CacheSpec) -> tuple[Operation, ...]:
        """The products, and the state: decayed, read at the key, added to and read at the query for
        each token.
        """
        elements, channels = stored.elements_per_sequence, sum(self.channels)
        per_token = 7 * self.inner_width * self.key_width + 2 * self.conv_width * channels
        moved = channels + self.inner_width
        recur = operations.recurrence("recur", per_token, elements, moved, moved, self.cache_parts)
        return (*super().operations(model, stored), recur)
