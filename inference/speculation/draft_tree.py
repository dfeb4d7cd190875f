"""Trees of drafts. Their nodes are the newest token, number 0, and the drafts, each behind the one
that it follows; so the first nodes of a tree are a tree.
"""

import dataclasses
import functools
import heapq

import jax
import jax.numpy as jnp
import numpy as np

from configs.heads import MOST_TREE_DRAFTS, Heads, Medusa
from configs.settings.drafts import DraftConfig
from inference.speculation.proposer import Drafts
from layers.ragged import Rectangle

# That the likeliest token after a right one is right itself, the second likeliest, and so on: of
# heads with some hours of training. Only how fast it falls matters here.
_CHANCES = tuple(0.45 / (1 + rank) ** 1.5 for rank in range(1 + MOST_TREE_DRAFTS))


@dataclasses.dataclass(frozen=True)
class DraftTree:
    """A tree that is the same in every row: parents of the drafts, from node 1 on, level by level,
    and siblings from the likeliest on.
    """

    parents: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        """N, the newest token among them."""
        return 1 + len(self.parents)

    @functools.cached_property
    def depth(self) -> tuple[int, ...]:
        """Of each node, 0 for the newest token."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @functools.cached_property
    def rank(self) -> tuple[int, ...]:
        """How many siblings stand before each draft, from node 1 on."""
        return tuple(self.parents[:n].count(parent) for n, parent in enumerate(self.parents))

    @property
    def levels(self) -> int:
        """The most drafts that follow each other."""
        return max(self.depth)

    def drafts(self, token_Rk: jax.Array) -> Drafts:
        """What its nodes are in each row."""
        parent_Rk = jnp.broadcast_to(np.array(self.parents, np.int32), token_Rk.shape)
        return Drafts(token_Rk, parent_Rk=parent_Rk, levels=self.levels)

    def level(self, depth: int) -> tuple[int, ...]:
        return tuple(n for n, node_depth in enumerate(self.depth) if node_depth == depth)

    def num_ranks(self, depth: int) -> int:
        """The most children of a node above that depth."""
        return 1 + max(self.rank[n - 1] for n in self.level(depth))


def of(drafts: DraftConfig, width: int) -> DraftTree | None:
    """The tree that all rows of so many nodes are; None: chains, or each row a tree of its own."""
    return DraftTree(drafts.draft_tree[: width - 1]) if drafts.draft_tree and width > 1 else None


def settings(draft: Heads, num_drafts: int) -> dict[str, object]:
    """Settings of an engine whose heads draft a tree of so many: EAGLE's shape it themselves."""
    if isinstance(draft, Medusa):
        return {"draft_tree": likeliest(num_drafts, draft.num_heads)}
    return sizes(num_drafts)


def sizes(num_drafts: int) -> dict[str, object]:
    """Settings of an engine whose EAGLE heads draft a tree of so many: five levels, or fewer."""
    levels = min(5, 1 + num_drafts // 2)
    return {"tree_levels": levels, "tree_branches": max(1, num_drafts // max(1, levels - 1))}


def branching(rectangle: Rectangle, parent_Rk: jax.Array, levels: int) -> Rectangle:
    """A rectangle of chains whose tokens are a tree's nodes instead; arguments as in `Drafts`."""
    rows, nodes = rectangle.position_YW.shape
    parent_RN = jnp.pad(parent_Rk, ((0, 0), (1, 0))).astype(jnp.int32)
    node_RN = jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (rows, nodes))
    bits_RN, depth_RN = jnp.ones((rows, nodes), jnp.uint32), jnp.zeros((rows, nodes), jnp.int32)
    for _ in range(levels):  # up to the root, which is its own parent here
        bits_RN |= jnp.uint32(1) << node_RN.astype(jnp.uint32)
        depth_RN += node_RN > 0
        node_RN = jnp.take_along_axis(parent_RN, node_RN, axis=1)
    position_RN = rectangle.position_YW[:, :1] + depth_RN
    return dataclasses.replace(
        rectangle,
        position_YW=jnp.where(rectangle.valid_YW, position_RN, rectangle.position_YW),
        ancestors_YW=bits_RN,
    )


def likeliest(num_drafts: int, most_levels: int) -> tuple[int, ...]:
    """Parents of the drafts that are accepted most often, of all trees of so many, where a node's
    n-th child is right as often anywhere (Chen et al. 2024, arXiv 2402.12374).
    """
    # A branch is the ranks of its nodes; what extends one, or replaces its last, is less likely.
    open_branches: list[tuple[float, tuple[int, ...]]] = [(-_CHANCES[0], (0,))]
    taken: list[tuple[int, ...]] = []
    while len(taken) < num_drafts:
        minus_chance, branch = heapq.heappop(open_branches)
        taken.append(branch)
        rank = branch[-1]
        sibling = minus_chance / _CHANCES[rank] * _CHANCES[rank + 1]
        heapq.heappush(open_branches, (sibling, (*branch[:-1], rank + 1)))
        if len(branch) < most_levels:
            heapq.heappush(open_branches, (minus_chance * _CHANCES[0], (*branch, 0)))
    taken.sort(key=lambda branch: (len(branch), branch))
    node: dict[tuple[int, ...], int] = {(): 0} | {branch: n for n, branch in enumerate(taken, 1)}
    return tuple(node[branch[:-1]] for branch in taken)
