"""The prefix cache in any order of events beside a simulated device; its hits beside what foresight
would find; and its speed.
"""

import collections
import itertools
import math
import random
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from configs.cache import CacheSpec
from inference.kv_pages.prefix_cache import PageCosts
from tests.inference.kv_pages.test_prefix_cache import Run, cache_of, run

TOKENS = st.builds(
    lambda zeros, tail: [0] * zeros + tail,
    st.integers(0, 14),
    st.lists(st.integers(0, 1), min_size=1, max_size=6),
)
LIMITS = st.one_of(st.none(), st.integers(0, 20))


FIRST, CHUNK = CacheSpec(1, 1, window=3, first_tokens=3), CacheSpec(1, 1, window=4, chunked=True)
GROUPS = [(None, 3), (6, None), (1, None), (None, None), (2, 1), (6, 1)]
GROUPS += [(FIRST, None), (CHUNK, FIRST), (None, CHUNK), (1, FIRST)]


class CacheMachine(RuleBasedStateMachine):
    """Sequences come, grow, fork, slide and end beside a device and a host that are dictionaries:
    what a page must hold follows from the tokens alone.
    """

    @initialize(
        page_tokens=st.sampled_from([1, 2, 4]),
        windows=st.sampled_from(GROUPS),
        num_pages=st.sampled_from([(6, 6), (12, 7), (7, 12), (25, 25)]),
        host=st.sampled_from([(2, 2), (5, 9), (30, 30), None]),
        offloads_from=st.sampled_from([0, 0, 4]),
    )
    def build(self, page_tokens, windows, num_pages, host, offloads_from):
        self.size = page_tokens
        self.cache = cache_of(
            num_pages, windows, page_tokens, host, costs=PageCosts(lambda n: n >= offloads_from)
        )
        self.runs: list[Run] = []
        self.hoards: list[list[list[int]]] = []
        self.short: list[Run] = []  # gave up pages, and cache no more
        self.device: dict[tuple[int, int], tuple] = {}  # (group, page) -> what it holds
        self.host: dict[tuple[int, int], tuple] = {}

    def resumes(self, tokens, key, limit):
        """The longest boundary, found the slow way."""
        node, path = self.cache._tree.roots.children.get(key), []
        while node is not None:
            path.append(node)
            start = (len(path) - 1) * self.size
            node = node.children.get(tuple(tokens[start : start + self.size]))
        for boundary in range(min(limit // self.size, len(path) - 1), 0, -1):
            if all(
                path[1 + index].pages[group] or path[1 + index].host_pages[group]
                for group, spec in enumerate(self.cache._specs)
                for index in spec.resume_at(boundary * self.size, self.size)
            ):
                return boundary * self.size
        return 0

    @rule(sequences=st.lists(TOKENS, min_size=1, max_size=6))
    def serve(self, sequences):
        """Whole sequences one after another, whose pages stay behind."""
        for tokens in sequences:
            if self.admit(tokens, 0, None) and self.advance(self.runs[-1], len(tokens), False):
                self.leave(self.runs[-1])

    @rule(tokens=TOKENS, key=st.sampled_from([0, 0, 1]), limit=LIMITS)
    def start(self, tokens, key, limit):
        self.admit(tokens, key, limit)

    def admit(self, tokens, key, limit):
        """Starts a sequence where it fits, after a look at what it finds."""
        cache = self.cache
        match = cache.match_prefix(tokens, key, limit)
        most = len(tokens) - 1 if limit is None else min(limit, len(tokens))
        assert match.num_tokens == self.resumes(tokens, key, most) == len(match.nodes) * self.size
        fits = cache.can_allocate(match.num_new_pages)
        if fits:
            before = cache.num_available_pages
            self.runs.append(Run(cache, tokens, key, limit))
            after = [n - m for n, m in zip(before, match.num_new_pages, strict=True)]
            assert list(cache.num_available_pages) == after
        return fits

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), n=st.integers(1, 9), slides_first=st.booleans())
    def step(self, data, n, slides_first):
        self.advance(data.draw(st.sampled_from(self.runs)), n, slides_first)

    def advance(self, user, n, slides_first):
        """Computes a sequence's next tokens, or ends it without room for them."""
        stop = user.num_tokens + n
        if not self.cache.can_allocate([-(-stop // self.size) - len(p) for p in user.pages]):
            self.leave(user)
            return False
        user.allocate(n)
        self.copy()
        user.tokens += [1] * (stop - len(user.tokens))
        for group, pages in enumerate(user.pages):
            for index in range(user.num_tokens // self.size, -(-stop // self.size)):
                end = min(stop, (index + 1) * self.size)
                self.device[group, pages[index]] = (user.key, *user.tokens[:end])
        user.num_tokens = stop
        if slides_first:
            user.slide()
        user.commit(0)
        user.slide()
        return True

    @rule(tokens=TOKENS, key=st.sampled_from([0, 0, 1]))
    def retain(self, tokens, key):
        self.cache.retain(tokens, key)

    @rule()
    def copy(self):
        """Runs the transfers, and looks at every page in use."""
        for t in self.cache.take_transfers():
            if t.to_host:
                self.host[t.group, t.host_page] = self.device[t.group, t.page]
            else:
                self.device[t.group, t.page] = self.host[t.group, t.host_page]
        for user in self.runs:
            for group, pages in enumerate(user.pages):
                dead = self.cache._specs[group].dead_pages(user.num_tokens, self.size)
                for index, page in enumerate(pages[: -(-user.num_tokens // self.size)]):
                    end = min(user.num_tokens, (index + 1) * self.size)
                    assert page or index in dead
                    if page:
                        assert self.device[group, page] == (user.key, *user.tokens[:end])

    def leave(self, user):
        self.runs.remove(user)
        user.end()

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def end(self, data):
        self.leave(data.draw(st.sampled_from(self.runs)))

    @rule(tokens=TOKENS, data=st.data())
    def shorten(self, tokens, data):
        """A sequence that gives up pages between others, in groups that keep all of the past."""
        if not (self.admit(tokens, 0, None) and self.advance(self.runs[-1], len(tokens), False)):
            return
        user = self.runs.pop()
        gone = data.draw(st.sets(st.integers(0, len(user.pages[0]) - 1)))
        for group, (spec, pages) in enumerate(zip(self.cache._specs, user.pages, strict=True)):
            if spec.window is None:
                self.cache.free(group, [p for i, p in enumerate(pages) if i in gone])
                pages[:] = [p for i, p in enumerate(pages) if i not in gone]
        self.short.append(user)

    @precondition(lambda self: self.short)
    @rule(data=st.data())
    def end_short(self, data):
        user = data.draw(st.sampled_from(self.short))
        self.short.remove(user)
        user.end()

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def fork(self, data):
        parent = data.draw(st.sampled_from(self.runs))
        full, is_open = divmod(parent.num_tokens, self.size)
        if not self.cache.can_allocate([int(is_open > 0)] * 2):
            return
        self.copy()
        child = Run(self.cache, parent.tokens + [0], parent.key, limit=0)
        child.num_tokens, child.node = parent.num_tokens, parent.node
        for group, pages in enumerate(parent.pages):
            self.cache._pool.share(group, [page for page in pages[:full] if page])
            child.pages[group] = pages[:full]
            if is_open:
                [page] = self.cache.allocate(group, 1)
                self.copy()
                self.device[group, page] = self.device[group, pages[full]]
                child.pages[group].append(page)
        self.runs.append(child)

    @rule(data=st.data())
    def hoard(self, data):
        free = self.cache.num_available_pages
        needs = [data.draw(st.integers(0, n)) for n in free]
        assert self.cache.can_allocate(needs) and not self.cache.can_allocate([free[0] + 1, 0])
        self.hoards.append([self.cache.allocate(group, n) for group, n in enumerate(needs)])
        assert [n - m for n, m in zip(free, needs, strict=True)] == list(
            self.cache.num_available_pages
        )

    @precondition(lambda self: self.hoards)
    @rule()
    def spend(self):
        for group, pages in enumerate(self.hoards.pop()):
            self.cache.free(group, pages)

    @rule()
    def make_room(self):
        """Everything evictable is evicted."""
        self.hoards.append(list(map(self.cache.allocate, (0, 1), self.cache.num_available_pages)))
        self.spend()

    @rule()
    def drop(self):
        self.cache.drop(1)
        assert self.cache.match_prefix([0] * 20, 1).num_tokens == 0

    @invariant()
    def references_add_up(self):
        users = *self.runs, *self.short
        self.cache.check_integrity([*(u.pages for u in users), *self.hoards], bool(self.short))

    def teardown(self):
        """Every page can be had again, and then no node is left but on the host."""
        if not hasattr(self, "cache"):
            return
        for user in list(self.runs):
            self.leave(user)
        while self.short:
            self.short.pop().end()
        while self.hoards:
            self.spend()
        usable = self.cache._pool.num_usable_pages
        assert self.cache.num_available_pages == usable
        hoard = [self.cache.allocate(group, n) for group, n in enumerate(usable)]
        self.cache.check_integrity([hoard])
        self.copy()


class TestCache(CacheMachine.TestCase):
    settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@pytest.mark.long
@pytest.mark.timeout(900)
class TestCacheAtLength(CacheMachine.TestCase):
    settings = settings(max_examples=1000, stateful_step_count=30, deadline=None)


# --- against the best that is possible ------------------------------------------------------------


def sharegpt_like(num_requests, page_tokens):
    """Paths of requests with log-normal lengths, half of which start with the same 200 tokens;
    whole pages.
    """
    dice, mean, sigma = random.Random(0), 150, 1.0
    fresh = itertools.count()
    shared = [next(fresh) for _ in range(200)]
    for _ in range(num_requests):
        length = page_tokens + dice.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
        tokens = shared * (dice.random() < 0.5) + [next(fresh) for _ in range(int(length))]
        yield tokens[: len(tokens) // page_tokens * page_tokens]


def serve(cache, requests, num_at_once):
    """Serves requests in their order, `num_at_once` where they fit.

    Returns:
        pages found; and what happened, (request, whether it starts) in order.
    """
    hits, events, running = 0, [], []
    for number, tokens in enumerate(requests):
        while len(running) == num_at_once or not cache.can_allocate(
            [len(tokens) // cache._page_tokens]  # more than enough
        ):
            first, done = running.pop(0)
            done.end()
            events.append((first, False))
        running.append((number, run(cache, tokens)))
        hits += running[-1][1].num_cached_tokens // cache._page_tokens
        events.append((number, True))
    return hits, events


def best_hits(paths, events, num_pages):
    """What Belady's rule finds of the same: the leaf evicted is the one used again last."""
    starts = {number: at for at, (number, begins) in enumerate(events) if begins}
    uses = collections.defaultdict(list)
    for number, path in enumerate(paths):
        for page in path:
            uses[page].append(starts[number])
    hits, kept, users = 0, set(), collections.Counter()
    for at, (number, begins) in enumerate(events):
        path = paths[number]
        users.update({page: 1 if begins else -1 for page in path})
        if not begins:
            continue
        hits += len(list(itertools.takewhile(kept.__contains__, path[:-1])))
        for page in path:
            if page not in kept and len(kept) == num_pages:
                inner = {page[:-1] for page in kept}
                leaves = [page for page in kept if page not in inner and not users[page]]
                kept.remove(
                    max(leaves, key=lambda p: min((u for u in uses[p] if u > at), default=math.inf))
                )
            kept.add(page)
    return hits


@pytest.mark.parametrize("num_at_once", [1, 8])
def test_hits_come_near_those_of_an_oracle(num_at_once):
    size = 16
    requests = list(sharegpt_like(64, size))
    paths, names = [], {}
    for tokens in requests:  # a page is named by the pages up to it, in small numbers
        edges = [tuple(tokens[at : at + size]) for at in range(0, len(tokens), size)]
        numbers = [names.setdefault(edge, len(names)) for edge in edges]
        paths.append([tuple(numbers[: n + 1]) for n in range(len(numbers))])
    num_pages = len({page for path in paths for page in path}) // 2
    hits, events = serve(cache_of([num_pages], page_tokens=size), requests, num_at_once)
    best = best_hits(paths, events, num_pages)
    assert hits >= 0.96 * best > 0


def test_eviction_takes_no_longer_with_more_in_the_cache():
    cache = cache_of([10_000, 10_000], (None, 64), page_tokens=4, host=[100, 100])
    users = [run(cache, range(400 * i, 400 * (i + 1))) for i in range(50)]  # 5,000 nodes in use
    for i in range(50, 100):
        run(cache, range(400 * i, 400 * (i + 1))).end()
    assert cache.num_nodes == 10_000
    start = time.process_time()
    for _ in range(1000):
        cache.allocate(0, 1)
    seconds = time.process_time() - start
    assert seconds < 0.5, f"{seconds:.3f} s for 1,000 evictions"
    start = time.process_time()
    match = cache.match_prefix(users[0].tokens)
    seconds = time.process_time() - start
    assert match.num_tokens == 396 and seconds < 0.05, f"{seconds:.4f} s to match 99 pages"
