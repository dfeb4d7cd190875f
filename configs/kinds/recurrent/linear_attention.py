"""Linear attention: sums of keys and values in place of all of them."""

import dataclasses
import math

from configs import cache
from configs.cache import CacheSpec
from configs.errors import InputError
from configs.kinds import operations
from configs.kinds.kind import Mixer, check_choice, check_sizes
from configs.kinds.operations import Operation
from configs.kinds.params import Declared, ParamInfo, Widths


@dataclasses.dataclass(frozen=True)
class LinearAttention(Mixer, name="linear_attention"):
    """Attention whose scores are products of what a map makes of queries and keys
    (Katharopoulos et al. 2020, arXiv 2006.16236), so that the past is one matrix a head.

    'silu' is lightning attention (MiniMax-01, arXiv 2501.08313): queries, keys and values behind a
    silu, and weighted sums that are not divided. 'elu' is elu + 1, and 'taylor' the exponential of
    a score as far as its square (BASED, arXiv 2402.18668); of these the weights of a query sum to
    1.

    Attributes:
        num_heads: N of the axis key.
        key_width, value_width: M and H: elements of a head's queries and keys, and of its values.
        feature_map: 'silu', 'elu' or 'taylor'.
        decay: factor on what head n's state decays by a token, exp(-2 ** (-8 (n + 1) / N));
            None: nothing decays.
        has_gated_norm: whether what all heads return is normed together, and gated by a sigmoid of
            a projection of the token.
    """

    divided = ("num_heads",)
    cached_heads = "num_heads"

    num_heads: int
    key_width: int
    value_width: int
    feature_map: str = "silu"
    decay: float | None = None
    has_gated_norm: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "key_width", "value_width")
        check_choice(self, "feature_map", ("silu", "elu", "taylor"))
        if self.decay is not None and not 0 <= self.decay < math.inf:
            raise InputError(
                f"linear_attention decay is a finite number from 0 on, not {self.decay}"
            )

    @property
    def is_normalized(self) -> bool:
        """Whether the weights of a query sum to 1."""
        return self.feature_map != "silu"

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of a sequence's: what the map makes of a key, and a value beside which, where
        weights are normalized, their sum is kept.
        """
        M = self.key_width
        mapped = 1 + M + M * (M + 1) // 2 if self.feature_map == "taylor" else M
        return self.num_heads, mapped, self.value_width + self.is_normalized

    def parameters(self, model: Widths) -> Declared:
        """Fused projections [(2M + H) N, D] in the order q, k, v; the way out [D, N H]; the gate
        [N H, D] and the norm.
        """
        N, D, dtype = self.num_heads, model.width, model.dtype
        keys, values = N * self.key_width, N * self.value_width
        parts = keys, keys, values
        declared = {
            "in": ParamInfo((sum(parts), D), dtype, ("heads", "embed"), stacked=parts),
            "out": ParamInfo((D, values), dtype, ("embed", "heads")),
        }
        if self.has_gated_norm:
            declared["gate"] = ParamInfo((values, D), dtype, ("heads", "embed"))
            declared["out_norm"] = ParamInfo((values,), dtype, ("heads",), "ones")
        return declared

    def cache(self, model: Widths) -> CacheSpec:
        return cache.recurrent(self.state)

    @property
    def num_divided_norms(self) -> int:
        return int(self.has_gated_norm)

    def operations(self, model: Widths, stored: CacheSpec) -> tuple[Operation, ...]:
        """The products, and the state: added to, read and (if it does) decayed for each token."""
        elements = stored.elements_per_sequence
        per_token = (4 if self.decay is None else 6) * elements
        moved = self.num_heads * 2 * (self.key_width + self.value_width)
        recur = operations.recurrence("recur", per_token, elements, moved, moved, self.cache_parts)
        return (*super().operations(model, stored), recur)
