"""Mamba's selective state spaces, whose channels decay each by itself."""

import dataclasses

from configs import cache
from configs.cache import CacheSpec
from configs.errors import InputError
from configs.kinds import operations
from configs.kinds.kind import Mixer, check_biases, check_choice, check_sizes
from configs.kinds.operations import Operation
from configs.kinds.params import Declared, ParamInfo, Widths


@dataclasses.dataclass(frozen=True)
class Mamba(Mixer, name="mamba"):
    """Mamba (Gu & Dao 2023, arXiv 2312.00752): each element of a channel's state has a decay of its
    own, and the token chooses how large a step it makes, what it adds (B) and what is read (C).

    Attributes:
        channels: X, inner width of the layer.
        state_width: M, elements of a channel's state.
        step_rank: elements that the steps of all channels are made of.
        conv_width: taps of the causal convolution before the state.
        biases: which of 'in', 'conv' and 'out' add one; the steps always have one.
        norms: RMS norms of what steps are made of, of B and of C: 'plain' ones (FalconMamba, Zuo et
            al. 2024, arXiv 2410.05355), or with weights, 'weighted' (Jamba, Lieber et al. 2024,
            arXiv 2403.19887); None: there are none.
        norm_eps: of these norms; None: the model's.
    """

    divided = ("channels",)
    cached_heads = "channels"

    channels: int
    state_width: int
    step_rank: int
    conv_width: int = 4
    biases: tuple[str, ...] = ("conv",)
    norms: str | None = None
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        check_sizes(self, "channels", "state_width", "step_rank", "conv_width")
        check_choice(self, "norms", (None, "plain", "weighted"))
        check_biases(self, self.biases, "in", "conv", "out")
        if self.norm_eps is not None and not (self.norms and self.norm_eps > 0):
            raise InputError(
                f"mamba norm_eps={self.norm_eps} is above 0, and goes with norms, not with "
                f"norms={self.norms!r}"
            )

    @property
    def chosen(self) -> tuple[int, int, int]:
        """Elements that each token chooses: those of the steps, B and C."""
        return self.step_rank, self.state_width, self.state_width

    def parameters(self, model: Widths) -> Declared:
        """What is convolved and its gate [2X, D]; the convolution; of what it gives, what the token
        chooses [R + 2M, X]; the steps [X, R] with their bias; decays [X, M], a skip a channel, and
        the way out [D, X].
        """
        D, X, R, dtype = model.width, self.channels, self.step_rank, model.dtype
        declared = {
            "in": ParamInfo((2 * X, D), dtype, ("heads", "embed"), stacked=(X, X)),
            "conv": ParamInfo((X, self.conv_width), dtype, ("heads", "taps")),
            "choice": ParamInfo((sum(self.chosen), X), dtype, (None, "heads")),
            "step": ParamInfo((X, R), dtype, ("heads", None)),
            "step_bias": ParamInfo((X,), "float32", ("heads",), "zeros", is_bias=True),
            "decay": ParamInfo((X, self.state_width), "float32", ("heads", "states"), "zeros"),
            "skip": ParamInfo((X,), "float32", ("heads",), "ones"),
            "out": ParamInfo((D, X), dtype, ("embed", "heads")),
        }
        if "in" in self.biases:
            declared["in_bias"] = ParamInfo((2 * X,), dtype, ("heads",), "zeros", stacked=(X, X))
        if "conv" in self.biases:
            declared["conv_bias"] = ParamInfo((X,), dtype, ("heads",), "zeros")
        if "out" in self.biases:
            declared["out_bias"] = ParamInfo((D,), dtype, ("embed",), "zeros")
        if self.norms == "weighted":
            for name, width in zip(("step_norm", "b_norm", "c_norm"), self.chosen, strict=True):
                declared[name] = ParamInfo((width,), dtype, (None,), "ones")
        return declared

    def cache(self, model: Widths) -> CacheSpec:
        """The newest inputs of the convolution, and each channel's state."""
        return cache.recurrent(
            (self.conv_width - 1, self.channels), (self.state_width, self.channels)
        )

    @property
    def num_chosen(self) -> int:
        """See `Mixer`: every channel has a part in what the token chooses for all of them."""
        return sum(self.chosen)

    def operations(self, model: Widths, stored: CacheSpec) -> tuple[Operation, ...]:
        """The products, and the state: decayed, added to and read for each token."""
        elements, X = stored.elements_per_sequence, self.channels
        per_token = 6 * X * self.state_width + 2 * self.conv_width * X
        moved = 3 * X + 2 * self.state_width  # inputs, steps and outputs; B and C
        recur = operations.recurrence("recur", per_token, elements, moved, moved, self.cache_parts)
        return (*super().operations(model, stored), recur)
