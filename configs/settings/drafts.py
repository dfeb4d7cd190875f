"""Speculation: how many tokens are drafted, what proposes them, and which of them are accepted."""

import dataclasses
from typing import ClassVar

from configs.errors import InputError
from configs.heads import BRANCHING, MOST_TREE_DRAFTS
from configs.settings.section import Section, setting
from configs.settings.shapes import MOST_ROWS

LOOKUPS = "ngram", "suffix"  # proposers that read tokens alone
PROPOSERS = (*LOOKUPS, "draft", "medusa", "eagle", "dflash")
ACCEPTANCES = ("coupled", "rejection", "typical")


@dataclasses.dataclass(frozen=True)
class DraftConfig(Section):
    """Drafts that a step verifies; their tree, if they branch."""

    path: ClassVar[str] = "engine.drafts"

    num_drafts: int = setting(
        0, "Draft tokens of a sequence that one step may verify (k).", lower=0, upper=MOST_ROWS
    )
    adapt_drafts: bool = setting(
        False, "Steps verify 0 to num_drafts drafts, as many as give the most tokens per second.",
        host_only=True,
    )  # fmt: skip
    draft_tree: tuple[int, ...] = setting(
        (),
        "A tree of drafts, level by level: the node that each draft follows. 0 is the newest "
        "token, n the n-th draft. (): each draft follows the one before it.",
    )
    tree_levels: int = setting(
        0,
        "Levels of the tree that EAGLE heads shape by their probabilities: the most drafts that "
        "follow each other. 0: no such tree.",
    )
    tree_branches: int = setting(
        0, "Nodes of each level of such a tree that have children, and the children of each."
    )
    proposer: str | None = setting(
        None, "Source of drafts on the device; None: the caller sets `Sequence.drafts`.",
        one_of=PROPOSERS,
    )  # fmt: skip
    acceptance: str = setting(
        "coupled",
        "Rule that accepts drafts. 'coupled': drafts that equal the tokens of plain decoding, so "
        "that answers do not depend on drafts. 'rejection': more drafts; answers differ, their "
        "probability distribution does not. 'typical': all drafts that the model finds likely "
        "enough, which changes the distribution.",
        one_of=ACCEPTANCES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.proposer and not self.num_drafts:
            raise InputError(
                f"engine.drafts.proposer={self.proposer}: needs engine.drafts.num_drafts of at "
                "least 1"
            )
        if self.adapt_drafts and not self.proposer:
            raise InputError("engine.drafts.adapt_drafts: needs engine.drafts.proposer")
        if self.acceptance != "coupled" and not self.proposer:
            raise InputError(
                f"engine.drafts.acceptance={self.acceptance}: needs engine.drafts.proposer"
            )
        if self.has_tree or self.tree_branches:
            self._check_tree()

    def _check_tree(self) -> None:
        tree = self.draft_tree
        name, proposers = ("draft_tree", BRANCHING) if tree else ("tree_levels", BRANCHING[:1])
        if self.proposer not in proposers:
            raise InputError(
                f"engine.drafts.{name}: goes with engine.drafts.proposer "
                f"{' or '.join(proposers)}, not with {self.proposer}"
            )
        if self.num_drafts > MOST_TREE_DRAFTS:
            raise InputError(
                f"engine.drafts.num_drafts={self.num_drafts}: must be at most {MOST_TREE_DRAFTS} "
                "for a tree"
            )
        if not tree:
            self._check_levels()
            return
        if self.tree_levels or self.tree_branches:
            raise InputError(
                "engine.drafts.draft_tree: describes the whole tree; leave tree_levels and "
                "tree_branches out"
            )
        if len(tree) != self.num_drafts:
            raise InputError(
                f"engine.drafts.draft_tree: names the nodes that {len(tree)} drafts follow, but "
                f"engine.drafts.num_drafts={self.num_drafts}"
            )
        is_before = all(0 <= parent < n for n, parent in enumerate(tree, 1))
        if not is_before or list(tree) != sorted(tree):
            raise InputError(
                f"engine.drafts.draft_tree={tree}: must rise from 0, level by level, and each "
                "draft follows an earlier one"
            )

    def _check_levels(self) -> None:
        levels, branches, drafts = self.tree_levels, self.tree_branches, self.num_drafts
        num_nodes = branches + (levels - 1) * branches**2
        if levels < 1 or branches < 1 or not branches * (levels - 1) <= drafts <= num_nodes:
            raise InputError(
                f"engine.drafts.tree_levels={levels}, tree_branches={branches}: must be at least "
                f"1, with num_drafts ({drafts}) from branches x (levels - 1) to branches + "
                "(levels - 1) x branches^2"
            )

    @property
    def has_tree(self) -> bool:
        return bool(self.draft_tree or self.tree_levels)

    @property
    def levels(self) -> int:
        """The most drafts of a step that follow each other."""
        return len(self.level_sizes) or self.num_drafts

    @property
    def level_sizes(self) -> tuple[int, ...]:
        """Nodes of each level of a tree but its last, from the newest token on; (): no tree."""
        if self.tree_levels:
            return (1, *(self.tree_branches,) * (self.tree_levels - 1))
        depth = [0]
        for parent in self.draft_tree:
            depth.append(1 + depth[parent])
        return tuple(depth.count(level) for level in range(max(depth)))
