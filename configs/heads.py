"""Heads: small models that draft for one target, whose hidden states they read. What they share
with it, its embedding, is not among their parameters.
"""

import dataclasses
from collections.abc import Mapping
from typing import cast

from configs.errors import InputError
from configs.kinds import operations
from configs.kinds.attention import Attention
from configs.kinds.operations import Operation
from configs.kinds.params import Declared, ParamInfo, norm
from configs.model import ModelConfig

BRANCHING = ("eagle", "medusa")  # proposers of trees
MOST_TREE_DRAFTS = 31  # with the newest token the bits of `Rectangle.ancestors_YW`


@dataclasses.dataclass(frozen=True)
class Heads(ModelConfig):
    """What all heads have: fields of their target, and its vocabulary.

    Attributes:
        target: digest of the weights that they were trained for; '': they came with the target's.
        proposed_ids: tokens that they propose, by row of their output table; (): any. A proposal
            costs what its table does, and few tokens make up most of a text (Zhao et al. 2025,
            arXiv 2502.14856).
    """

    target: str = ""
    proposed_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        ids = self.proposed_ids
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size and len(set(ids)) == len(ids)):
            raise InputError(
                f"model.proposed_ids are different ids from 0 to {self.vocab_size - 1}"
            )

    def check_target(self, target: ModelConfig) -> None:
        """Refuses a model whose hidden states or tokens are others.

        Raises:
            InputError: it is not like the one that they were made for.
        """
        if self.width != target.width:
            raise InputError(
                f"{self.name} reads hidden states of {self.width} elements, those of {target.name} "
                f"have {target.width}: heads draft for the model that they were trained for"
            )
        if self.vocab_size != target.vocab_size:
            raise InputError(
                f"{self.name} has a vocabulary of {self.vocab_size} tokens, {target.name} one of "
                f"{target.vocab_size}"
            )

    def _check_features(self, target: ModelConfig, numbers: tuple[int, ...]) -> None:
        """Refuses layers that the target has not, or whose output is no one stream."""
        if numbers and target.hyper_connections:
            raise InputError(
                f"model.features of {target.name}: its layers leave several residual streams; a "
                "head reads its last hidden state alone (features=())"
            )
        if numbers and not 1 <= min(numbers) <= max(numbers) <= target.num_layers:
            raise InputError(
                f"model.features are layers of {target.name}, from 1 to {target.num_layers}, not "
                f"{numbers}"
            )

    @property
    def head_rows(self) -> int:
        return len(self.proposed_ids) or self.vocab_size

    @property
    def _output_table(self) -> dict[str, ParamInfo]:
        return {"table": ParamInfo((self.head_rows, self.width), self.dtype, ("vocab", "embed"))}


@dataclasses.dataclass(frozen=True)
class Eagle(Heads):
    """One or a few layers that go on from the target's hidden states, a token at a time (Li et al.
    2024, arXiv 2401.15077), of whatever kinds cache in pages. The layer with which a checkpoint
    predicts a second token (MTP: DeepSeek-AI 2024, arXiv 2412.19437, section 2.2) is one of them.

    The first of them reads, of each token, its embedding and the hidden state of the token before
    it: the target's where the target has seen that, else the head's own.

    Attributes:
        features: numbers of the target's layers, from 1 on, whose outputs are fused into that state
            (EAGLE-3: Li et al. 2025, arXiv 2503.01840); (): its normalized last one.
        shares_head: they propose by the target's output table and have none of their own.
        skips_first: the first token of a sequence, which has no state before it, is read as zeros.
        omits_first: that token has no entry, and each other is one place earlier.
    """

    features: tuple[int, ...] = ()
    shares_head: bool = False
    skips_first: bool = False
    omits_first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm == "layer_bare":
            raise InputError("EAGLE heads have norms with weights, not model.norm='layer_bare'")
        if self.shares_head and self.proposed_ids:
            raise InputError("model.shares_head goes without proposed_ids: its rows are all tokens")

    def features_of(self, target: ModelConfig) -> tuple[int, ...]:
        """The target's layers whose outputs are fused."""
        return self.features

    def check_target(self, target: ModelConfig) -> None:
        super().check_target(target)
        self._check_features(target, self.features_of(target))

    def parameters(self) -> Declared:
        base = super().parameters()
        declared = {
            "layers": base["layers"],
            "final_norm": base["final_norm"],
            "token_norm": norm(self, self.width, "embed"),
            "state_norm": norm(self, self.width, "embed"),
            **self._joining,
        }
        return declared if self.shares_head else declared | {"head": self._output_table}

    @property
    def operations(self) -> Mapping[Operation, int]:
        """As `ModelConfig` says; `eagle.fuse` runs for the target's states alone."""
        products = operations.products("eagle", self, self._joining)
        return dict.fromkeys(products, 1) | dict(super().operations)

    @property
    def _joining(self) -> dict[str, ParamInfo]:
        """What makes the first layer's inputs."""
        square, D = ("embed", None), self.width
        declared = {"input": ParamInfo((D, 2 * D), self.dtype, square)}
        if self.features:
            declared["fuse"] = ParamInfo((D, len(self.features) * D), self.dtype, square)
        return declared


