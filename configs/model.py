"""A model is data: widths plus a pattern of layers. One decoder composes them."""

import dataclasses
import functools

from configs.cache import CacheSpec, PageGroup, keys_values, page_groups
from configs.errors import InputError


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and how its frequencies are
    stretched.

    `scaling` is 'none', 'linear' (all frequencies / factor) or 'llama3' (Llama 3.1: low frequencies
    / factor, a smooth ramp between `low_freq_factor` and `high_freq_factor` wavelengths per
    `original_context`).
    """

    theta: float = 10_000.0
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer: which mixer moves information between tokens, which feed-forward follows, what is
    cached.

    `cache=None` derives the spec of keys and values from the model's widths and this layer's
    window.
    """

    mixer: str = "attention"
    ffn: str = "gated"
    rope: Rope = Rope()
    window: int | None = None
    cache: CacheSpec | None = None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Widths, the layer pattern (repeated over `num_layers`) and a family's few quirks.

    Attributes:
        family: selects the weight-name map ('llama', 'gemma3').
        width, ffn_width, head_width: D, F and H of the axis key.
        max_context: longest sequence in tokens.
        attention_scale: factor on q.k; None means head_width ** -0.5.
        embedding_scale: factor on the embedded tokens (Gemma: D ** 0.5).
        norm_offset: added to stored norm weights (Gemma stores w - 1).
        qk_norm: RMS norm of each query and key head before RoPE.
        post_norms: a second norm after mixer and feed-forward ("sandwich").
        tied: the head is the embedding.
        dtype: of weights, matrix inputs and cache; the residual stream, norms and softmax are
            float32.
        eos_ids, bos_id: end tokens, and the token a prompt starts with.
    """

    name: str
    family: str
    vocab_size: int
    width: int
    ffn_width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    max_context: int
    pattern: tuple[LayerSpec, ...] = (LayerSpec(),)
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    qk_norm: bool = False
    post_norms: bool = False
    activation: str = "silu"
    attention_scale: float | None = None
    embedding_scale: float = 1.0
    tied: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "ffn_width", "num_layers", "num_heads", "num_kv_heads",
                     "head_width", "max_context"):  # fmt: skip
            if getattr(self, name) < 1:
                raise InputError(f"model.{name} is at least 1, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model.num_heads={self.num_heads} is not a multiple of "
                f"model.num_kv_heads={self.num_kv_heads}"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise InputError(f"model.dtype is 'float32' or 'bfloat16', not {self.dtype!r}")
        if self.activation not in ("silu", "gelu_tanh"):
            raise InputError(f"model.activation is 'silu' or 'gelu_tanh', not {self.activation!r}")

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """One spec a layer."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

    @functools.cached_property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What each layer caches."""
        return tuple(
            layer.cache or keys_values(self.num_kv_heads, self.head_width, layer.window)
            for layer in self.layers
        )

    @functools.cached_property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """Layers that share page lists."""
        return page_groups(self.cache_specs)

    @functools.cached_property
    def group_of_layer(self) -> dict[int, int]:
        """Page group of each layer that stores tokens."""
        return {layer: g for g, group in enumerate(self.page_groups) for layer in group.layers}
