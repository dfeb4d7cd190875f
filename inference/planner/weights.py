"""What a model's parameters are, from its configuration alone: matrices, norms, tables.

The same shapes as `layers` declares, without jax: a test compares them parameter by parameter for
every preset.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping

from configs.mesh import Mesh
from configs.mixers import Experts
from configs.model import LayerSpec, ModelConfig
from configs.precision import Format


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A weight matrix [rows, width] that tokens are multiplied with.

    Attributes:
        name: 'part.matrix'.
        rows, width: outputs and inputs.
        split: 'rows' or 'width', the side that tensor parallelism divides; None: neither.
        experts: of a mixture, this is one expert's matrix; None: every token uses it.
        copied_rows: of the rows, those of key/value heads.
        copied_parts: chips that can divide these; more of them hold copies.
    """

    name: str
    rows: int
    width: int
    split: str | None = None
    experts: Experts | None = None
    copied_rows: int = 0
    copied_parts: int = 1

    @property
    def copies(self) -> int:
        """Matrices of this shape in a layer."""
        return self.experts.num_experts if self.experts else 1

    @property
    def copies_per_token(self) -> int:
        """Of them, those that one token is multiplied with."""
        return self.experts.top_k if self.experts else 1

    def copies_touched(self, num_tokens: float) -> float:
        """Expected number of them that at least one of `num_tokens` tokens visits, each choosing
        evenly and on its own.
        """
        if self.experts is None:
            return 1
        missed = 1 - self.experts.top_k / self.experts.num_experts
        return self.experts.num_experts * (1 - missed**num_tokens)

    @property
    def elements(self) -> int:
        """Weights of all copies in a layer."""
        return self.copies * self.rows * self.width


def layer_matrices(config: ModelConfig, layer: LayerSpec) -> tuple[Matrix, ...]:
    """Matrices of one layer: its mixer's, then its feed-forward's."""
    return _mixer_matrices(config, layer) + _ffn_matrices(config, layer)


@functools.lru_cache(maxsize=64)  # a sweep asks for the same model thousands of times
def matrices(config: ModelConfig) -> Mapping[Matrix, int]:
    """Every matrix and how many layers hold it; the head, which only rows of logits meet, apart."""
    return dict(
        collections.Counter(
            matrix for layer in config.layers for matrix in layer_matrices(config, layer)
        )
    )


def _mixer_matrices(config: ModelConfig, layer: LayerSpec) -> tuple[Matrix, ...]:
    D, N, K, H = config.width, config.num_heads, config.num_kv_heads, config.head_width
    if layer.recurrent is not None:
        inner = layer.recurrent.inner_width
        rows = inner + layer.recurrent.conv_channels + layer.recurrent.num_heads
        return (
            Matrix("recurrent.in", rows, D, "rows"),
            Matrix("recurrent.out", D, inner, "width"),
        )
    found: list[Matrix] = []
    if layer.indexer is not None:  # its queries come from the latent ones where there are any
        query_rank = layer.latent.query_rank if layer.latent else None
        heads = layer.indexer.num_heads * layer.indexer.head_width
        found.append(Matrix("indexer.q", heads, query_rank or D))
        found.append(Matrix("indexer.k", layer.indexer.head_width + layer.indexer.num_heads, D))
    if layer.latent is not None:
        sizes, head = layer.latent, layer.latent.nope_width + layer.latent.rope_width
        if sizes.query_rank is None:
            found.append(Matrix("latent.q", N * head, D, "rows"))
        else:
            found.append(Matrix("latent.q_down", sizes.query_rank, D))
            found.append(Matrix("latent.q_up", N * head, sizes.query_rank, "rows"))
        up = N * (sizes.nope_width + sizes.value_width)
        return (
            *found,
            Matrix("latent.kv_down", sizes.rank + sizes.rope_width, D),
            Matrix("latent.kv_up", up, sizes.rank, "rows"),
            Matrix("latent.out", D, N * sizes.value_width, "width"),
        )
    inputs = Matrix("attention.qkv", (N + 2 * K) * H, D, "rows", None, 2 * K * H, K)
    if layer.is_sharer:
        inputs = Matrix("attention.q", N * H, D, "rows")
    return (
        *found,
        inputs,
        Matrix("attention.out", D, N * H, "width"),
    )


def _ffn_matrices(config: ModelConfig, layer: LayerSpec) -> tuple[Matrix, ...]:
    D = config.width
    if layer.ffn == "none":
        return ()
    if layer.ffn == "plain":
        up, down = Matrix("ffn.up", config.ffn_width, D, "rows"), config.ffn_width
        return up, Matrix("ffn.down", D, down, "width")
    if layer.experts is None:
        return _gated("ffn", D, config.ffn_width, None)
    experts = layer.experts
    found = (
        Matrix("experts.router", experts.num_experts, D),
        *_gated("experts", D, experts.width, experts),
    )
    if experts.num_shared:
        return found + _gated("shared", D, experts.num_shared * experts.width, None)
    return found


