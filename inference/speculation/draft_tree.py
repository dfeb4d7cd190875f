"""The shape of a tree of drafts, the same for every row of a step.

Its nodes are the newest token, number 0, and the drafts, each behind the node that it follows:
level by level, and siblings from the likeliest on. So the first nodes of a tree are a tree.
"""

import dataclasses
import functools
import heapq

from configs.engine import MOST_TREE_DRAFTS, EngineConfig

# That the likeliest token after a right one is right itself, the second likeliest, and so on: of
# heads with some hours of training. Only how fast it falls matters here.
_CHANCES = tuple(0.45 / (1 + rank) ** 1.5 for rank in range(1 + MOST_TREE_DRAFTS))


@dataclasses.dataclass(frozen=True)
class DraftTree:
    """Parents of the drafts, from node 1 on; each stands before its children."""

    parents: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        """N, the newest token among them."""
        return 1 + len(self.parents)

    @functools.cached_property
    def depth(self) -> tuple[int, ...]:
        """Of each node, 0 for the newest token."""
        found = [0]
        for parent in self.parents:
            found.append(found[parent] + 1)
        return tuple(found)

    @functools.cached_property
    def rank(self) -> tuple[int, ...]:
        """How many siblings stand before each draft, from node 1 on."""
        return tuple(self.parents[:n].count(parent) for n, parent in enumerate(self.parents))

    @functools.cached_property
    def ancestors(self) -> tuple[int, ...]:
        """As `Rectangle.ancestors_YW`: of each node the bits of its branch, its own among them."""
        found = [1]
        for n, parent in enumerate(self.parents, 1):
            found.append(found[parent] | 1 << n)
        return tuple(found)

    @property
    def height(self) -> int:
        """The most tokens that a step adds with it: those of its longest branch, and one."""
        return 1 + max(self.depth)

    def level(self, depth: int) -> tuple[int, ...]:
        """The nodes of a depth."""
        return tuple(n for n, own in enumerate(self.depth) if own == depth)

    def num_ranks(self, depth: int) -> int:
        """The most children of a node above that depth."""
        return 1 + max(self.rank[n - 1] for n in self.level(depth))


def of(engine: EngineConfig, width: int) -> DraftTree | None:
    """The tree that rows of so many nodes are; None: they are chains."""
    return DraftTree(engine.draft_tree[: width - 1]) if engine.draft_tree and width > 1 else None


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
