"""Pages that outlive their sequence, found again by the tokens they hold. Integers only: no device
memory here.

Idle pages, which only the tree names, count as available: they are evicted, least recently used
first, when somebody needs room. An evicted leaf moves to a host tier where copying it back is
cheaper than computing it again. So a preempted sequence needs no special care: it lets go of its
pages, and its re-admission is a match.

Why idle pages can always be had: in a group without a window a sequence holds every page of its
path, so nothing below an idle page is in use; and as a path is let go of deepest page first, the
least recently used page of such a group is a leaf's. In a group with a window an idle page may be
any node's (windows slide), but it may go alone.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Sequence

from configs.cache import CacheSpec
from inference.kv_pages.page_pool import PagePool
from inference.kv_pages.radix_tree import Node, PrefixTree


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One page to be copied between device and host."""

    group: int
    page: int
    host_page: int
    to_host: bool


@dataclasses.dataclass(frozen=True)
class Match:
    """A cached prefix; good until the cache changes.

    Attributes:
        nodes: its path, from the root's child down.
        num_tokens: tokens that need not be computed.
        num_new_pages: by how many pages of each group `acquire` lowers `num_available_pages`:
            those that come back from the host, and those that are idle now.
    """

    nodes: tuple[Node, ...]
    num_tokens: int
    num_new_pages: tuple[int, ...]


