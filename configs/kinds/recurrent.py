"""Layers with a state of fixed size instead of a growing cache."""

import dataclasses

from configs import cache
from configs.cache import CacheSpec
from configs.kinds import operations
from configs.kinds.kind import Mixer, check_sizes
from configs.kinds.operations import Move, Operation
from configs.kinds.params import Declared, ParamInfo, Widths


@dataclasses.dataclass(frozen=True)
class Recurrent(Mixer, name="recurrent"):
    """A state-space layer (Mamba-2; Dao & Gu 2024, arXiv 2405.21060).

    Attributes:
        inner_width: channels of the state.
        state_width: M, elements of the state of a channel.
        num_heads: heads, each with one decay.
        num_groups: groups of heads with their own input and output maps.
        conv_width: taps of the causal convolution before the state.
    """

    divided = ("num_heads",)
    cached_heads = "num_heads"

    inner_width: int
    state_width: int
    num_heads: int
    num_groups: int = 1
    conv_width: int = 4

    def __post_init__(self) -> None:
        check_sizes(self, "inner_width", "state_width", "num_heads", "num_groups", "conv_width")

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: the input, and each group's maps into and out of the
        state.
        """
        return self.inner_width + 2 * self.num_groups * self.state_width

    @property
    def state_elements(self) -> int:
        """Elements a sequence keeps: the state and the convolution's tail."""
        tail = (self.conv_width - 1) * self.conv_channels
        return self.inner_width * self.state_width + tail

    def parameters(self, model: Widths) -> Declared:
        """Gate, convolution's input and step sizes at once; the convolution; a decay, a step bias
        and a skip a head; the norm of what leaves.
        """
        D, inner, dtype = model.width, self.inner_width, model.dtype
        rows = inner + self.conv_channels + self.num_heads
        per_head = ParamInfo((self.num_heads,), dtype, ("heads",), "zeros")
        return {
            "in": ParamInfo((rows, D), dtype, ("heads", "embed")),
            "conv": ParamInfo((self.conv_channels, self.conv_width), dtype, ("heads", "taps")),
            "conv_bias": ParamInfo((self.conv_channels,), dtype, ("heads",), "zeros"),
            "decay": per_head,
            "step_bias": per_head,
            "skip": per_head,
            "out_norm": ParamInfo((inner,), dtype, ("heads",), "ones"),
            "out": ParamInfo((D, inner), dtype, ("embed", "heads")),
        }

    def cache(self, model: Widths) -> CacheSpec:
        """The state."""
        return cache.recurrent(self.state_elements)

    def operations(self, model: Widths, stored: CacheSpec) -> tuple[Operation, ...]:
        """The products, and the state: decayed, added to and read for each token; in float32 it is
        read once a step and written once, and once more for each draft.
        """
        state, channels = self.state_elements, self.conv_channels + self.inner_width
        per_token = (
            6 * self.inner_width * self.state_width + 2 * self.conv_width * self.conv_channels
        )
        recur = Operation(
            "recur", "other", flops=((per_token, ("queries",)),),
            moves=(Move("cache", ((2 * state, ("sequences",)), (state, ("drafts",))), state,
                        "float32"),
                   Move("activations", ((channels, operations.TOKENS),), channels, "rest")),
            cache_parts=self.cache_parts,
        )  # fmt: skip
        return (*super().operations(model, stored), recur)
