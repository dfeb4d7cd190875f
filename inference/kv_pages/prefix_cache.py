"""Cached pages outlive their sequence and are found again by the tokens they hold. Integers only:
no device memory here.

Pages that only the tree refers to are evictable, and count as available: when room is needed they
are evicted, least recently used first. An evicted leaf is offloaded to the host where copying it
back is cheaper than computing it again. So preemption needs nothing of its own: a preempted
sequence frees its pages, and its next admission is a match.

A path that is expected again (`retain`), as of a conversation while a tool runs, is renewed in
place of an eviction. So clocks give pages another chance (Corbato 1968). How often says its price,
as in GreedyDual (Young 1994): one lifetime in the cache for each ordinary page that costs as much.
The price of an ordinary page counts only if it is used again.

Why an evictable page can always be evicted: in a group without a window a sequence has references
to every page of its path, so nothing below an evictable page is in use; and since a path is freed
deepest page first, the least recently used page of such a group is a leaf's. In a group with a
window an evictable page may be any node's (windows slide), but it may go alone. A sequence that
gave up pages of its path (`PageManager.shorten`) does not look for the others in the tree again:
where one above them is evicted they leave the tree with it, and stay with the sequence.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from configs.cache import CacheSpec
from inference.kv_pages.page_pool import PagePool
from inference.kv_pages.radix_tree import Node, RadixTree, Retention


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One page to be copied between device and host."""

    group: int
    page: int
    host_page: int
    to_host: bool

    @property
    def kind(self) -> tuple[int, bool]:
        """What transfers of one call have in common."""
        return self.group, self.to_host


_MAX_RENEWALS = 8  # of a path that never comes again


class PageCosts(NamedTuple):
    """What the planner says of cached pages, by the tokens with which they end.

    Attributes:
        should_offload: whether restoring a page is cheaper than computing it again.
        return_percent: of the time that a prompt's first page takes, the time until a page is there
            again that was evicted.
    """

    should_offload: Callable[[int], bool] = lambda num_tokens: True
    return_percent: Callable[[int], int] = lambda num_tokens: 100


EQUAL_COSTS = PageCosts()  # every page's; all are offloaded where there is a host pool


@dataclasses.dataclass(frozen=True)
class Match:
    """A cached prefix; valid until the cache changes.

    Attributes:
        nodes: its path, from the root's child down.
        num_tokens: tokens that need not be computed.
        num_known_tokens: tokens whose pages are cached, behind which not every group can resume.
        num_new_pages: by how many pages of each group `attach` lowers `num_available_pages`: those
            to be restored from the host, and those that are evictable now.
    """

    nodes: tuple[Node, ...]
    num_tokens: int
    num_known_tokens: int
    num_new_pages: tuple[int, ...]


