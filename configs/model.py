"""A model is data: widths plus a pattern of layers. One decoder composes them."""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

from configs.cache import DTYPE_BYTES, CacheSpec, PageGroup, page_groups
from configs.errors import InputError, check_positive
from configs.kinds import operations, params
from configs.kinds.hyper_connections import HyperConnections
from configs.kinds.kind import MOST_WIDTH, FeedForward, Mixer, equal_shares
from configs.kinds.layer_inputs import LayerInputs
from configs.kinds.operations import Operation
from configs.kinds.params import Declaration, Declared, ParamInfo
from configs.precision import CACHE_FORMATS

# As `MOST_WIDTH` for the widths.
MOST_LAYERS, MOST_CONTEXT = 10_000, 2**31 - 1


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """One layer: which mixer moves information between tokens, and which feed-forward follows
    (None: there is none). Each is a kind of `configs/kinds/`, with its own widths.

    Attributes:
        is_post_normed: whether norms stand behind them alone, wherever the model's stand.
        factors: (alpha, beta) of the mixer and of the feed-forward f, where the residual stream
            goes on from the normed n that f reads: alpha n + beta f(n); (): it is x + f(n).
        parallel_norms: 1 or 2 where both read the stream that enters the layer, x + mix(norm x) +
            feed(norm x), by one norm or by two (GPT-J, Wang & Komatsuzaki 2021; PaLM, Chowdhery et
            al. 2022, arXiv 2204.02311); 0: the feed-forward reads what the mixer added to.
    """

    mixer: Mixer
    ffn: FeedForward | None
    is_post_normed: bool = False
    factors: tuple[tuple[float, float], ...] = ()
    parallel_norms: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.mixer, Mixer):
            raise InputError(
                f"a layer's mixer is one of {', '.join(Mixer.kinds)}, not {self.mixer!r}"
            )
        if not isinstance(self.ffn, FeedForward | None):
            raise InputError(
                f"a layer's ffn is one of {', '.join(FeedForward.kinds)} or None, not {self.ffn!r}"
            )
        if len(self.factors) not in (0, 2):
            raise InputError(f"a layer's factors are its mixer's and its ffn's, not {self.factors}")
        if self.parallel_norms not in (0, 1, 2):
            raise InputError(f"a layer's parallel_norms are 0, 1 or 2, not {self.parallel_norms}")
        if self.parallel_norms and (self.factors or self.is_post_normed or self.ffn is None):
            raise InputError("parallel_norms go with a ffn, no factors and no norms behind alone")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Widths, the layer pattern (repeated over `num_layers`) and a family's few quirks.

    Attributes:
        family: selects the weight-name map ('llama', 'gemma3', ...).
        width: D of the axis key.
        max_context: longest sequence in tokens.
        embedding_scale: factor on the embedded tokens (Gemma: D ** 0.5).
        residual_scale: factor on what each mixer and feed-forward adds to the residual stream.
        logit_scale: factor on the logits.
        norm: 'rms', 'layer' with a bias, 'layer_unbiased' without one, or 'layer_bare' without
            weights, too (OLMo, Groeneveld et al. 2024, arXiv 2402.00838).
        norm_offset: added to stored norm weights (Gemma and Nemotron store w - 1).
        pre_norms, post_norms: of the input and of the output of mixer and feed-forward; both are a
            "sandwich".
        logit_cap: soft limit c tanh(x / c) of the logits, behind their scale.
        learned_positions: rows of a table of positions added to the embedding; 0: there is none.
        layer_inputs: what each layer is told of a token beside the residual stream.
        hyper_connections: several residual streams in place of one, if any.
        has_layer_scales: whether each layer multiplies the residual stream that leaves it with a
            number of its own (Gemma 4).
        tied: the head is the embedding.
        has_head_bias: whether logits add a bias, before their scale.
        dtype: of activations, and of weights and cache where nothing else is said; the residual
            stream, norms and softmax are float32.
        cache_format: of keys, values and latents in pages: 'int8', 'fp8' (e4m3) or 'int4'; None is
            `dtype`.
        formats: of parameters that are stored in other ones, by path ('layers/0/mixer/qkv'); one,
            or one of each part of a stack.
    """

    least_layers = 1

    name: str
    family: str
    vocab_size: int
    width: int
    num_layers: int
    max_context: int
    pattern: tuple[LayerSpec, ...]
    norm_eps: float = 1e-5
    norm: str = "rms"
    norm_offset: float = 0.0
    pre_norms: bool = True
    post_norms: bool = False
    logit_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    learned_positions: int = 0
    layer_inputs: LayerInputs | None = None
    hyper_connections: HyperConnections | None = None
    has_layer_scales: bool = False
    tied: bool = False
    has_head_bias: bool = False
    dtype: str = "bfloat16"
    cache_format: str | None = None
    formats: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "num_layers", "max_context"):
            least = self.least_layers if name == "num_layers" else 1
            if getattr(self, name) < least:
                raise InputError(f"model.{name} is at least {least}, not {getattr(self, name)}")
            limit = {"num_layers": MOST_LAYERS, "max_context": MOST_CONTEXT}.get(name, MOST_WIDTH)
            if getattr(self, name) > limit:
                raise InputError(f"model.{name} is at most {limit}")
        for name, valid in (("dtype", ("float32", "bfloat16")), ("norm", params.NORMS)):
            if getattr(self, name) not in valid:
                raise InputError(
                    f"model.{name} is {' or '.join(map(repr, valid))}, not {getattr(self, name)!r}"
                )
        if not self.pattern and self.num_layers:
            raise InputError("model.pattern lists at least one layer")
        check_positive(self, "model.", "norm_eps", "logit_cap", "residual_scale", "logit_scale")
        self._check_parts()
        self._check_owners()
        self._check_cache()
        self._check_formats()

    def _check_parts(self) -> None:
        """Refuses parts that contradict each other."""
        if not (self.pre_norms or self.post_norms):
            raise InputError("a model has model.pre_norms, model.post_norms or both")
        if self.norm not in ("rms", "layer") and self.norm_offset:
            raise InputError(f"model.norm={self.norm!r} goes with no norm_offset")
        for layer in set(self.pattern):
            declared = self._layer_parameters(layer)
            if layer.factors and "mixer_norm" not in declared:
                raise InputError("a layer with factors goes on from norms of what its parts read")
            if self.hyper_connections and (
                layer.factors or layer.parallel_norms or self.layer_inputs
            ):
                raise InputError(
                    "model.hyper_connections go without factors, parallel_norms and layer_inputs"
                )
            if layer.parallel_norms and not (self.pre_norms and "mixer_norm" in declared):
                raise InputError("parallel_norms go with model.pre_norms that a mixer reads")
        if self.learned_positions:
            if self.max_context > self.learned_positions:
                raise InputError(
                    f"model.max_context={self.max_context} exceeds the "
                    f"{self.learned_positions} positions that were learned"
                )
            if any(layer.mixer.rotation is not None for layer in self.pattern):
                raise InputError("learned positions go with layers without rope")

    def _check_owners(self) -> None:
        owners: list[int] = []  # earlier layers with a cache of their own
        for layer, spec in enumerate(self.cache_specs):
            if spec.owner is not None and spec.owner not in owners:
                raise InputError(
                    f"layer {layer} shares the cache of layer {spec.owner}, which is no earlier "
                    f"layer with a cache of its own; valid: {', '.join(map(str, owners)) or 'none'}"
                )
            if spec.owner is not None:
                owner = self.layers[spec.owner].mixer
                self.layers[layer].mixer.check_owner(self.cache_specs[spec.owner], owner)
            if spec.elements_per_token or spec.elements_per_sequence:
                owners.append(layer)
            self._check_choice(layer)

    def _check_choice(self, layer: int) -> None:
        mixer = self.layers[layer].mixer
        owners = [part.choice_owner for part in mixer.parts if part.choice_owner is not None]
        if owners and mixer.choice_owner is None:
            raise InputError(f"layer {layer} has several mixers: none reads another layer's choice")
        for owner in owners:
            if not 0 <= owner < layer:
                raise InputError(
                    f"layer {layer} reads what layer {owner} chose, which is no earlier layer"
                )
            mixer.check_choice_owner(self.layers[owner].mixer)

    def _check_cache(self) -> None:
        format = self.cache_format
        if format is None or format == self.dtype:
            return
        if format not in CACHE_FORMATS or format in DTYPE_BYTES:
            valid = [name for name in CACHE_FORMATS if name not in DTYPE_BYTES]
            raise InputError(
                f"model.cache_format is {self.dtype} as model.dtype, {', '.join(valid[:-1])} or "
                f"{valid[-1]}, not {format!r}"
            )
        for spec in set(self.cache_specs):
            if spec.has_extremes:
                raise InputError(
                    f"model.cache_format={format!r} does not go with layers that choose pages by "
                    "their keys' extremes (token_budget): leave it out"
                )
            for part in spec.parts:
                part.check(format)

    def _check_formats(self) -> None:
        if self.formats:
            declared = dataclasses.replace(self, formats=()).parameters()
            params.check_formats(declared, dict(self.formats))

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.num_layers))

    @functools.cached_property
    def choice_owners(self) -> frozenset[int | None]:
        """Layers whose queries' choice later layers read."""
        return frozenset(layer.mixer.choice_owner for layer in self.layers) - {None}

    def shifted(self, first: int) -> tuple[LayerSpec, ...]:
        """Its layers as they stand behind `first` layers of another model, whose caches none of
        them reads.
        """
        layers = []
        for layer, spec in zip(self.layers, self.cache_specs, strict=True):
            mixer = layer.mixer
            if spec.owner is not None:
                mixer = mixer.changed({"owner": spec.owner + first})
            if mixer.choice_owner is not None:
                mixer = mixer.changed({"index_owner": mixer.choice_owner + first})
            layers.append(dataclasses.replace(layer, mixer=mixer))
        return tuple(layers)

    def mixers(self, kind: type[Any]) -> list[Any]:
        """The different mixers of one kind, in the order of their layers; where a layer's is made
        of others, those.
        """
        parts = dict.fromkeys(part for layer in self.pattern for part in layer.mixer.parts)
        return [mixer for mixer in parts if isinstance(mixer, kind)]

    @functools.cached_property
    def mixtures(self) -> tuple[int, int] | None:
        """How many of its layers are mixtures, and the most experts that one has; None: none is."""
        sizes = [num_experts for num_experts, _ in self.experts]
        return (len(sizes), max(sizes)) if sizes else None

    @functools.cached_property
    def experts(self) -> list[tuple[int, int]]:
        """(experts, those that a token visits) of each layer that is a mixture."""
        return [layer.ffn.experts for layer in self.layers if layer.ffn and layer.ffn.experts]

    @functools.cached_property
    def reads_tokens(self) -> bool:
        """Whether ids of tokens choose experts in any layer."""
        return any(layer.ffn is not None and layer.ffn.reads_tokens for layer in self.pattern)

    @property
    def divided(self) -> set[int]:
        """Sizes that chips along the mesh's `model` have to divide."""
        kinds = {kind for layer in self.pattern for kind in (layer.mixer, layer.ffn) if kind}
        parts = {part for kind in kinds for part in kind.parts}
        return {getattr(part, field) for part in parts for field in part.divided} - {0}

    @property
    def cached_heads(self) -> list[int]:
        """Heads that the caches of its mixers consist of, for each mixer that has such a cache:
        chips along the mesh's `model` divide them, or hold equal numbers of copies.
        """
        return [mixer.cache_parts for mixer in self.mixers(Mixer) if mixer.cached_heads]

    def with_kinds(self, **changes: object) -> "ModelConfig":
        """The same with these fields of every mixer and feed-forward that has them."""
        pattern = tuple(
            dataclasses.replace(
                layer,
                mixer=layer.mixer.changed(changes),
                ffn=layer.ffn and layer.ffn.changed(changes),
            )
            for layer in self.pattern
        )
        return dataclasses.replace(self, pattern=pattern)

    # --- chips ------------------------------------------------------------------------------------

    @functools.lru_cache(maxsize=64)  # noqa: B019
    def per_chip(self, chips: int, expert_chips: int = 1, contexts: int = 1) -> "ModelConfig":
        """The model that one of `chips` along the mesh's `model` computes: its heads, and of each
        of `contexts` along `context` its columns of feed-forwards and part of the vocabulary; of
        those along `expert` it holds its experts. Raises InputError where nothing divides a kind.
        """
        if (parts := chips * contexts) == expert_chips == 1:
            return self

        def divided(layer: LayerSpec) -> LayerSpec:
            mixer = layer.mixer.per_chip(chips) if chips > 1 else layer.mixer
            ffn = layer.ffn.per_chip(parts) if layer.ffn and parts > 1 else layer.ffn
            if expert_chips > 1:
                ffn = ffn and ffn.per_expert_chip(expert_chips)
            return dataclasses.replace(layer, mixer=mixer, ffn=ffn)

        pattern = tuple(map(divided, self.pattern))
        return dataclasses.replace(self, pattern=pattern, vocab_size=-(-self.vocab_size // parts))

    def shares(self, path: tuple[str, ...], axis: str, chips: int) -> tuple[range, ...]:
        """What each of `chips` that divide it holds of a parameter's logical axis: of 'heads',
        'kv_heads', columns of 'ffn' or 'shared', or rows of 'vocab'.
        """
        if axis == "vocab":
            return equal_shares(self.vocab_size, chips)
        layer = self.layers[int(path[1])]
        kind = layer.mixer if path[2] == "mixer" else layer.ffn
        assert kind is not None
        parts = {part.name: part for part in kind.parts} if len(kind.parts) > 1 else {}
        return parts.get(path[3], kind).shares(axis, chips)

    # --- parameters -------------------------------------------------------------------------------

    def parameters(self) -> Declared:
        """Declaration of every parameter: `ParamInfo` leaves in the structure of the values."""
        table = ParamInfo((self.vocab_size, self.width), self.dtype, ("vocab", "embed"))
        declared: dict[str, Declaration] = {
            "embed": {"table": dataclasses.replace(table, is_table=not self.tied)},
            "layers": tuple(self._layer_parameters(layer) for layer in self.layers),
            **params.around_part(self, "final_norm"),
        }
        if self.learned_positions:
            shape = (self.learned_positions, self.width)
            positions = ParamInfo(shape, self.dtype, (None, "embed"), is_table=True)
            declared["positions"] = {"table": positions}
        if self.layer_inputs is not None:
            declared["inputs"] = self.layer_inputs.of_tokens(self, self.vocab_size, self.num_layers)
        if self.hyper_connections is not None:
            declared["hyper"] = self.hyper_connections.last(self)
        head = {} if self.tied else {"table": table}
        if self.has_head_bias:
            head["table_bias"] = ParamInfo((self.vocab_size,), self.dtype, ("vocab",), "zeros")
        if head:
            declared["head"] = head
        return params.with_formats(declared, dict(self.formats)) if self.formats else declared

    @property
    def declared_layers(self) -> Sequence[Declared]:
        """Declarations of each layer's parameters."""
        return cast("Sequence[Declared]", self.parameters()["layers"])

    def norms_of(self, layer: LayerSpec) -> tuple[bool, bool]:
        """Whether norms stand before a layer's parts, and whether behind them."""
        return (False, True) if layer.is_post_normed else (self.pre_norms, self.post_norms)

    def _layer_parameters(self, layer: LayerSpec) -> Declared:
        declared: dict[str, Declaration] = {}
        is_before, is_behind = self.norms_of(layer)
        for part, kind in (("mixer", layer.mixer), ("ffn", layer.ffn)):
            if kind is None:
                continue
            declared[part] = dict(kind.parameters(self))
            is_shared = part == "ffn" and layer.parallel_norms == 1
            if is_before and not kind.norms_input and not is_shared:
                declared |= params.around_part(self, f"{part}_norm")
            if is_behind:
                declared |= params.around_part(self, f"{part}_post_norm")
            if self.hyper_connections is not None:
                declared[f"{part}_hyper"] = self.hyper_connections.parameters(self)
        if self.layer_inputs is not None:
            declared["inputs"] = self.layer_inputs.parameters(self)
        if self.has_layer_scales:
            declared["scale"] = ParamInfo((1,), self.dtype, (None,), "ones")
        return declared

    @functools.cached_property
    def vectors(self) -> Mapping[tuple[str, bool, bool], int]:
        """Elements of all parameters that are no matrices, by their format as a `Move` has it, and
        by whether chips along `model` and along `expert` divide them. Those of experts and of
        states they do; all others are few and count as whole on each chip.
        """
        elements: collections.Counter[tuple[str, bool, bool]] = collections.Counter()
        for _, info in params.leaves(self.parameters()):
            if not info.is_matrix:
                by_expert = info.logical_axes[0] == "experts"
                is_many = by_expert or "states" in info.logical_axes
                is_split = is_many and operations.is_divided(info)
                format = operations.stored_as(info, self, "rest")
                elements[format, is_split, by_expert] += info.elements
        return elements

    # --- cache ------------------------------------------------------------------------------------

    @functools.cached_property
    def cache_specs(self) -> tuple[CacheSpec, ...]:
        return tuple(layer.mixer.cache(self) for layer in self.layers)

    def stored_by(self, layer: int) -> CacheSpec:
        """What a layer reads: its own cache, or its owner's."""
        spec = self.cache_specs[layer]
        return spec if spec.owner is None else self.cache_specs[spec.owner]

    @functools.cached_property
    def page_groups(self) -> tuple[PageGroup, ...]:
        """Layers that share page lists."""
        return page_groups(self.cache_specs)

    @property
    def cache_dtype(self) -> str:
        """Of the elements in pages."""
        return self.cache_format or self.dtype

    def page_bytes(self, page_tokens: int, row_multiple: int = 1) -> list[int]:
        """Bytes of a page of each group."""
        dtype = self.cache_dtype
        return [
            group.bytes_per_page(dtype, page_tokens, row_multiple) for group in self.page_groups
        ]

    @functools.cached_property
    def has_states(self) -> bool:
        """Whether any layer keeps a recurrent state, which pages cannot restore."""
        return any(spec.elements_per_sequence for spec in self.cache_specs)

    @property
    def state_bytes(self) -> int:
        """Bytes of one copy of all layers' recurrent states, of one sequence."""
        return sum(spec.bytes_per_sequence() for spec in self.cache_specs)

    @functools.cached_property
    def groups_of_layer(self) -> dict[int, tuple[int, ...]]:
        """Page groups of each layer that stores tokens, one for each part of its cache."""
        group_of: dict[int, dict[int, int]] = {}
        for index, group in enumerate(self.page_groups):
            for layer in group.layers:
                group_of.setdefault(layer, {})[group.part] = index
        return {layer: tuple(parts[n] for n in sorted(parts)) for layer, parts in group_of.items()}

    @property
    def stride(self) -> int:
        """Tokens that a page has a multiple of: the most that have one entry together."""
        return max((spec.stride for spec in self.cache_specs), default=1)

    # --- cost -------------------------------------------------------------------------------------

    @functools.cached_property
    def operations(self) -> Mapping[Operation, int]:
        """Every operation of a step, and how many layers run it: products, then what tokens
        exchange, then the tables, and the norms and biases.
        """
        counts: collections.Counter[Operation] = collections.Counter()
        declared = self.declared_layers if self.formats else ()
        for index, layer in enumerate(self.layers):
            parts = {"mixer": layer.mixer.operations(self, self.stored_by(index))}
            parts["ffn"] = layer.ffn.operations(self) if layer.ffn else ()
            parts["inputs"] = self.layer_inputs.operations(self) if self.layer_inputs else ()
            if self.hyper_connections is not None:
                around = self.hyper_connections.operations(self)
                parts["hyper"] = around * (1 + (layer.ffn is not None))
            for part, of_part in parts.items():
                infos = declared[index].get(part, {}) if declared else {}
                counts.update(operations.in_formats(o, infos, self) for o in of_part)
        if self.layer_inputs is not None:
            projection = self.layer_inputs.projection(self, self.num_layers)
            infos = self.parameters()["inputs"] if self.formats else {}
            counts.update(operations.in_formats(o, infos, self) for o in projection)
        if self.hyper_connections is not None:
            counts.update(self.hyper_connections.last_operations(self))
        ordered = sorted(counts.items(), key=lambda item: item[0].kind != "matrix")
        vectors = operations.vector_reads(self.vectors, self.width)
        return dict(ordered) | dict.fromkeys((self._head, self._embedding, *vectors), 1)

    @property
    def head_rows(self) -> int:
        """Of the table that logits come from."""
        return self.vocab_size

    @property
    def _head(self) -> Operation:
        format = self._table_format("embed" if self.tied else "head")
        return operations.head(self.width, self.vocab_size, self.head_rows, format)

    def _table_format(self, part: str) -> str:
        table = dict(self.formats).get(f"{part}/table", (self.dtype,))
        return "rest" if table[0] == self.dtype else table[0]

    @property
    def _embedding(self) -> Operation:
        """Rows are looked up; a tied table is the head's, which reads it whole."""
        tables = (not self.tied) + bool(self.learned_positions)
        rows = [(tables, self.width, self._table_format("embed"))]
        if self.layer_inputs is not None:
            row = self.num_layers * self.layer_inputs.width
            rows.append((1, row, self._table_format("inputs")))
        return operations.look_ups(rows)
