"""The pages of sequences: held while they run, kept for others under the tokens they hold, copied
to the host when room is short. One set of verbs over the pool and the prefix cache.
"""

from collections.abc import Callable, Iterable

from configs.engine import Config
from inference.kv_pages.page_pool import PagePool
from inference.kv_pages.prefix_cache import Match, PrefixCache, Transfer
from inference.request import Sequence


class Pages:
    """All pages of an engine, on the device and on the host."""

    def __init__(self, config: Config, spills: Callable[[int], bool]):
        """`spills(num_tokens)`: whether copying a page that ends at this position back from the
        host beats computing it again.
        """
        self._config = config
        self._page = config.page_tokens
        self._specs = [group.spec for group in config.model.page_groups]
        self._windows = [(g, s) for g, s in enumerate(self._specs) if s.window is not None]
        self.pool = PagePool(config.num_pages)
        self.prefix = PrefixCache(
            self.pool, self._specs, self._page, PagePool(config.num_host_pages), spills,
            config.model.has_states,
        )  # fmt: skip
        self._pinned: list[list[int]] = [[] for _ in self._specs]

    def find(self, sequence: Sequence) -> Match:
        """What is kept of a waiting sequence's tokens; a prompt that is scored needs all its
        logits.
        """
        known = () if sequence.scores or sequence.cache_key is None else sequence.tokens
        return self.prefix.match(known, sequence.cache_key)

    def has_room(self, sequence: Sequence, match: Match) -> bool:
        """Whether a waiting sequence's known tokens and one more find pages."""
        longest = min(sequence.max_tokens, self._config.max_context)
        peak = self._config.peak_pages(min(len(sequence.tokens) + 1, longest))
        needs = [
            max(num_new, n - (len(match.nodes) - num_new) * (spec.window is None))
            for n, num_new, spec in zip(peak, match.num_new_pages, self._specs, strict=True)
        ]
        return self.prefix.can_allocate(needs)

    def num_shared(self, running: Iterable[Sequence], match: Match) -> list[int]:
        """Pages that running sequences share, and those of a match that are not in use: what is
        held beside the pages that each has for itself.
        """
        available = self.prefix.num_available_pages
        held = [n - m for n, m in zip(self.pool.num_usable_pages, available, strict=True)]
        for sequence in running:
            for group, (spec, pages) in enumerate(zip(self._specs, sequence.pages, strict=True)):
                num_others = sequence.num_cached_tokens // self._page
                if spec.window is not None:
                    num_others = spec.live_from(sequence.num_scheduled_tokens) // self._page
                held[group] -= max(0, len(pages) - num_others)
        return [
            max(0, n) + num_new * (spec.window is None)
            for n, num_new, spec in zip(held, match.num_new_pages, self._specs, strict=True)
        ]

    def take(self, sequence: Sequence, match: Match) -> None:
        """Starts a sequence's page lists with what was found."""
        sequence.pages = self.prefix.acquire(match)
        sequence.node = match.nodes[-1] if match.nodes else None
        sequence.num_cached_tokens = match.num_tokens
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = match.num_tokens

    def hold(self, sequence: Sequence, num_tokens: int) -> bool:
        """Gives a running sequence pages for its next tokens; False where there is no room. Pages
        that have slid out of their group's window are given back first, those without a name only
        where room is short: steps in flight have page tables of their own, and run before any that
        could use those pages.
        """
        self._slide(sequence, sequence.node.depth if sequence.node else 0)
        num_pages = -(-(sequence.num_scheduled_tokens + num_tokens) // self._page)
        if all(num_pages <= len(pages) for pages in sequence.pages):
            return True
        needs = [max(0, num_pages - len(pages)) for pages in sequence.pages]
        if not self.prefix.can_allocate(needs):
            self._slide(sequence, num_pages)
        if not self.prefix.can_allocate(needs):
            return False
        for group, n in enumerate(needs):
            sequence.pages[group] += self.prefix.allocate(group, n)
        return True

    def name(self, sequence: Sequence) -> None:
        """After a commit: keeps the pages that became full under the tokens they hold."""
        num_tokens, key = sequence.num_computed_tokens, sequence.cache_key
        num_named = sequence.node.depth if sequence.node else 0
        if key is not None and num_tokens // self._page > num_named:
            sequence.node = self.prefix.insert(
                sequence.tokens, num_tokens, sequence.pages, key, sequence.node
            )

    def let_go(self, sequence: Sequence) -> None:
        """Takes everything from a sequence that stops running; what has a name is kept."""
        for group, pages in enumerate(sequence.pages):
            self.prefix.release(group, pages)
        sequence.pages, sequence.node = [], None
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = 0

    def forget(self, sequence: Sequence) -> None:
        """Drops what is kept for a sequence alone."""
        if sequence.cache_key is not None:
            self.prefix.drop(sequence.cache_key)

    def fork(self, parent: Sequence, child: Sequence) -> tuple[tuple[int, int, int], ...] | None:
        """Shares the pages of a parent's computed tokens with a child, its open page as a copy.

        Returns:
            The copies to make as (group, from, to); None where there is no room. Sources stay
            where they are until `unpin`.
        """
        num_full, is_open = divmod(child.num_computed_tokens, self._page)
        if not self.prefix.can_allocate([int(is_open > 0)] * len(self._specs)):
            return None
        copies = []
        child.num_cached_tokens = num_full * self._page
        child.pages = [list(pages[:num_full]) for pages in parent.pages]
        for group, pages in enumerate(child.pages):
            self.pool.share(group, [page for page in pages if page])
        child.node = parent.node
        while child.node and child.node.depth > num_full:
            child.node = child.node.parent
        if is_open:
            for group, pages in enumerate(child.pages):
                source = parent.pages[group][num_full]
                self.pool.share(group, [source])
                self._pinned[group].append(source)
                pages += self.prefix.allocate(group, 1)
                copies.append((group, source, pages[-1]))
        return tuple(copies)

    def cancel(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Lets sources go of a fork's copies that are not to be made."""
        for group, source, _ in copies:
            self._pinned[group].remove(source)
            self.prefix.release(group, [source])

    def unpin(self) -> tuple[Transfer, ...]:
        """Closes a plan: sources of copies may be used again afterwards. Returns the transfers
        that come before the plan's copies.
        """
        for group, pages in enumerate(self._pinned):
            self.prefix.release(group, pages)
            pages.clear()
        return self.prefix.take_transfers()

    def use(self, running: Iterable[Sequence]) -> tuple[int, int]:
        """(tokens that the pages of running sequences have room for, tokens in them once the steps
        in flight are done), each page once.
        """
        filled: dict[tuple[int, int], int] = {}
        for sequence in running:
            for group, pages in enumerate(sequence.pages):
                for index, page in enumerate(pages):
                    if page:
                        rest = sequence.num_scheduled_tokens - index * self._page
                        key = group, page
                        filled[key] = max(filled.get(key, 0), min(max(rest, 0), self._page))
        return self._page * len(filled), sum(filled.values())

    def prompt_use(self, running: Iterable[Sequence]) -> tuple[int, int]:
        """(pages that running sequences hold of their prompts, distinct ones among them): sharing
        saves 1 - second / first.
        """
        held = [
            (group, page)
            for sequence in running
            for group, pages in enumerate(sequence.pages)
            for page in pages[: -(-sequence.num_prompt_tokens // self._page)]
            if page
        ]
        return len(held), len(set(held))

    def _slide(self, sequence: Sequence, num_named: int) -> None:
        """Gives back what no window sees any more, of the first so many pages; of all, where pages
        get no names.
        """
        for group, spec in self._windows:
            pages = sequence.pages[group]
            num_dead = spec.live_from(sequence.num_scheduled_tokens) // self._page
            if sequence.cache_key is not None:
                num_dead = min(num_dead, num_named)
            index = num_dead - 1
            while index >= 0 and pages[index]:
                self.prefix.release(group, [pages[index]])
                pages[index] = 0
                index -= 1

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raises RuntimeError where references do not add up."""
        self.prefix.check_integrity([*(s.pages for s in running), self._pinned])