class PrefixCache:
    """Decides which pages stay cached, and for how long. All pages of the pool are allocated and
    freed through it.
    """

    def __init__(
        self,
        pool: PagePool,
        specs: Sequence[CacheSpec],
        page_tokens: int,
        host_pool: PagePool | None = None,
        costs: PageCosts = EQUAL_COSTS,
    ):
        """Starts empty.

        Args:
            specs: what each page group caches.
            host_pool: host pages, in the same groups; None where nothing is offloaded.
            costs: of evicted pages.
        """
        self._pool = pool
        self._host_pool = host_pool or PagePool((1,) * len(specs))
        self._specs = tuple(specs)
        self._page_tokens = page_tokens
        self._costs = costs
        self._num_reused, self._num_evicted = 0, 0
        self._tree = RadixTree(pool, self._host_pool, self._specs)
        self._transfers: list[Transfer] = []

    @property
    def num_nodes(self) -> int:
        return self._tree.num_nodes

    @property
    def num_available_pages(self) -> tuple[int, ...]:
        """Pages of each group that can be allocated: free or evictable."""
        free = self._pool.num_free_pages
        return tuple(n + len(pages) for n, pages in zip(free, self._tree.evictable, strict=True))

    @property
    def _num_evictable(self) -> int:
        return sum(map(len, self._tree.evictable))

    def can_allocate(self, needs: Sequence[int]) -> bool:
        """Whether each group has as many free or evictable pages as `needs` asks of it."""
        return all(n <= m for n, m in zip(needs, self.num_available_pages, strict=True))

    def allocate(self, group: int, n: int) -> list[int]:
        """Takes n pages, each with one reference, and evicts no more than needed for them; the
        caller has asked `can_allocate`.
        """
        while self._pool.num_free_pages[group] < n:
            num_before = self._num_evictable
            self._evict(group)
            self._num_evicted += num_before - self._num_evictable
        return self._pool.allocate(group, n)

    def free(self, group: int, pages: Sequence[int]) -> None:
        """Drops a sequence's reference to each of its pages, given in their order. Sinks are
        skipped.
        """
        for page in reversed(pages):  # a parent is used more recently than its children
            if page:
                self._tree.free(group, page)

    def match_prefix(
        self, tokens: Sequence[int], key: Hashable = (), limit: int | None = None
    ) -> Match:
        """The longest cached prefix, in whole pages, after which every group can resume; changes
        nothing.

        Args:
            key: what else must be equal, such as the version of the weights.
            limit: the most tokens to match; None leaves one to be fed.
        """
        size, path, num_matched = self._page_tokens, [], 0
        windows = [(g, spec) for g, spec in enumerate(self._specs) if spec.window is not None]
        runs = [0] * len(windows)  # pages in a row that end with the node's
        heads = [0] * len(windows)  # pages in a row that begin with the path
        node = self._tree.roots.children.get(key)
        limit = len(tokens) - 1 if limit is None else limit
        for stop in range(size, limit + 1, size):
            node = node and node.children.get(tuple(tokens[stop - size : stop]))
            if node is None:
                break
            path.append(node)
            can_resume = True  # as far as groups without a window go: a path has all their pages
            for i, (group, spec) in enumerate(windows):
                is_kept = node.pages[group] or node.host_pages[group]
                runs[i] = runs[i] + 1 if is_kept else 0
                heads[i] += runs[i] == len(path)
                dead = spec.dead_pages(stop, size)
                can_resume &= runs[i] >= len(path) - dead.stop
                can_resume &= heads[i] >= min(len(path), dead.start)
            if can_resume:
                num_matched = len(path)
        nodes = tuple(path[:num_matched])
        num_new_pages = tuple(
            sum(
                not node.pages[g] or node.pages[g] in self._tree.evictable[g]
                for node in (nodes[index] for index in needed)
            )
            for g, needed in enumerate(self._needed(num_matched))
        )
        return Match(nodes, num_matched * size, len(path) * size, num_new_pages)

    def attach(self, match: Match) -> list[list[int]]:
        """Adds a sequence's references to the pages it resumes on, and restores those on the host;
        the caller has asked `can_allocate` for `match.num_new_pages` and all else it needs.

        Returns:
            The sequence's pages by group, 0 where a window does not need them.
        """
        needed = self._needed(len(match.nodes))
        parts = [[match.nodes[index] for index in indices] for indices in needed]
        for node in match.nodes:
            if node.retention and node.retention.deepest is node:  # it has come again
                node.retention.num_renewals = 0
        for group, nodes in enumerate(parts):  # all of them, before an allocation evicts any
            for node in nodes:
                self._tree.offloaded[group].pop(node.host_pages[group], None)
                self._num_reused += node.pages[group] in self._tree.evictable[group]
                if node.pages[group]:
                    self._tree.share(group, node.pages[group])
        for group, nodes in enumerate(parts):
            for node in nodes:
                if not node.pages[group]:
                    self._restore(node, group)
        pages = [[0] * len(match.nodes) for _ in parts]
        for group, indices in enumerate(needed):
            for index in indices:
                pages[group][index] = match.nodes[index].pages[group]
        return pages

    def insert(
        self,
        tokens: Sequence[int],
        num_tokens: int,
        pages: Sequence[list[int]],
        key: Hashable = (),
        start: Node | None = None,
    ) -> Node | None:
        """Caches the full pages of a running sequence, as their number grows. Where the cache has
        a page of the same tokens, the sequence's own is freed and replaced by it, in `pages` too.

        Args:
            tokens: the sequence's.
            num_tokens: how many of them are computed.
            pages: its page lists by group, 0 where a window has slid past.
            key: as for `match_prefix`; the same for all of a sequence's pages.
            start: what the last call returned, or the last node of the attached match; None for a
                sequence that has neither.

        Returns:
            The node of the deepest page that is kept, for the next call.
        """
        size, stop = self._page_tokens, num_tokens // self._page_tokens
        depth = start.depth if start else 0
        while stop > depth and not any(group_pages[stop - 1] for group_pages in pages):
            stop -= 1  # behind the last page that can be kept nothing could be found
        if stop <= depth:
            return start
        tree, node = self._tree, start
        if node is None or node not in tree:  # a window may slide past the deepest full page
            node = tree.child(tree.roots, key)
        for index in range(node.depth, stop):
            node = tree.child(node, tuple(tokens[index * size : (index + 1) * size]))
            for group, group_pages in enumerate(pages):
                if group_pages[index] and not node.pages[group]:
                    tree.remove_page(node, group)  # the copy on the host
                    tree.share(group, group_pages[index])
                    tree.set_page(node, group, group_pages[index])
                elif group_pages[index] and group_pages[index] != node.pages[group]:
                    tree.share(group, node.pages[group])
                    tree.free(group, group_pages[index])
                    group_pages[index] = node.pages[group]
        return node

    def retain(self, tokens: Sequence[int], key: Hashable = ()) -> None:
        """Lets the cached pages of these tokens, which will come again, outlive others.

        Args:
            key: as for `match_prefix`.
        """
        match = self.match_prefix(tokens, key, len(tokens))
        if match.nodes:
            retention = Retention(match.nodes[-1], self._num_renewals(match.num_tokens))
            for node in match.nodes:
                node.retention = retention

    def drop(self, key: Hashable) -> None:
        """Removes all that was inserted under a key; pages in use stay with their sequences."""
        if root := self._tree.roots.children.get(key):
            self._tree.remove_subtree(root)

    def take_transfers(self) -> tuple[Transfer, ...]:
        """The copies to make since the last call, in this order and before the next step writes."""
        transfers, self._transfers = tuple(self._transfers), []
        return transfers

    def check_integrity(
        self, holders: Iterable[Sequence[Sequence[int]]], has_gaps: bool = False
    ) -> None:
        """Raises RuntimeError where tree and pools contradict each other, or the page lists (one a
        group) of all running sequences, which may have `has_gaps`: not all pages of their paths.
        """
        self._tree.check_integrity(holders, has_gaps)

    def _needed(self, num_pages: int) -> list[Sequence[int]]:
        """Which pages of a path each group resumes on: its last ones, also its first, or none."""
        size = self._page_tokens
        return [spec.resume_at(num_pages * size, size) for spec in self._specs]

    def _evict(self, group: int) -> None:
        """Frees the least recently used evictable page of a group; where its node is a leaf with
        no page in use, the node's pages of all groups, which may be offloaded. A snapshot of states
        may be, wherever it is.
        """
        node = self._victim(group)
        device_pages = [(g, page) for g, page in enumerate(node.pages) if page]
        if self._specs[group].is_state and self._may_offload(node, [group]):
            self._offload(node, group, node.pages[group])
        elif node.num_device_children or any(
            page not in self._tree.evictable[g] for g, page in device_pages
        ):
            self._tree.evict(node, group)
        elif self._may_offload(node, [g for g, _ in device_pages]):
            for g, page in device_pages:
                self._offload(node, g, page)
        else:
            for g, _ in device_pages:
                if node.pages[g]:  # not gone with another group's
                    self._tree.evict(node, g)

    def _victim(self, group: int) -> Node:
        """The node of the least recently used page of a group, after every path before it that is
        expected again was renewed, once.
        """
        renewed: set[Retention] = set()
        while True:
            node = next(iter(self._tree.evictable[group].values()))
            retention = node.retention
            if retention is None or not retention.num_renewals or retention in renewed:
                return node
            renewed.add(retention)
            retention.num_renewals -= 1
            self._tree.renew(retention.deepest)

    def _num_renewals(self, num_tokens: int) -> int:
        """How many lifetimes of ordinary pages a path of so many tokens is worth, at least one."""
        num_reused = self._num_reused + 1  # nothing is known at first
        percent = self._costs.return_percent(num_tokens) * (num_reused + self._num_evicted)
        return min(_MAX_RENEWALS, max(1, percent // (100 * num_reused)))

    def _may_offload(self, node: Node, groups: Iterable[int]) -> bool:
        """Whether it pays to offload a node's pages, and the host has room in these groups."""
        has_room = all(self._host_pool.num_free_pages[g] or self._tree.offloaded[g] for g in groups)
        return has_room and self._costs.should_offload(node.depth * self._page_tokens)

    def _offload(self, node: Node, group: int, page: int) -> None:
        """Moves an evictable page to the host; where that is full, in place of its least recently
        used page.
        """
        if not self._host_pool.num_free_pages[group]:
            self._tree.evict(next(iter(self._tree.offloaded[group].values())), group)
        [host_page] = self._host_pool.allocate(group, 1)
        self._transfers.append(Transfer(group, page, host_page, to_host=True))
        self._tree.remove_page(node, group)
        self._tree.set_host_page(node, group, host_page)

    def _restore(self, node: Node, group: int) -> None:
        [page] = self.allocate(group, 1)
        self._transfers.append(Transfer(group, page, node.host_pages[group], to_host=False))
        self._tree.remove_page(node, group)
        self._tree.set_page(node, group, page)
        self._tree.share(group, page)
