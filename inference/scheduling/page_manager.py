"""The pages of sequences: allocated while they run, cached afterwards by the tokens they hold, and
offloaded to the host when memory runs short.
"""

from collections.abc import Iterable

from configs.cache import SNAPSHOT
from configs.engine import Config
from inference.kv_pages.page_pool import PagePool
from inference.kv_pages.prefix_cache import Match, PageCosts, PrefixCache, Transfer
from inference.scheduling.sequence import Sequence


class PageManager:
    """All pages of a data shard, on the device and on the host."""

    def __init__(self, config: Config, costs: PageCosts, snapshot_tokens: int = 0):
        """Starts with all pages free.

        Args:
            costs: of evicted pages.
            snapshot_tokens: as `engine.cache.snapshot_tokens`, whole pages; 0: no such distance.
        """
        self._config = config
        self._page = config.page_tokens
        self._specs = [group.spec for group in config.cached_model.page_groups]
        self._windows = [(g, s) for g, s in enumerate(self._specs) if s.window is not None]
        # Behind the groups' pages a sequence has its snapshots, at most one a page of tokens.
        self._has_states, self._snapshot_tokens = config.model.has_states, snapshot_tokens
        specs = [group.spec for group in config.cached_groups]
        self.pool, host_pool = PagePool(config.num_cached_pages), PagePool(config.num_host_pages)
        self.prefix_cache = PrefixCache(self.pool, specs, self._page, host_pool, costs)
        self._copy_sources: list[list[int]] = [[] for _ in specs]

    def match_prefix(self, sequence: Sequence) -> Match:
        """The cached prefix of a waiting sequence; none for a prompt that is scored, or made a mean
        of, which needs what is computed of all its tokens. Of a prompt that gives up pages, no more
        than is needed whole: windows then keep what the tokens see that choose, and others' answers
        are not its own.
        """
        may_match = not sequence.needs_every_token and sequence.prefix.key is not None
        tokens = sequence.tokens if may_match else ()
        limit = sequence.num_unobserved_tokens if sequence.budget.num_excess_tokens else None
        return self.prefix_cache.match_prefix(tokens, sequence.prefix.key, limit)

    def has_room(self, sequence: Sequence, match: Match) -> bool:
        """Whether there are pages for the known tokens of a waiting sequence and one more."""
        peak = self._config.peak_pages(min(len(sequence.tokens) + 1, sequence.max_length))
        needs = [
            max(num_new, n - (len(match.nodes) - num_new) * (spec.window is None))
            for n, num_new, spec in zip(peak, match.num_new_pages, self._specs, strict=False)
        ]
        return self.prefix_cache.can_allocate([*needs, *match.num_new_pages[len(needs) :]])

    def num_shared_pages(self, running: Iterable[Sequence], match: Match) -> list[int]:
        """Pages of each group that running sequences share, and those of a match that are not in
        use: all that are taken beside the pages that each sequence has for itself.
        """
        available = self.prefix_cache.num_available_pages
        shared = [n - m for n, m in zip(self.pool.num_usable_pages, available, strict=True)]
        for sequence in running:
            for group, (spec, pages) in enumerate(zip(self._specs, sequence.pages, strict=False)):
                num_others = sequence.prefix.num_cached_tokens // self._page
                if spec.window is not None:
                    num_others = len(spec.dead_pages(sequence.num_certain_tokens, self._page))
                shared[group] -= max(0, len(pages) - num_others)
        return [
            max(0, n) + num_new * (spec.window is None)
            for n, num_new, spec in zip(shared, match.num_new_pages, self._specs, strict=False)
        ]

    def attach(self, sequence: Sequence, match: Match) -> None:
        """Starts a sequence's page lists with its cached prefix."""
        sequence.pages = self.prefix_cache.attach(match)
        prefix = sequence.prefix
        prefix.node = match.nodes[-1] if match.nodes else None
        prefix.num_offered_pages, prefix.num_passed_snapshots = len(match.nodes), 0
        prefix.num_cached_tokens = match.num_tokens
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = match.num_tokens
        prefix.boundaries = self._boundaries(sequence, match)

    def _boundaries(self, sequence: Sequence, match: Match) -> list[int]:
        """Where to make snapshots of a sequence that starts: behind the last page that it will fill
        but for its newest token, where it parts from what is cached, and in regular distances.
        """
        if not self._has_states or sequence.prefix.key is None or sequence.needs_every_token:
            return []
        last = (len(sequence.tokens) - 1) // self._page * self._page
        distance = self._snapshot_tokens or last + 1
        regular = range(distance, last, distance)
        boundaries = {last, min(match.num_known_tokens, last), *regular}
        return sorted(n for n in boundaries if n > match.num_tokens)

    def started_from(self, sequence: Sequence) -> int:
        """The snapshot that a sequence with a cached prefix starts from; 0: none."""
        num_pages = sequence.num_computed_tokens // self._page
        return sequence.pages[-1][num_pages - 1] if self._has_states and num_pages else 0

    def snapshot(self, sequence: Sequence) -> int:
        """The snapshot to make behind a sequence's scheduled tokens; 0: none."""
        boundaries = sequence.prefix.boundaries
        if not boundaries or boundaries[0] > sequence.num_scheduled_tokens:
            return 0
        boundary = boundaries.pop(0)
        return sequence.pages[-1][boundary // self._page - 1]

    def receive(self, sequence: Sequence, sender: Sequence) -> tuple[tuple[int, int, int], ...]:
        """Allocates pages for what `sender` has computed on other chips and the cached prefix does
        not hold; the caller has asked `has_room`.

        Returns:
            What it sends: (group, from, to).
        """
        num_tokens, sent = sender.num_computed_tokens, []
        for group, (spec, pages) in enumerate(zip(self._specs, sequence.pages, strict=True)):
            dead = spec.dead_pages(num_tokens, self._page)
            for index in range(len(pages), len(sender.pages[group])):
                is_live = index not in dead and sender.pages[group][index]
                pages += self.prefix_cache.allocate(group, 1) if is_live else [0]
                if is_live:
                    sent.append((group, sender.pages[group][index], pages[-1]))
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = num_tokens
        return tuple(sent)

    def allocate(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocates pages for a running sequence's next tokens; False where there is no room.

        Pages outside of their group's window are freed first, those that are not cached only where
        room is short. Steps in flight may still read them: they have page tables of their own, and
        run before any step that could write there.
        """
        node = sequence.prefix.node
        self._free_outside_window(sequence, node.depth if node else 0)
        num_pages = -(-(sequence.num_scheduled_tokens + num_tokens) // self._page)
        needs = [
            max(0, num_pages - self._gap(sequence, group) - len(pages))
            for group, pages in enumerate(sequence.pages[: len(self._specs)])
        ]
        if self._has_states:
            needs.append(0)
        if not any(needs):
            self._add_snapshots(sequence, num_pages)
            return True
        if not self.prefix_cache.can_allocate(needs):
            self._free_outside_window(sequence, num_pages)
        if not self.prefix_cache.can_allocate(needs):
            return False
        for group, n in enumerate(needs):
            sequence.pages[group] += self.prefix_cache.allocate(group, n)
        self._add_snapshots(sequence, num_pages)
        return True

    def _add_snapshots(self, sequence: Sequence, num_pages: int) -> None:
        """Allocates the snapshot to make behind these pages, where there is room for it."""
        if not self._has_states:
            return
        group, pages = len(self._specs), sequence.pages[-1]
        pages += [0] * (num_pages - len(pages))
        boundaries = sequence.prefix.boundaries
        is_due = boundaries and boundaries[0] <= num_pages * self._page
        if is_due and self.prefix_cache.num_available_pages[group]:
            index = boundaries[0] // self._page - 1
            if not pages[index]:
                [pages[index]] = self.prefix_cache.allocate(group, 1)

    def shorten(self, sequence: Sequence, dropped: Iterable[int]) -> None:
        """Gives up these of a running sequence's pages, in groups without a window, and closes the
        gaps: what comes next is cached so many pages earlier. It did not see all of the tokens
        before it, so no more of its pages are cached; those that are stay so, and are evictable
        where nothing else uses them. Nothing of it is in flight.
        """
        gone = set(dropped)
        num_shared = sequence.prefix.num_cached_tokens // self._page
        for group, spec in enumerate(self._specs):
            if spec.window is None:
                pages = sequence.pages[group]
                self.prefix_cache.free(group, [p for i, p in enumerate(pages) if i in gone])
                sequence.pages[group] = [p for i, p in enumerate(pages) if i not in gone]
        sequence.prefix.num_cached_tokens -= self._page * sum(index < num_shared for index in gone)
        sequence.budget.num_dropped_tokens = self._page * len(gone)
        sequence.prefix.node = None

    def _gap(self, sequence: Sequence, group: int) -> int:
        """Pages of a group that a sequence gave up."""
        is_shortened = group < len(self._specs) and self._specs[group].window is None
        return sequence.budget.num_dropped_tokens // self._page if is_shortened else 0

    def cache(self, sequence: Sequence) -> None:
        """After a commit: caches the pages that became full, where any of them has something that
        can be kept: of a model with states alone few have a snapshot.
        """
        num_tokens, key = sequence.num_computed_tokens, sequence.prefix.key
        if sequence.budget.num_dropped_tokens or key is None:
            return
        new = slice(sequence.prefix.num_offered_pages, num_tokens // self._page)
        if any(any(pages[new]) for pages in sequence.pages):
            sequence.prefix.node = self.prefix_cache.insert(
                sequence.tokens, num_tokens, sequence.pages, key, sequence.prefix.node
            )
        sequence.prefix.num_offered_pages = max(new.start, new.stop)

    def free(self, sequence: Sequence) -> None:
        """Frees all pages of a sequence that stops running; cached ones become evictable once no
        other sequence uses them.
        """
        for group, pages in enumerate(sequence.pages):
            self.prefix_cache.free(group, pages)
        sequence.pages, sequence.prefix.node = [], None
        sequence.num_computed_tokens = sequence.num_scheduled_tokens = 0
        sequence.budget.num_dropped_tokens = 0

    def drop(self, sequence: Sequence) -> None:
        """Removes from the cache what was cached under a sequence's own key."""
        if sequence.prefix.key is not None:
            self.prefix_cache.drop(sequence.prefix.key)

    def fork(self, parent: Sequence, child: Sequence) -> tuple[tuple[int, int, int], ...] | None:
        """Shares the pages of a parent's computed tokens with a child; of a page that is not full
        the child gets a copy.

        Returns:
            The copies to make as (group, from, to); None where there is no room. Their sources are
            not freed before `finish_schedule`.
        """
        num_full, is_open = divmod(child.num_computed_tokens, self._page)
        needs = [int(is_open > 0)] * len(self._specs) + [0] * self._has_states
        if not self.prefix_cache.can_allocate(needs):
            return None
        copies = []
        child.budget.num_dropped_tokens = parent.budget.num_dropped_tokens
        child.prefix.num_cached_tokens = num_full * self._page - child.budget.num_dropped_tokens
        stops = [num_full - self._gap(parent, group) for group in range(len(needs))]
        child.pages = [list(pages[:stop]) for pages, stop in zip(parent.pages, stops, strict=True)]
        for group, pages in enumerate(child.pages):
            self.pool.share(group, [page for page in pages if page])
        child.prefix.node = parent.prefix.node
        while child.prefix.node and child.prefix.node.depth > num_full:
            child.prefix.node = child.prefix.node.parent
        child.prefix.num_offered_pages = min(parent.prefix.num_offered_pages, num_full)
        if is_open:
            for group, pages in enumerate(child.pages[: len(self._specs)]):
                source = parent.pages[group][stops[group]]
                self.pool.share(group, [source])
                self._copy_sources[group].append(source)
                pages += self.prefix_cache.allocate(group, 1)
                copies.append((group, source, pages[-1]))
        return tuple(copies)

    def cancel_copies(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Frees the sources of a fork's copies that will not be made."""
        for group, source, _ in copies:
            self._copy_sources[group].remove(source)
            self.prefix_cache.free(group, [source])

    def finish_schedule(self) -> tuple[Transfer, ...]:
        """Ends the scheduling of a step: frees the sources of its copies, and returns the transfers
        to make before those copies.
        """
        for group, pages in enumerate(self._copy_sources):
            self.prefix_cache.free(group, pages)
            pages.clear()
        return self.prefix_cache.take_transfers()

    def usage(self, running: Iterable[Sequence]) -> list[tuple[int, int]]:
        """Of each group (tokens that the pages of running sequences have room for, tokens in them
        once the steps in flight are done); a shared page counts once.
        """
        filled: list[dict[int, int]] = [{} for _ in self._specs]
        for sequence in running:
            for group, (tokens, pages) in enumerate(zip(filled, sequence.pages, strict=False)):
                for index, page in enumerate(pages, self._gap(sequence, group)):
                    if page:
                        num_tokens = max(0, sequence.num_scheduled_tokens - index * self._page)
                        num_tokens = min(num_tokens, self._page)
                        tokens[page] = max(num_tokens, tokens.get(page, num_tokens))
        return [(self._page * len(tokens), sum(tokens.values())) for tokens in filled]

    def prompt_usage(self, running: Iterable[Sequence]) -> tuple[int, int]:
        """(prompt pages of all running sequences, distinct ones among them): sharing saves
        1 - second / first.
        """
        prompt_pages = [
            (group, page)
            for sequence in running
            for group, pages in enumerate(sequence.pages[: len(self._specs)])
            for page in pages[
                : -(-sequence.num_prompt_tokens // self._page) - self._gap(sequence, group)
            ]
            if page
        ]
        return len(prompt_pages), len(set(prompt_pages))

    def _free_outside_window(self, sequence: Sequence, num_pages: int) -> None:
        """Frees those of a sequence's first `num_pages` pages that its window has passed; all that
        it has passed, where the sequence's pages are not cached. What chooses a prompt's pages
        still sees those before it.
        """
        num_tokens = sequence.num_certain_tokens
        if sequence.is_whole:
            num_tokens = min(num_tokens, sequence.num_unobserved_tokens)
        is_cached = sequence.prefix.key is not None and not sequence.budget.num_dropped_tokens
        for group, spec in self._windows:
            pages, dead = sequence.pages[group], spec.dead_pages(num_tokens, self._page)
            stop = min(dead.stop, num_pages) if is_cached else dead.stop
            index = stop - 1
            while index >= dead.start and pages[index]:
                self.prefix_cache.free(group, [pages[index]])
                pages[index] = 0
                index -= 1
        if self._has_states:
            self._free_snapshots(sequence, num_pages if is_cached else None)

    def _free_snapshots(self, sequence: Sequence, num_pages: int | None) -> None:
        """Frees a sequence's snapshots of its first pages, but not of the newest page."""
        pages = sequence.pages[-1]
        dead = SNAPSHOT.dead_pages(sequence.num_certain_tokens, self._page)[:num_pages]
        for index in dead[sequence.prefix.num_passed_snapshots :]:
            if pages[index]:
                self.prefix_cache.free(len(self._specs), [pages[index]])
                pages[index] = 0
        sequence.prefix.num_passed_snapshots = max(sequence.prefix.num_passed_snapshots, dead.stop)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        running = list(running)
        holders = [*(s.pages for s in running), self._copy_sources]
        self.prefix_cache.check_integrity(
            holders, any(s.budget.num_dropped_tokens for s in running)
        )
