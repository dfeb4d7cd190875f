"""A radix tree with one edge a full page of tokens, and the books of the pages it names, on the
device and on the host.

The tree holds one reference to each page. A page on the device is *idle* while that is its only
one; idle pages and those on the host stand in the order of their last use.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence

from configs.cache import CacheSpec
from inference.kv_pages.page_pool import PagePool


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """One full page of tokens after those of its ancestors, and where each group's page of it is.

    Attributes:
        edge: the page's tokens, by which the parent finds the node; a root's is its key.
        parent: None only above the roots.
        depth: pages from the root to this one, itself included.
        pages: device page of each group, 0 where absent.
        host_pages: host page of each group, 0 where absent. No group has both.
        children: by their edges.
        num_device_children: children with any page on the device.
    """

    edge: Hashable
    parent: "Node | None"
    depth: int
    pages: list[int]
    host_pages: list[int]
    children: "dict[Hashable, Node]" = dataclasses.field(default_factory=dict)
    num_device_children: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether nothing is lost without it."""
        return not (self.children or any(self.pages) or any(self.host_pages))


class PrefixTree:
    """Nodes by their tokens, and by their pages.

    Attributes:
        roots: the node whose children are the roots, by key.
        idle: of each group, idle page -> its node, least recently used first.
        spilled: of each group, host page -> its node, least recently used first.
    """

    def __init__(self, pool: PagePool, host: PagePool, specs: Sequence[CacheSpec]):
        """`pool`, `host` and `specs` have the same page groups."""
        self._pool = pool
        self._host = host
        self._specs = specs
        self._num_nodes = 0
        self._named: list[dict[int, Node]] = [{} for _ in specs]  # device page -> its node
        self.roots = Node((), None, -1, [], [])
        # The first key of a plain dict would cost as much as was deleted before it.
        self.idle: list[OrderedDict[int, Node]] = [OrderedDict() for _ in specs]
        self.spilled: list[OrderedDict[int, Node]] = [OrderedDict() for _ in specs]

    @property
    def num_nodes(self) -> int:
        """Nodes below the roots."""
        return self._num_nodes - len(self.roots.children)

    def child(self, node: Node, edge: Hashable) -> Node:
        """The child along an edge, made where there is none."""
        child = node.children.get(edge)
        if child is None:
            absent = [0] * len(self._specs)
            child = Node(edge, node, node.depth + 1, absent, absent.copy())
            node.children[edge] = child
            self._num_nodes += 1
        return child

    def holds(self, node: Node) -> bool:
        """Whether a node is still in the tree."""
        parent = node.parent
        return parent is not None and parent.children.get(node.edge) is node

    def name(self, node: Node, group: int, page: int) -> None:
        """Puts a device page where the node has none; the tree takes over one reference to it."""
        if not any(node.pages) and node.parent:
            node.parent.num_device_children += 1
        node.pages[group] = page
        self._named[group][page] = node

    def name_host(self, node: Node, group: int, host_page: int) -> None:
        """Puts a host page, used just now, where the node has none."""
        node.host_pages[group] = host_page
        self.spilled[group][host_page] = node

    def forget(self, node: Node, group: int) -> None:
        """Drops the tree's reference to a node's page, on whichever side it is."""
        if page := node.pages[group]:
            node.pages[group] = 0
            del self._named[group][page]
            self.idle[group].pop(page, None)
            self._pool.release(group, [page])
            if not any(node.pages) and node.parent:
                node.parent.num_device_children -= 1
        if host_page := node.host_pages[group]:
            node.host_pages[group] = 0
            self.spilled[group].pop(host_page, None)
            self._host.release(group, [host_page])

    def hold(self, group: int, page: int) -> None:
        """Adds a reference to a page, which is in use then."""
        self._pool.share(group, [page])
        self.idle[group].pop(page, None)

    def release(self, group: int, page: int) -> None:
        """Drops a sequence's reference to a page, whether the tree names it or not."""
        self._pool.release(group, [page])
        node = self._named[group].get(page)
        if node and self._pool.num_references(group, page) == 1:
            self.idle[group][page] = node

    def lose(self, node: Node, group: int) -> None:
        """Forgets a node's page, and where no window ever slides past it all that hangs on it."""
        if self._specs[group].window is None:
            self.remove(node)
        else:
            self.forget(node, group)
            self.prune(node)

    def remove(self, node: Node) -> None:
        """Forgets a node and all below it."""
        nodes = list(self._walk(node))
        for below in nodes:
            for group in range(len(self._specs)):
                self.forget(below, group)
            below.children.clear()
        self._num_nodes -= len(nodes) - 1
        self.prune(node)

    def prune(self, node: Node) -> None:
        """Takes an empty node out of the tree, and ancestors that are empty without it."""
        while node.is_empty and (parent := node.parent):
            del parent.children[node.edge]
            self._num_nodes -= 1
            node = parent

    def check_integrity(self, holders: Iterable[Sequence[Sequence[int]]]) -> None:
        """Compares nodes, pools and orders of use with each other and with the page lists (one a
        group) of all running sequences.

        Raises:
            RuntimeError: they do not add up.
        """
        roots, *nodes = self._walk(self.roots)
        pages, host_pages = self._pages(nodes)
        self._pool.check_integrity([[list(named) for named in pages], *holders])
        self._host.check_integrity([[list(named) for named in host_pages]])
        if pages != self._named or host_pages != list(map(dict, self.spilled)):
            raise RuntimeError("the tree and its index name different pages")
        if len(nodes) != self._num_nodes:
            raise RuntimeError(f"{len(nodes)} nodes, not {self._num_nodes}")
        for node in (roots, *nodes):
            if node.num_device_children != sum(any(c.pages) for c in node.children.values()):
                raise RuntimeError(f"a node at depth {node.depth} miscounts its children")
            if node.is_empty and node.parent:
                raise RuntimeError(f"a node at depth {node.depth} is empty")
            if any(map(min, zip(node.pages, node.host_pages, strict=True))):
                raise RuntimeError(f"a node at depth {node.depth} has a page on both sides")
        for group, spec in enumerate(self._specs):
            references = self._pool.num_references
            if set(self.idle[group]) != {p for p in pages[group] if references(group, p) == 1}:
                raise RuntimeError(f"group {group}: idle pages are not those of the tree alone")
            if spec.window is None:
                self._check_paths(group, [node for node in nodes if node.depth])

    def _check_paths(self, group: int, nodes: list[Node]) -> None:
        """Every node has a page, and a parent whose page would be evicted after its own: from the
        host, then from the device, then not at all while in use.
        """
        order = [*self.spilled[group].values(), *self.idle[group].values()]
        ranks = {node: rank for rank, node in enumerate(order)}
        for node in nodes:
            if not (node.pages[group] or node.host_pages[group]):
                raise RuntimeError(f"group {group}: a node at depth {node.depth} has no page")
            parent = node.parent if node.depth > 1 else None
            if parent and ranks.get(parent, len(ranks)) < ranks.get(node, len(ranks)):
                raise RuntimeError(f"group {group}: a page is evicted before one that hangs on it")

    def _pages(self, nodes: list[Node]) -> list[list[dict[int, Node]]]:
        """Of device and host and each group, page -> its node."""
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
