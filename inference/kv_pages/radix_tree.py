"""A radix tree whose edges are full pages of tokens, and the pages cached under its nodes, on the
device or offloaded to the host.

The tree holds one reference to each page. A page on the device is *evictable* while that is its
only reference; evictable and offloaded pages are kept in the order of their last use.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence

from configs.cache import CacheSpec
from inference.kv_pages.page_pool import PagePool


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """One full page of tokens after those of its ancestors, and the page of each group that caches
    it.

    Attributes:
        edge: the page's tokens, under which the parent lists the node; a root's is its key.
        parent: None only for the node above the roots.
        depth: pages from the root to this one, inclusive.
        pages: device page of each group, 0 where absent.
        host_pages: host page of each group, 0 where absent. No group has a page on both sides.
        children: by their edges.
        num_device_children: children with any page on the device.
        retention: of the last path through it that is expected again.
    """

    edge: Hashable
    parent: "Node | None"
    depth: int
    pages: list[int]
    host_pages: list[int]
    children: "dict[Hashable, Node]" = dataclasses.field(default_factory=dict)
    num_device_children: int = 0
    retention: "Retention | None" = None

    @property
    def is_empty(self) -> bool:
        """Whether the node caches nothing and leads nowhere."""
        return not (self.children or any(self.pages) or any(self.host_pages))

    def shorten_retained(self) -> None:
        """Ends a path that is expected again at the parent, when its last node leaves the tree."""
        if self.retention and self.retention.deepest is self and self.parent:
            self.retention.deepest = self.parent


@dataclasses.dataclass(eq=False, slots=True)
class Retention:
    """A path whose tokens are expected again.

    Attributes:
        deepest: its last node.
        num_renewals: how often it is renewed in place of an eviction.
    """

    deepest: Node
    num_renewals: int


class RadixTree:
    """Cached pages, found by their tokens.

    Attributes:
        roots: the node whose children are the roots, by key.
        evictable: of each group, evictable page -> its node, least recently used first.
        offloaded: of each group, host page -> its node, least recently used first.
    """

    def __init__(self, pool: PagePool, host_pool: PagePool, specs: Sequence[CacheSpec]):
        """`pool`, `host_pool` and `specs` have the same page groups."""
        self._pool = pool
        self._host_pool = host_pool
        self._specs = specs
        self._num_nodes = 0
        self._nodes: list[dict[int, Node]] = [{} for _ in specs]  # device page -> its node
        self.roots = Node((), None, -1, [], [])
        # To find a plain dict's first key takes time for every key that was deleted before it.
        self.evictable: list[OrderedDict[int, Node]] = [OrderedDict() for _ in specs]
        self.offloaded: list[OrderedDict[int, Node]] = [OrderedDict() for _ in specs]

    @property
    def num_nodes(self) -> int:
        """Nodes below the roots."""
        return self._num_nodes - len(self.roots.children)

    def child(self, node: Node, edge: Hashable) -> Node:
        """The child along an edge; a new one where there is none."""
        child = node.children.get(edge)
        if child is None:
            absent = [0] * len(self._specs)
            child = Node(edge, node, node.depth + 1, absent, absent.copy())
            node.children[edge] = child
            self._num_nodes += 1
        return child

    def __contains__(self, node: Node) -> bool:
        parent = node.parent
        return parent is not None and parent.children.get(node.edge) is node

    def set_page(self, node: Node, group: int, page: int) -> None:
        """Gives a node its device page of a group, with one reference that the tree keeps."""
        if not any(node.pages) and node.parent:
            node.parent.num_device_children += 1
        node.pages[group] = page
        self._nodes[group][page] = node

    def set_host_page(self, node: Node, group: int, host_page: int) -> None:
        """Gives a node its host page of a group, the most recently used."""
        node.host_pages[group] = host_page
        self.offloaded[group][host_page] = node

    def remove_page(self, node: Node, group: int) -> None:
        """Drops the tree's reference to a node's page, on the device or on the host."""
        if page := node.pages[group]:
            node.pages[group] = 0
            del self._nodes[group][page]
            self.evictable[group].pop(page, None)
            self._pool.free(group, [page])
            if not any(node.pages) and node.parent:
                node.parent.num_device_children -= 1
        if host_page := node.host_pages[group]:
            node.host_pages[group] = 0
            self.offloaded[group].pop(host_page, None)
            self._host_pool.free(group, [host_page])

    def share(self, group: int, page: int) -> None:
        """Adds a sequence's reference to a cached page, which is not evictable then."""
        self._pool.share(group, [page])
        self.evictable[group].pop(page, None)

    def free(self, group: int, page: int) -> None:
        """Drops a sequence's reference to a page, cached or not.

        Raises:
            RuntimeError: no sequence refers to it; others might get a page that is still found.
        """
        node = self._nodes[group].get(page)
        if node and self._pool.num_references(group, page) == 1:  # the tree's own
            raise RuntimeError(f"page {page} of group {group} is freed twice")
        self._pool.free(group, [page])
        if node and self._pool.num_references(group, page) == 1:
            evictable = self.evictable[group]
            evictable[page] = node
            if self._specs[group].window is None:  # ancestors that a sequence gave up earlier
                above = node.parent
                while above and above.depth > 0 and above.pages[group] in evictable:
                    evictable.move_to_end(above.pages[group])
                    above = above.parent

    def renew(self, node: Node) -> None:
        """Makes the evictable pages of a node's path the most recently used, parents after their
        children.
        """
        above: Node | None = node
        while above and above.depth > 0:
            for group, page in enumerate(above.pages):
                if page in self.evictable[group]:
                    self.evictable[group].move_to_end(page)
            above = above.parent

    def evict(self, node: Node, group: int) -> None:
        """Removes a node's page; in a group without a window the whole subtree, which is of no use
        without that page.
        """
        if self._specs[group].window is None:
            self.remove_subtree(node)
        else:
            self.remove_page(node, group)
            self.prune(node)

    def remove_subtree(self, node: Node) -> None:
        nodes = list(self._walk(node))
        for below in nodes:
            for group in range(len(self._specs)):
                self.remove_page(below, group)
            below.children.clear()
        for below in reversed(nodes[1:]):
            below.shorten_retained()
        self._num_nodes -= len(nodes) - 1
        self.prune(node)

    def prune(self, node: Node) -> None:
        """Removes a node that is empty, and ancestors that are empty without it."""
        while node.is_empty and (parent := node.parent):
            del parent.children[node.edge]
            node.shorten_retained()
            self._num_nodes -= 1
            node = parent

    def check_integrity(
        self, holders: Iterable[Sequence[Sequence[int]]], has_gaps: bool = False
    ) -> None:
        """Compares nodes, pools and orders of use with each other and with the page lists (one a
        group) of all running sequences, which may have `has_gaps`: a page and not those before it.

        Raises:
            RuntimeError: they contradict each other.
        """
        roots, *nodes = self._walk(self.roots)
        pages, host_pages = self._pages(nodes)
        self._pool.check_integrity([list(map(list, pages)), *holders])
        self._host_pool.check_integrity([list(map(list, host_pages))])
        if pages != self._nodes or host_pages != list(map(dict, self.offloaded)):
            raise RuntimeError("the nodes and the index of pages differ")
        if len(nodes) != self._num_nodes:
            raise RuntimeError(f"{len(nodes)} nodes, not {self._num_nodes}")
        in_tree = set(nodes)
        if any(node.retention and node.retention.deepest not in in_tree for node in nodes):
            raise RuntimeError("a path that is expected again ends outside of the tree")
        for node in (roots, *nodes):
            if node.num_device_children != sum(any(c.pages) for c in node.children.values()):
                raise RuntimeError(f"a node at depth {node.depth} miscounts its children")
            if node.is_empty and node.parent:
                raise RuntimeError(f"a node at depth {node.depth} is empty")
            if any(map(min, zip(node.pages, node.host_pages, strict=True))):
                raise RuntimeError(f"a node at depth {node.depth} has a page on both sides")
        for group, spec in enumerate(self._specs):
            references = self._pool.num_references
            if set(self.evictable[group]) != {p for p in pages[group] if references(group, p) == 1}:
                raise RuntimeError(f"group {group}: evictable and unused cached pages differ")
            if spec.window is None:
                self._check_paths(group, [node for node in nodes if node.depth], has_gaps)

    def _check_paths(self, group: int, nodes: list[Node], has_gaps: bool) -> None:
        """In a group without a window every node has a page, and its parent's page is evicted later
        than its own: pages on the host go first, then those on the device, never those in use. With
        `has_gaps` nothing is said of what precedes pages in use.
        """
        order = [*self.offloaded[group].values(), *self.evictable[group].values()]
        ranks = {node: rank for rank, node in enumerate(order)}
        for node in nodes:
            if not (node.pages[group] or node.host_pages[group]):
                raise RuntimeError(f"group {group}: a node at depth {node.depth} has no page")
            parent = node.parent if node.depth > 1 else None
            if has_gaps and node not in ranks:
                continue
            if parent and ranks.get(parent, len(ranks)) < ranks.get(node, len(ranks)):
                raise RuntimeError(
                    f"group {group}: a page is evicted before one that depends on it"
                )

    def _pages(self, nodes: list[Node]) -> list[list[dict[int, Node]]]:
        """Page -> its node, by group: of the device, then of the host."""
        groups = range(len(self._specs))
        below = [node for node in nodes if node.depth]
        return [
            [{n.pages[g]: n for n in below if n.pages[g]} for g in groups],
            [{n.host_pages[g]: n for n in below if n.host_pages[g]} for g in groups],
        ]

    def _walk(self, node: Node) -> Iterator[Node]:
        """A node and all below it, parents first."""
        stack = [node]
        while stack:
            yield (node := stack.pop())
            stack += node.children.values()
