"""The cache algebra: what a layer keeps of the past, declared once.

Allocator, step and planner read the same `CacheSpec`, so a predicted byte is an allocated byte.
Layers whose specs are equal form a page group; a sequence holds one list of pages per group.

A spec says nothing of arrays or devices: `layers/kv_cache.py` turns it into leaves.
"""

import dataclasses

from configs.errors import InputError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Keys that attention folds in at a time: page tables and padded texts are whole blocks, so that a
# block never ends in the middle of a page.
BLOCK_TOKENS = 128


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """What one layer caches. A spec with neither tokens nor state of its own reads its `owner`'s.

    Attributes:
        elements_per_token: elements stored for each live token (2 K H for keys and values).
        elements_per_sequence: elements of a recurrent state; kept 1 + k times, so that a rejected
            draft is undone by choosing the state after the last accepted token.
        window: tokens that stay visible, the newest included; None keeps all of them.
        owner: index of the earlier layer whose cache this layer reads (cross-layer attention).
        shard_axis: logical axis the elements are split over, None for replicated.
    """

    elements_per_token: int = 0
    elements_per_sequence: int = 0
    window: int | None = None
    owner: int | None = None
    shard_axis: str | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise InputError(f"a cache window is at least 1 token, not {self.window}")
        if self.owner is not None and (self.elements_per_token or self.elements_per_sequence):
            raise InputError("a cache shared with an earlier layer stores nothing of its own")
        if self.elements_per_token and self.elements_per_sequence:
            raise InputError("a layer's cache holds elements per token or per sequence, not both")

    @property
    def can_tree(self) -> bool:
        """Whether drafts may branch: pages hold every branch, a recurrent state only one path."""
        return self.elements_per_sequence == 0

    def bytes_per_token(self, dtype: str) -> int:
        """Bytes each live token adds to this layer."""
        return self.elements_per_token * DTYPE_BYTES[dtype]

    def bytes_per_sequence(self, num_drafts: int = 0) -> int:
        """Bytes a sequence holds whatever its length; states are float32, one per verified
        token.
        """
        return self.elements_per_sequence * 4 * (1 + num_drafts)

    def live_from(self, length: int) -> int:
        """First position that the next token (at position `length`) can still see."""
        return 0 if self.window is None else max(0, length + 1 - self.window)

    def pages_for(self, start: int, stop: int, page_tokens: int) -> range:
        """Page indices (of the sequence) that positions [start, stop) touch."""
        return range(start // page_tokens, -(-stop // page_tokens))

    def resume_at(self, boundary: int, page_tokens: int) -> range | None:
        """Page indices a sequence needs to continue at `boundary`; None where only a snapshot of
        the state will do.
        """
        if self.elements_per_sequence:
            return None
        return self.pages_for(self.live_from(boundary), boundary, page_tokens)


def keys_values(num_kv_heads: int, head_width: int, window: int | None = None) -> CacheSpec:
    """Paged keys and values: MHA, GQA and MQA differ only in K; a window forgets."""
    return CacheSpec(2 * num_kv_heads * head_width, window=window, shard_axis="kv_heads")


def latent(rank: int, rope_width: int) -> CacheSpec:
    """Multi-head latent attention: one vector for all heads and one rotary key a token."""
    return CacheSpec(rank + rope_width)


def recurrent(elements: int) -> CacheSpec:
    """A state of fixed size: SSM, linear attention, the tail of a convolution."""
    return CacheSpec(elements_per_sequence=elements)


def shared(owner: int) -> CacheSpec:
    """Cross-layer attention (Brandon et al. 2024, arXiv 2405.12981): reads an earlier layer's
    cache.
    """
    return CacheSpec(owner=owner)


@dataclasses.dataclass(frozen=True)
class PageGroup:
    """Layers with one spec: a sequence's pages in this group hold the same token range in each of
    them.
    """

    spec: CacheSpec
    layers: tuple[int, ...]

    def bytes_per_page(self, dtype: str, page_tokens: int) -> int:
        """Bytes of one page across the group's layers."""
        return self.spec.bytes_per_token(dtype) * page_tokens * len(self.layers)


def page_groups(specs: tuple[CacheSpec, ...]) -> tuple[PageGroup, ...]:
    """Groups the layers that store tokens by equal spec, in order of first appearance."""
    members: dict[CacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        if spec.elements_per_token:
            members.setdefault(spec, []).append(layer)
    return tuple(PageGroup(spec, tuple(layers)) for spec, layers in members.items())
