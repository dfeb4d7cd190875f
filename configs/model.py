"""A model is data: widths plus a pattern of layers. One decoder composes them."""

import dataclasses
import functools
import math

from configs.cache import CacheSpec, PageGroup, keys_values, latent, page_groups, recurrent
from configs.errors import InputError
from configs.kinds.rope import Rope
from configs.mixers import Experts, Indexer, Latent, Recurrent

# What sizes of a model may be, whoever names them: a checkpoint's reader asks no more.
MOST_LAYERS, MOST_WIDTH, MOST_CONTEXT = 10_000, 1 << 24, 2**31 - 1

_CHOICES = {
    "dtype": ("float32", "bfloat16"),
    "activation": ("silu", "gelu_tanh"),
    "norm": ("rms", "layer"),
    "qk_norm": (None, "head", "all"),
}
_BIASES = ("qkv", "out", "ffn")


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer: which mixer moves information between tokens, which feed-forward follows, what is
    cached.

    Attributes:
        mixer, ffn: names in the decoder's tables.
        rope: rotary positions of a mixer that rotates; None: it does not.
        window: tokens that a query sees, itself included; None sees all.
        cache: None derives the spec from the model's widths, the window and the fields below; a
            spec that is given brings its own window, a shared cache its owner's.
        latent, recurrent, indexer, experts: widths of the mixers and feed-forwards that have them.
    """

    mixer: str = "attention"
    ffn: str = "gated"
    rope: Rope | None = Rope()
    window: int | None = None
    cache: CacheSpec | None = None
    latent: Latent | None = None
    recurrent: Recurrent | None = None
    indexer: Indexer | None = None
    experts: Experts | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.cache is not None:
            raise InputError(
                f"a layer takes window={self.window} or a cache with a window of its own, not both"
            )

    @property
    def is_sharer(self) -> bool:
        """Whether an earlier layer's cache is read."""
        return self.cache is not None and self.cache.owner is not None


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Widths, the layer pattern (repeated over `num_layers`) and a family's few quirks.

    Attributes:
        family: selects the weight-name map ('llama', 'gemma3', ...).
        width, ffn_width, head_width: D, F and H of the axis key.
        max_context: longest sequence in tokens.
        attention_scale: factor on q.k; None means head_width ** -0.5.
        embedding_scale: factor on the embedded tokens (Gemma: D ** 0.5).
        norm: 'rms', or 'layer' with a bias.
        norm_offset: added to stored norm weights (Gemma stores w - 1).
        qk_norm: RMS norm before RoPE of each query and key head ('head') or of all queries and all
            keys of a token at once ('all'); None: there is none.
        pre_norms, post_norms: of the input and of the output of mixer and feed-forward; both are a
            "sandwich".
        biases: which products add one: 'qkv', 'out' (attention's), 'ffn'.
        score_cap, logit_cap: soft limits c tanh(x / c) of attention's scores and of the logits.
        learned_positions: rows of a table of positions added to the embedding; 0: there is none.
        tied: the head is the embedding.
        dtype: of weights, matrix inputs and cache; the residual stream, norms and softmax are
            float32.
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
    norm: str = "rms"
    norm_offset: float = 0.0
    qk_norm: str | None = None
    pre_norms: bool = True
    post_norms: bool = False
    biases: tuple[str, ...] = ()
    activation: str = "silu"
    attention_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    learned_positions: int = 0
    tied: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "ffn_width", "num_layers", "num_heads", "num_kv_heads",
                     "head_width", "max_context"):  # fmt: skip
            if getattr(self, name) < 1:
                raise InputError(f"model.{name} is at least 1, not {getattr(self, name)}")
            most = {"num_layers": MOST_LAYERS, "max_context": MOST_CONTEXT}.get(name, MOST_WIDTH)
            if getattr(self, name) > most:
                raise InputError(f"model.{name} is at most {most}")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"model.num_heads={self.num_heads} is not a multiple of "
                f"model.num_kv_heads={self.num_kv_heads}"
            )
        for name, valid in _CHOICES.items():
            if getattr(self, name) not in valid:
                raise InputError(
                    f"model.{name} is {' or '.join(map(repr, valid))}, not {getattr(self, name)!r}"
                )
        if not self.pattern:
            raise InputError("model.pattern lists at least one layer")
        for name in ("norm_eps", "score_cap", "logit_cap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"model.{name} is a finite number above 0, not {value}")
        self._check_parts()
        self._check_owners()

    def _check_parts(self) -> None:
        """Refuses parts that contradict each other."""
        unknown = [bias for bias in self.biases if bias not in _BIASES]
        if unknown or len(set(self.biases)) != len(self.biases):
            raise InputError(
                f"model.biases names each of {', '.join(_BIASES)} at most once, not {self.biases}"
            )
        if not (self.pre_norms or self.post_norms):
            raise InputError("a model has model.pre_norms, model.post_norms or both")
        if self.norm == "layer" and (self.norm_offset or self.qk_norm):
            raise InputError("model.norm='layer' goes with no norm_offset and no qk_norm")
        if self.learned_positions:
            if self.max_context > self.learned_positions:
                raise InputError(
                    f"model.max_context={self.max_context} exceeds the "
                    f"{self.learned_positions} positions that were learned"
                )
            if any(layer.rope is not None for layer in self.pattern):
                raise InputError("learned positions go with layers without rope")

    def _check_owners(self) -> None:
        owners: list[int] = []  # earlier layers with a cache of their own
        for layer, spec in enumerate(self.cache_specs):
            if spec.owner is not None and spec.owner not in owners:
                raise InputError(
                    f"layer {layer} shares the cache of layer {spec.owner}, which is no earlier "
                    f"layer with a cache of its own; valid: {', '.join(map(str, owners)) or 'none'}"
                )
            if spec.elements_per_token or spec.elements_per_sequence:
                owners.append(layer)

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """One spec a layer."""
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

    @functools.cached_property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """What each layer caches."""
        return tuple(layer.cache or self._derived_cache(layer) for layer in self.layers)

    def _derived_cache(self, layer: LayerSpec) -> CacheSpec:
        if layer.recurrent is not None:
            return recurrent(layer.recurrent.state_elements)
        if layer.latent is not None:
            spec = latent(layer.latent.rank, layer.latent.rope_width)
        else:
            spec = keys_values(self.num_kv_heads, self.head_width, layer.window)
        if layer.indexer is None:
            return spec
        elements = spec.elements_per_token + layer.indexer.head_width
        return dataclasses.replace(spec, elements_per_token=elements)

    @functools.cached_property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """Layers that share page lists."""
        return page_groups(self.cache_specs)

    @functools.cached_property
    def has_states(self) -> bool:
        """Whether any layer keeps a recurrent state, which pages cannot restore."""
        return any(spec.elements_per_sequence for spec in self.cache_specs)

    @functools.cached_property
    def group_of_layer(self) -> dict[int, int]:
        """Page group of each layer that stores tokens."""
        return {layer: g for g, group in enumerate(self.page_groups) for layer in group.layers}