class PrefixCache:
    """Which page of which sequence is kept, and for how long. Whoever takes pages from the pool or
    lets go of them does it here.
    """

    def __init__(
        self,
        pool: PagePool,
        specs: Sequence[CacheSpec],
        page_tokens: int,
        host: PagePool | None = None,
        spills: Callable[[int], bool] = lambda num_tokens: True,
        has_states: bool = False,
    ):
        """Starts empty.

        Args:
            pool: the device's pages.
            specs: what each page group keeps.
            page_tokens: tokens a page.
            host: ids of host pages, in the same groups; None for no host tier.
            spills: whether copying back a node that ends after `num_tokens` tokens beats
                computing it again.
            has_states: the model keeps recurrent states, which no page holds: nothing ever matches.
        """
        self._pool = pool
        self._host = host or PagePool((1,) * len(specs))
        self._specs = tuple(specs)
        self._page_tokens = page_tokens
        self._spills = spills
        self._has_states = has_states
        self._tree = PrefixTree(pool, self._host, self._specs)
        self._transfers: list[Transfer] = []
        self.num_spilled_pages = 0  # copied to the host so far
        self.num_restored_pages = 0  # copied back so far

    @property
    def num_nodes(self) -> int:
        """Pages of tokens that the cache knows."""
        return self._tree.num_nodes

    @property
    def num_available_pages(self) -> tuple[int, ...]:
        """Pages of each group that `allocate` can give: free or idle."""
        free = self._pool.num_free_pages
        return tuple(n + len(idle) for n, idle in zip(free, self._tree.idle, strict=True))

    def can_allocate(self, needs: Sequence[int]) -> bool:
        """Whether every group has the pages, free or idle."""
        return all(n <= m for n, m in zip(needs, self.num_available_pages, strict=True))

    def allocate(self, group: int, n: int) -> list[int]:
        """Takes n pages, each with one reference, evicting no more than that needs; the caller has
        asked `can_allocate`.
        """
        while self._pool.num_free_pages[group] < n:
            self._evict(group)
        return self._pool.allocate(group, n)

    def release(self, group: int, pages: Sequence[int]) -> None:
        """Drops a sequence's reference to each of its pages, given in its order. Sinks are
        skipped.
        """
        for page in reversed(pages):  # a parent is used more recently than its children
            if page:
                self._tree.release(group, page)

    def match(self, tokens: Sequence[int], key: Hashable = (), limit: int | None = None) -> Match:
        """The longest boundary between pages at which every group can resume; changes nothing.

        Args:
            tokens: of a sequence.
            key: what else must be equal, such as the version of the weights.
            limit: the most tokens to match; None leaves one to be fed.
        """
        size, path, num_matched = self._page_tokens, [], 0
        windows = [(g, spec) for g, spec in enumerate(self._specs) if spec.window is not None]
        runs = [0] * len(windows)  # pages in a row that end with the node's
        node = None if self._has_states else self._tree.roots.children.get(key)
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
                can_resume &= runs[i] >= len(spec.resume_at(stop, size) or ())
            if can_resume:
                num_matched = len(path)
        nodes = tuple(path[:num_matched])
        num_new_pages = tuple(
            sum(not n.pages[g] or n.pages[g] in self._tree.idle[g] for n in nodes[part])
            for g, part in enumerate(self._needed(num_matched))
        )
        return Match(nodes, num_matched * size, num_new_pages)

    def acquire(self, match: Match) -> list[list[int]]:
        """Adds a sequence's references to the pages it resumes on, and brings back those on the
        host; the caller has asked `can_allocate` for `match.num_new_pages` and all else it needs.

        Returns:
            the sequence's pages by group, 0 where a window does not need them.
        """
        parts = [match.nodes[part] for part in self._needed(len(match.nodes))]
        for group, nodes in enumerate(parts):  # all, before an allocation evicts any
            for node in nodes:
                self._tree.spilled[group].pop(node.host_pages[group], None)
                if node.pages[group]:
                    self._tree.hold(group, node.pages[group])
        for group, nodes in enumerate(parts):
            for node in nodes:
                if not node.pages[group]:
                    self._restore(node, group)
        return [
            [0] * (len(match.nodes) - len(nodes)) + [node.pages[group] for node in nodes]
            for group, nodes in enumerate(parts)
        ]

    def insert(
        self,
        tokens: Sequence[int],
        num_tokens: int,
        pages: Sequence[list[int]],
        key: Hashable = (),
        start: Node | None = None,
    ) -> Node | None:
        """Makes the full pages of a running sequence known, as they grow. Where the cache has a
        page of the same tokens, the sequence's own is given up for it, in `pages` too.

        Args:
            tokens: the sequence's.
            num_tokens: how many of them are computed.
            pages: its page lists by group, 0 where a window has slid past.
            key: as for `match`; one for all of a sequence's pages.
            start: what the last call returned, or the last node of the match acquired; None for a
                sequence that has neither.

        Returns:
            its deepest node, for the next call.
        """
        size, stop = self._page_tokens, num_tokens // self._page_tokens
        if self._has_states or stop <= (start.depth if start else 0):
            return start
        tree, node = self._tree, start
        if node is None or not tree.holds(node):  # a window may slide past the deepest full page
            node = tree.child(tree.roots, key)
        for index in range(node.depth, stop):
            node = tree.child(node, tuple(tokens[index * size : (index + 1) * size]))
            for group, own in enumerate(pages):
                if own[index] and not node.pages[group]:
                    tree.forget(node, group)  # the copy on the host
                    tree.hold(group, own[index])
                    tree.name(node, group, own[index])
                elif own[index] and own[index] != node.pages[group]:
                    tree.hold(group, node.pages[group])
                    tree.release(group, own[index])
                    own[index] = node.pages[group]
        tree.prune(node)
        return node

    def drop(self, key: Hashable) -> None:
        """Forgets all that was inserted under a key; pages in use stay with their sequences."""
        if root := self._tree.roots.children.get(key):
            self._tree.remove(root)

    def clear(self) -> None:
        """Forgets everything, with the transfers not yet taken: the device lost its cache, and a
        copy on the host is of no use without the pages before it.
        """
        for key in list(self._tree.roots.children):
            self.drop(key)
        self._transfers.clear()

    def take_transfers(self) -> tuple[Transfer, ...]:
        """What to copy since the last call, in this order and before the next step writes."""
        transfers, self._transfers = tuple(self._transfers), []
        return transfers

    def check_integrity(self, holders: Iterable[Sequence[Sequence[int]]]) -> None:
        """Compares the cache's books with each other and with the page lists (one a group) of all
        running sequences.

        Raises:
            RuntimeError: they do not add up.
        """
        self._tree.check_integrity(holders)

    def _needed(self, num_pages: int) -> list[slice]:
        """Which pages of a path each group resumes on: its last ones, or none."""
        size = self._page_tokens
        ranges = [spec.resume_at(num_pages * size, size) for spec in self._specs]
        return [slice(num_pages - len(pages or ()), num_pages) for pages in ranges]

    def _evict(self, group: int) -> None:
        """Frees the least recently used idle page of a group: with its node where that is an idle
        leaf, else alone.
        """
        node = next(iter(self._tree.idle[group].values()))
        held = [(g, page) for g, page in enumerate(node.pages) if page]
        if node.num_device_children or any(page not in self._tree.idle[g] for g, page in held):
            self._tree.lose(node, group)
        elif self._spills(node.depth * self._page_tokens) and all(
            self._host.num_free_pages[g] or self._tree.spilled[g] for g, _ in held
        ):
            for g, page in held:
                self._spill(node, g, page)
        else:
            for g, _ in held:
                if node.pages[g]:  # not gone with another group's
                    self._tree.lose(node, g)

    def _spill(self, node: Node, group: int, page: int) -> None:
        """Moves an idle page to the host, where the least recently used one makes room."""
        if not self._host.num_free_pages[group]:
            self._tree.lose(next(iter(self._tree.spilled[group].values())), group)
        [host_page] = self._host.allocate(group, 1)
        self._transfers.append(Transfer(group, page, host_page, to_host=True))
        self._tree.forget(node, group)
        self._tree.name_host(node, group, host_page)
        self.num_spilled_pages += 1

    def _restore(self, node: Node, group: int) -> None:
        """Brings a page back from the host, for a sequence."""
        [page] = self.allocate(group, 1)
        self._transfers.append(Transfer(group, page, node.host_pages[group], to_host=False))
        self._tree.forget(node, group)
        self._tree.name(node, group, page)
        self._tree.hold(group, page)
        self.num_restored_pages += 1