@dataclasses.dataclass(frozen=True)
class Eagle3(Eagle):
    """EAGLE-3 heads as they are published (Li et al. 2025, arXiv 2503.01840; the layouts of SGLang
    and of speculators).

    The first layer's mixer reads the normalized token and the normalized state side by side; the
    residual stream is the state alone. A sequence's first token, before which there is no state,
    has no entry.

    Attributes:
        features: as `Eagle`; (): of a target of L layers the 2nd, the L/2-th and the (L-3)-th.
        has_normed_stream: whether the residual stream is the normalized state.
        feature_norms: what is normalized before features are fused: 'all' at once, 'each', or None.
        has_normed_state: whether the state that the next draft reads is normalized as for logits.
        has_embedding: whether the heads have an embedding of their own, not the target's.
    """

    has_normed_stream: bool = False
    omits_first: bool = True
    feature_norms: str | None = None
    has_normed_state: bool = False
    has_embedding: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        mixers = {type(layer.mixer) for layer in self.pattern}
        if not self.omits_first or self.shares_head or self.skips_first or mixers != {Attention}:
            raise InputError("EAGLE-3 heads are layers of attention with a head of their own")
        if self.feature_norms not in (None, "all", "each"):
            raise InputError(
                f"model.feature_norms={self.feature_norms!r}: must be None, 'all' or 'each'"
            )

    def features_of(self, target: ModelConfig) -> tuple[int, ...]:
        return self.features or (2, target.num_layers // 2, target.num_layers - 3)

    def parameters(self) -> Declared:
        declared = dict(super().parameters())
        first, *later_layers = cast("tuple[Declared, ...]", declared["layers"])
        mixer = {**cast(Declared, first["mixer"]), "qkv": self._qkv(2)}
        first_layer = {**first, "mixer": mixer}
        del first_layer["mixer_norm"]
        declared["layers"] = (first_layer, *later_layers)
        if self.feature_norms:
            norms = tuple(norm(self, self.width, "embed") for _ in range(self._num_features))
            whole = norm(self, self._num_features * self.width, "embed")
            declared["feature_norms"] = norms if self.feature_norms == "each" else (whole,)
        if self.has_embedding:
            declared["embed"] = ModelConfig.parameters(self)["embed"]
        return declared

    @property
    def _num_features(self) -> int:
        return len(self.features) or 3

    def _qkv(self, inputs: int) -> ParamInfo:
        """The first layer's projection of so many inputs side by side."""
        mixer = cast(Attention, self.layers[0].mixer)
        info = cast(ParamInfo, mixer.parameters(self)["qkv"])
        return dataclasses.replace(info, shape=(info.shape[0], inputs * self.width))

    @property
    def operations(self) -> Mapping[Operation, int]:
        """As `Eagle` says; `eagle.qkv` is what the first layer makes of the token."""
        (token,) = operations.products("eagle", self, {"qkv": self._qkv(1)})
        return {token: 1} | dict(super().operations)

    @property
    def _joining(self) -> dict[str, ParamInfo]:
        shape = self.width, self._num_features * self.width
        return {"fuse": ParamInfo(shape, self.dtype, ("embed", None))}


@dataclasses.dataclass(frozen=True)
class DFlash(Heads):
    """Layers of attention that fill in a block of drafts at once, behind the newest token (2026,
    arXiv 2602.06036). They read the target's embedding and propose by its output table.

    Attributes:
        features: numbers of the target's layers, from 1 on, whose outputs are fused: keys and
            values of what the target has seen are made of that.
        mask_id: token that stands in the place of a draft.
        block_tokens: of a block that they were trained with, the newest token among them.
    """

    features: tuple[int, ...] = ()
    mask_id: int = 0
    block_tokens: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        has_windows = any(spec.window is not None for spec in self.cache_specs)
        if {type(layer.mixer) for layer in self.pattern} != {Attention} or has_windows:
            raise InputError(
                "DFlash heads are layers of attention to all that is cached (layer_types: "
                "'full_attention'); those with windows are not read"
            )
        if not self.features:
            raise InputError("model.features of DFlash heads names at least one layer")
        if not 0 <= self.mask_id < self.vocab_size:
            raise InputError(f"model.mask_id is a token below {self.vocab_size}")
        if self.block_tokens < 2:
            raise InputError(f"model.block_tokens is at least 2, not {self.block_tokens}")

    def check_target(self, target: ModelConfig) -> None:
        super().check_target(target)
        self._check_features(target, self.features)

    def parameters(self) -> Declared:
        base = super().parameters()
        return {
            "layers": base["layers"],
            "final_norm": base["final_norm"],
            "state_norm": norm(self, self.width, "embed"),
            "fuse": self._fuse,
        }

    @property
    def operations(self) -> Mapping[Operation, int]:
        """As `ModelConfig` says; `dflash.fuse` runs for the target's states alone."""
        products = operations.products("dflash", self, {"fuse": self._fuse})
        return dict.fromkeys(products, 1) | dict(super().operations)

    @property
    def _fuse(self) -> ParamInfo:
        shape = self.width, len(self.features) * self.width
        return ParamInfo(shape, self.dtype, ("embed", None))


@dataclasses.dataclass(frozen=True)
class Medusa(Heads):
    """Residual blocks on the target's last hidden state; the n-th proposes the n-th draft (Cai et
    al. 2024, arXiv 2401.10774). They share one output table.
    """

    least_layers = 0
    num_heads: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.num_heads <= MOST_TREE_DRAFTS:
            raise InputError(
                f"model.num_heads is from 1 to {MOST_TREE_DRAFTS}, not {self.num_heads}"
            )

    def parameters(self) -> Declared:
        return {"blocks": (self._block,) * self.num_heads, "head": self._output_table}

    @property
    def operations(self) -> Mapping[Operation, int]:
        """Those of one head."""
        products = operations.products("medusa", self, {"block": self._block})
        return dict.fromkeys((*products, self._head), 1)

    @property
    def _block(self) -> ParamInfo:
        return ParamInfo((self.width, self.width), self.dtype, ("embed", None), "zeros")


def check_branches(model: ModelConfig) -> None:
    """Whether drafts for a model, and those of what drafts for it, may branch.

    Raises:
        InputError: a layer keeps what is of one path.
    """
    if model.has_states:
        raise InputError(
            f"{model.name} keeps states, which cannot branch: draft chains, without tree="
        )
    if not all(spec.can_tree for spec in model.cache_specs):
        raise InputError(
            "drafts that branch do not go with attention that chooses pages (token_budget) or "
            "pools tokens (stride), since what it keeps is of one path: draft chains, without "
            "tree="
        )


def proposer_of(draft: ModelConfig | None) -> str | None:
    """The proposer that a configuration belongs to."""
    if isinstance(draft, Heads):
        return {Eagle: "eagle", Eagle3: "eagle", DFlash: "dflash", Medusa: "medusa"}[type(draft)]
    return None if draft is None else "draft"


def check_draft(
    draft: ModelConfig | None,
    target: ModelConfig,
    proposer: str | None,
    levels: int,
    max_context: int,
    is_divided: bool,
) -> None:
    """Whether a model may draft for another.

    Args:
        proposer: `engine.drafts.proposer`.
        levels: the most drafts that follow each other.
        max_context: the longest sequence.
        is_divided: whether several chips work on a sequence.

    Raises:
        InputError: the message says what does not go together.
    """
    kinds = {
        "draft": "a draft model",
        "medusa": "Medusa heads",
        "eagle": "EAGLE heads",
        "dflash": "DFlash heads",
    }
    needed = proposer_of(draft)
    if needed != (proposer if proposer in kinds else None):
        raise InputError(
            f"engine.drafts.proposer={proposer}: goes with "
            f"{kinds.get(str(proposer), 'no model that drafts')}"
            + (f", not with {kinds[needed]}" if needed else "")
        )
    if draft is None:
        return
    if isinstance(draft, Heads):
        draft.check_target(target)
    if isinstance(draft, Medusa) and levels > draft.num_heads:
        raise InputError(
            f"{draft.name} has {draft.num_heads} heads: so many drafts follow each other at most, "
            f"not {levels}"
        )
    if isinstance(draft, DFlash) and levels >= draft.block_tokens:
        raise InputError(
            f"{draft.name} fills in blocks of {draft.block_tokens} tokens, the newest among them: "
            f"{draft.block_tokens - 1} drafts at most, not {levels}"
        )
    if draft.vocab_size != target.vocab_size:
        raise InputError(
            f"{draft.name} has a vocabulary of {draft.vocab_size} tokens, {target.name} one of "
            f"{target.vocab_size}: what drafts has the same"
        )
    if draft.max_context < max_context:
        raise InputError(
            f"{draft.name} drafts up to {draft.max_context} tokens: set engine.max_context to that "
            f"at most, not {max_context}"
        )
    if draft.has_states:
        raise InputError(f"{draft.name} cannot draft: it keeps states")
    if (draft.dtype, draft.cache_dtype) != (target.dtype, target.cache_dtype):
        raise InputError(f"{draft.name} cannot draft: its dtype, or its cache's, is another")
    if is_divided:
        raise InputError(
            f"with {kinds[str(needed)]} there is one chip, without prefill.chips or hosts"
        )
