"""State-space layers: a state of fixed size instead of a growing cache."""

import dataclasses
import functools
import math

from configs import cache
from configs.cache import CacheSpec
from configs.errors import InputError
from configs.kinds import operations
from configs.kinds.kind import Mixer, check_biases, check_multiple, check_sizes, grouped_shares
from configs.kinds.operations import Operation
from configs.kinds.params import Declared, ParamInfo, Widths


@dataclasses.dataclass(frozen=True)
class Mamba2(Mixer, name="mamba2"):
    """Mamba-2 (Dao & Gu 2024, arXiv 2405.21060): each head's state decays by a factor of its own
    and of the token, and adds the outer product of an input map and the input.

    Attributes:
        num_heads, head_width, state_width: N, H and M of the axis key.
        num_groups: groups of heads with their own input and output maps.
        conv_width: taps of the causal convolution before the state.
        biases: which of 'in', 'conv' and 'out' add one.
        norm_width: elements of what leaves that are normed together; None: all of them, 0: nothing
            is normed.
        norms_first: whether the norm comes before the gate, not behind it.
        part_scales: factors on what is projected of a token: the gate, what is convolved (the
            input, the maps into and out of the state) and the steps; (): none (Falcon-H1).
        step_limits: least and largest step; None: there is no largest.
    """

    divided = ("num_heads",)
    cached_heads = "num_heads"

    num_heads: int
    head_width: int
    state_width: int
    num_groups: int = 1
    conv_width: int = 4
    biases: tuple[str, ...] = ("conv",)
    norm_width: int | None = None
    norms_first: bool = False
    step_limits: tuple[float, float | None] = (0.0, None)
    part_scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_sizes(self, "num_heads", "head_width", "state_width", "num_groups", "conv_width")
        check_multiple(self, "num_heads", "num_groups")
        check_biases(self, self.biases, "in", "conv", "out")
        if (
            self.norm_width
            and self.inner_width % self.norm_width
            and (
                self.norm_width % self.inner_width  # of a chip, which holds a part of it
            )
        ):
            raise InputError(
                f"mamba2 norm_width={self.norm_width} does not divide the {self.inner_width} "
                "elements of its heads"
            )
        lower, upper = self.step_limits
        if not 0 <= lower < math.inf or (upper is not None and not lower < upper < math.inf):
            raise InputError(f"mamba2 step_limits are at least 0 and rise, not {self.step_limits}")
        is_sound = all(0 < scale < math.inf for scale in self.part_scales)
        if len(self.part_scales) not in (0, 5) or not is_sound:
            raise InputError(
                "mamba2 part_scales are five finite numbers above 0, or none, not "
                f"{self.part_scales}"
            )

    @property
    def inner_width(self) -> int:
        """Elements of all heads."""
        return self.num_heads * self.head_width

    @property
    def channels(self) -> tuple[int, int, int]:
        """Of the convolution: the input, and each group's maps into and out of the state."""
        maps = self.num_groups * self.state_width
        return self.inner_width, maps, maps

    def parameters(self, model: Widths) -> Declared:
        """What is convolved, [x, B, C]; the gate and the steps; the convolution; of each head a
        decay, the step's bias and a skip; the norm of what leaves, and the way out.
        """
        D, N, inner, dtype = model.width, self.num_heads, self.inner_width, model.dtype
        rows = sum(self.channels)
        declare = functools.partial(ParamInfo, stacked=self.channels, kv_heads=self.num_groups)
        gates = inner + N
        per_head = ParamInfo((N,), "float32", ("heads",), "zeros")
        declared = {
            "in": declare((rows, D), dtype, ("heads", "embed")),
            "gates": ParamInfo((gates, D), dtype, ("heads", "embed"), stacked=(inner, N)),
            "conv": declare((rows, self.conv_width), dtype, ("heads", "taps")),
            "decay": per_head,
            "step_bias": dataclasses.replace(per_head, is_bias=True),
            "skip": dataclasses.replace(per_head, init="ones"),
            "out": ParamInfo((D, inner), dtype, ("embed", "heads")),
        }
        vector = declare((rows,), dtype, ("heads",), "zeros")
        if "conv" in self.biases:
            declared["conv_bias"] = vector
        if "in" in self.biases:
            declared["in_bias"] = vector
            declared["gates_bias"] = ParamInfo(
                (gates,), dtype, ("heads",), "zeros", stacked=(inner, N)
            )
        if "out" in self.biases:
            declared["out_bias"] = ParamInfo((D,), dtype, ("embed",), "zeros")
        if self.norm_width != 0:
            declared["out_norm"] = ParamInfo((inner,), dtype, ("heads",), "ones")
        return declared

    def cache(self, model: Widths) -> CacheSpec:
        """The newest inputs of the convolution, and each head's state."""
        tail = self.conv_width - 1, sum(self.channels)
        return cache.recurrent(tail, (self.num_heads, self.state_width, self.head_width))

    def per_chip(self, chips: int) -> "Mamba2":
        """See `Kind`: groups with all their heads where there are enough, else copies of one."""
        heads, groups = self.num_heads // chips, max(1, self.num_groups // chips)
        width = self.inner_width if self.norm_width is None else self.norm_width
        return dataclasses.replace(self, num_heads=heads, num_groups=groups, norm_width=width)

    def can_divide(self, chips: int) -> bool:
        """See `Kind`; what is normed together lies on one chip, or on all of them."""
        groups, norms = self.num_groups, self.inner_width // (self.norm_width or self.inner_width)
        is_shared = groups % chips == 0 or chips % groups == 0
        return is_shared and (norms == 1 or norms % chips == 0) and super().can_divide(chips)

    def shares(self, axis: str, chips: int) -> tuple[range, ...]:
        return grouped_shares(self.num_heads, self.num_groups, axis, chips)

    @property
    def num_divided_norms(self) -> int:
        return int(self.norm_width in (None, self.inner_width))

    def operations(self, model: Widths, stored: CacheSpec) -> tuple[Operation, ...]:
        """The products, and the state: decayed, added to and read for each token."""
        elements, channels = stored.elements_per_sequence, sum(self.channels)
        per_token = 6 * self.inner_width * self.state_width + 2 * self.conv_width * channels
        moved = channels + self.inner_width
        recur = operations.recurrence("recur", per_token, elements, moved, moved, self.cache_parts)
        return (*super().operations(model, stored), recur)
