"""Structured state spaces whose dynamics are the same for every token."""

import dataclasses

from configs import cache
from configs.cache import CacheSpec
from configs.errors import InputError
from configs.kinds import operations
from configs.kinds.kind import Mixer, check_sizes
from configs.kinds.operations import Operation
from configs.kinds.params import Declared, ParamInfo, Widths


@dataclasses.dataclass(frozen=True)
class S4(Mixer, name="s4"):
    """S4D-Lin (Gu et al. 2022, arXiv 2206.11893): every channel drives complex states of its own,
    which turn and decay at constant rates; then a gelu, and a gated linear unit that mixes
    channels.

    Attributes:
        channels: those of the residual stream.
        state_width: M complex states of a channel, each of which stands for itself and its
            conjugate.
    """

    divided = ("channels",)
    cached_heads = "channels"

    channels: int
    state_width: int = 32

    def __post_init__(self) -> None:
        check_sizes(self, "channels", "state_width")

    @property
    def reads_float32(self) -> bool:
        """See `Kind`: its recurrence reads the stream."""
        return True

    def check_channels(self, width: int, chips: int | None = None) -> None:
        """Whether its channels are those of the residual stream, or a chip's of so many (None:
        however many there are).

        Raises:
            InputError: with both widths.
        """
        if self.channels * (chips or max(1, width // self.channels)) != width:
            raise InputError(
                f"s4 channels={self.channels} are those of the model, model.width={width}"
            )

    def parameters(self, model: Widths) -> Declared:
        """In float32, of each channel: its step and a skip; of each state its rate, its frequency
        and how it is read [X, 2M], real parts first. Steps, rates and frequencies are relative to
        those that the paper begins with. Then the way out [2D, X], values before gates.
        """
        X, M, D = self.channels, self.state_width, model.width
        self.check_channels(D)
        of_channel = ParamInfo((X,), "float32", ("heads",), "zeros")
        of_state = ParamInfo((X, M), "float32", ("heads", "states"), "zeros")
        return {
            "step": of_channel,
            "rate": of_state,
            "frequency": of_state,
            "read": dataclasses.replace(of_state, shape=(X, 2 * M), init="normal"),
            "skip": dataclasses.replace(of_channel, init="ones"),
            "out": ParamInfo((2 * D, X), model.dtype, ("embed", "heads")),
            "out_bias": ParamInfo((2 * D,), model.dtype, ("embed",), "zeros"),
        }

    def cache(self, model: Widths) -> CacheSpec:
        """The states' real and imaginary parts, of each channel."""
        return cache.recurrent((2, self.state_width, self.channels))

    @property
    def num_sums(self) -> int:
        """See `Mixer`: values and gates."""
        return 2

    def operations(self, model: Widths, stored: CacheSpec) -> tuple[Operation, ...]:
        """The products, and the states: turned, added to and read for each token."""
        elements = stored.elements_per_sequence
        recur = operations.recurrence(
            "recur", 7 * elements, elements, 2 * self.channels, self.channels, self.cache_parts
        )
        return (*super().operations(model, stored), recur)
