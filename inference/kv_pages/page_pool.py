"""Free lists and reference counts of pages, by page group. Integers only: no device memory here."""

from collections.abc import Iterable, Sequence


class PagePool:
    """Physical pages by group. Page 0 of each group is the sink of padding and is never
    allocated.
    """

    def __init__(self, num_pages: Sequence[int]):
        """`num_pages` counts each group's pages, the sink included."""
        self._num_pages = tuple(num_pages)
        self._free_pages = [list(range(n - 1, 0, -1)) for n in num_pages]
        self._references = [[0] * n for n in num_pages]

    @property
    def num_free_pages(self) -> tuple[int, ...]:
        return tuple(map(len, self._free_pages))

    @property
    def num_usable_pages(self) -> tuple[int, ...]:
        """Pages of each group that can be allocated when all are free."""
        return tuple(n - 1 for n in self._num_pages)

    def num_references(self, group: int, page: int) -> int:
        return self._references[group][page]

    def allocate(self, group: int, n: int) -> list[int]:
        """Takes n free pages, each with one reference; the caller knows that they suffice."""
        pages = [self._free_pages[group].pop() for _ in range(n)]
        for page in pages:
            self._references[group][page] = 1
        return pages

    def share(self, group: int, pages: Iterable[int]) -> None:
        """Adds a reference to each of these pages, which have some already."""
        for page in pages:
            self._references[group][page] += 1

    def free(self, group: int, pages: Iterable[int]) -> None:
        """Drops a reference to each page; one without any is free again. Sinks are skipped.

        Raises:
            RuntimeError: one of them is free already; two sequences might get it.
        """
        references = self._references[group]
        for page in pages:
            if page:
                if not references[page]:
                    raise RuntimeError(f"page {page} of group {group} is freed twice")
                references[page] -= 1
                if not references[page]:
                    self._free_pages[group].append(page)

    def check_integrity(self, holders: Iterable[Sequence[Sequence[int]]]) -> None:
        """Compares reference counts and free lists with every holder's page lists (one a group);
        raises RuntimeError if a page is leaked, free while referenced, or counted wrongly.
        """
        holders = list(holders)
        for group, references in enumerate(self._references):
            num_holders = [0] * len(references)
            for lists in holders:
                for page in lists[group] if lists else ():
                    num_holders[page] += 1
            num_holders[0] = 0
            if num_holders != references:
                wrong = [p for p, n in enumerate(num_holders) if n != references[p]]
                raise RuntimeError(f"group {group}: pages {wrong[:5]} are counted wrongly")
            if sorted(self._free_pages[group]) != [
                p for p in range(1, len(num_holders)) if not num_holders[p]
            ]:
                raise RuntimeError(f"group {group}: free pages and unreferenced pages differ")
