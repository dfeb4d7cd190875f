"""Convolutions of a few tokens in place of attention: the past is the newest of their inputs."""

import dataclasses

from configs import cache
from configs.cache import CacheSpec
from configs.errors import InputError
from configs.kinds import operations
from configs.kinds.kind import Mixer, check_sizes
from configs.kinds.operations import Operation
from configs.kinds.params import Declared, ParamInfo, Widths


@dataclasses.dataclass(frozen=True)
class ShortConv(Mixer, name="short_conv"):
    """Gated short convolution (LFM2, Liquid AI 2025, arXiv 2511.23404): out(C * conv(B * x)), where
    B, C and x are projections of the token and each channel is convolved by itself.

    Attributes:
        channels: that are convolved.
        conv_width: taps, w of the newest tokens.
        has_bias: whether both projections and the convolution add one.
    """

    divided = ("channels",)
    cached_heads = "channels"

    channels: int
    conv_width: int = 3
    has_bias: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, "channels", "conv_width")
        if self.conv_width < 2:
            raise InputError(
                "short_conv conv_width is at least 2: one tap keeps nothing of the past"
            )

    def parameters(self, model: Widths) -> Declared:
        """Fused projections [3 X, D] in the order B, C, x; the taps; the way out [D, X]."""
        X, D, dtype = self.channels, model.width, model.dtype
        declared = {
            "in": ParamInfo((3 * X, D), dtype, ("heads", "embed"), stacked=(X,) * 3),
            "conv": ParamInfo((X, self.conv_width), dtype, ("heads", "taps")),
            "out": ParamInfo((D, X), dtype, ("embed", "heads")),
        }
        if self.has_bias:
            bias = ParamInfo((3 * X,), dtype, ("heads",), "zeros", stacked=(X,) * 3)
            declared["in_bias"] = bias
            declared["conv_bias"] = dataclasses.replace(bias, shape=(X,), stacked=())
            declared["out_bias"] = ParamInfo((D,), dtype, ("embed",), "zeros")
        return declared

    def cache(self, model: Widths) -> CacheSpec:
        """The newest inputs of the convolution."""
        return cache.recurrent((self.conv_width - 1, self.channels))

    def operations(self, model: Widths, stored: CacheSpec) -> tuple[Operation, ...]:
        """The products, and the convolution between two gates."""
        elements, X = stored.elements_per_sequence, self.channels
        convolve = operations.recurrence(
            "convolve", 2 * X * (1 + self.conv_width), elements, 4 * X, X, self.cache_parts
        )
        return (*super().operations(model, stored), convolve)
