"""Widths of mixers and feed-forwards beyond attention and one gated matrix: data for a layer."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434): keys and values of all
    heads are projections of one latent vector a token, cached beside one rotary key.

    Attributes:
        rank: C, elements of the latent vector.
        rope_width: R, elements of the shared rotary key.
        nope_width, value_width: of a head's key without rotation, and of its value.
        query_rank: elements of the queries' own latent vector; None projects them at once.
    """

    rank: int
    rope_width: int
    nope_width: int
    value_width: int
    query_rank: int | None = None


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """A state-space layer (Mamba-2; Dao & Gu 2024, arXiv 2405.21060): a state of fixed size instead
    of a growing cache.

    Attributes:
        inner_width: channels of the state.
        state_width: M, elements of the state of a channel.
        num_heads: heads, each with one decay.
        num_groups: groups of heads with their own input and output maps.
        conv_width: taps of the causal convolution before the state.
    """

    inner_width: int
    state_width: int
    num_heads: int
    num_groups: int = 1
    conv_width: int = 4

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


@dataclasses.dataclass(frozen=True)
class Indexer:
    """Sparse attention (DeepSeek-AI 2025, DeepSeek-V3.2): small heads score every token, attention
    reads the best.

    Attributes:
        num_heads, head_width: of the scoring heads; their keys are shared.
        top_k: tokens that attention reads.
    """

    num_heads: int
    head_width: int
    top_k: int


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of gated feed-forwards (Shazeer et al. 2017, arXiv 1701.06538).

    Attributes:
        num_experts, top_k: E, and how many of them a token visits.
        width: F of one expert.
        num_shared: experts that every token visits beside them.
    """

    num_experts: int
    top_k: int
    width: int
    num_shared: int = 0