def _gated(part: str, width: int, hidden: int, experts: Experts | None) -> tuple[Matrix, ...]:
    return (
        Matrix(f"{part}.gate_up", 2 * hidden, width, "rows", experts),
        Matrix(f"{part}.down", width, hidden, "width", experts),
    )


@functools.lru_cache(maxsize=64)
def vector_elements(config: ModelConfig) -> int:
    """Weights that are no matrix: norms, biases, and a recurrent layer's taps, decays and skips."""
    norm = config.width * (2 if config.norm == "layer" else 1)
    count = norm  # the final one
    for layer in config.layers:
        parts = 1 if layer.ffn == "none" else 2
        count += norm * parts * (config.pre_norms + config.post_norms) + _biases(config, layer)
        if layer.indexer is not None:
            count += 2 * layer.indexer.head_width  # a layer norm of its keys
        if layer.recurrent is not None:
            sizes = layer.recurrent
            count += sizes.conv_channels * (sizes.conv_width + 1)
            count += 3 * sizes.num_heads + sizes.inner_width
        elif layer.latent is not None:
            count += layer.latent.rank + (layer.latent.query_rank or 0)
        elif config.qk_norm:
            queries, keys = 1, 0 if layer.is_sharer else 1
            if config.qk_norm == "all":
                queries, keys = config.num_heads * queries, config.num_kv_heads * keys
            count += (queries + keys) * config.head_width
    return count


def _biases(config: ModelConfig, layer: LayerSpec) -> int:
    """A bias has an element for each row of the matrix it belongs to."""
    kinds = {"attention.qkv": "qkv", "attention.q": "qkv", "attention.out": "out"}
    rows = [
        matrix.rows
        for matrix in layer_matrices(config, layer)
        if kinds.get(matrix.name, matrix.name.split(".")[0]) in config.biases
    ]
    return sum(rows)


def table_elements(config: ModelConfig) -> int:
    """Weights of one table [V, D]: the embedding, or an untied head."""
    return config.vocab_size * config.width


def position_elements(config: ModelConfig) -> int:
    """Weights of the table of learned positions."""
    return config.learned_positions * config.width


def num_parameters(config: ModelConfig) -> int:
    """All weights, a tied head counted once."""
    tables = table_elements(config) * (1 if config.tied else 2)
    in_layers = sum(matrix.elements * count for matrix, count in matrices(config).items())
    return in_layers + vector_elements(config) + position_elements(config) + tables


def num_active_parameters(config: ModelConfig) -> int:
    """Weights that one token is multiplied with, the head included and the embedding not."""
    used = sum(
        matrix.copies_per_token * matrix.rows * matrix.width * count
        for matrix, count in matrices(config).items()
    )
    return used + table_elements(config)


def weight_bytes(config: ModelConfig, format: Format, rest: Format) -> float:
    """Bytes of all weights: the layers' matrices in `format`, tables and vectors in `rest`."""
    total = rest.bytes_for(vector_elements(config), config.width)
    total += rest.bytes_for(table_elements(config), config.width) * (1 if config.tied else 2)
    total += rest.bytes_for(position_elements(config), config.width)
    for matrix, count in matrices(config).items():
        total += format.bytes_for(matrix.elements * count, matrix.width)
    return total


def chip_weight_bytes(config: ModelConfig, format: Format, rest: Format, mesh: Mesh) -> float:
    """Bytes of the weights that one chip of a mesh holds: heads, columns and tables divided over
    `model` (key/value heads as far as there are any), experts over `expert` too, vectors and
    undivided matrices whole.
    """
    total = rest.bytes_for(vector_elements(config), config.width)
    tables = rest.bytes_for(table_elements(config), config.width) * (1 if config.tied else 2)
    total += rest.bytes_for(position_elements(config), config.width) + tables / mesh.model
    for matrix, count in matrices(config).items():
        held = format.bytes_for(matrix.elements * count, matrix.width)
        held /= mesh.expert if matrix.experts else 1
        chips = mesh.model if matrix.split else 1
        total += divided(held, chips, matrix.copied_rows / matrix.rows, matrix.copied_parts)
    return total


def divided(whole: float, chips: int, copied: float, parts: int) -> float:
    """A chip's part of what `chips` divide, where the share `copied` of it has so many parts."""
    return whole * (1 - copied) / chips + whole * copied / min(chips, parts)
