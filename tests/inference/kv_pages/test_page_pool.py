"""The page pool against a model of its references, and references corrupted on purpose."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inference.kv_pages.page_pool import PagePool


class PoolMachine(RuleBasedStateMachine):
    """Holders allocate, share and free pages; a list of lists says what must be free."""

    @initialize(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3))
    def build(self, sizes):
        self.sizes = sizes
        self.pool = PagePool(sizes)
        self.holders: list[list[list[int]]] = []

    def free(self, group):
        held = {page for holder in self.holders for page in holder[group]}
        return set(range(1, self.sizes[group])) - held

    @rule(data=st.data())
    def allocate(self, data):
        needs = [data.draw(st.integers(0, n)) for n in self.sizes]
        if all(n <= len(self.free(g)) for g, n in enumerate(needs)):
            free = [self.free(g) for g in range(len(needs))]
            holder = [self.pool.allocate(g, n) for g, n in enumerate(needs)]
            for pages, n, allowed in zip(holder, needs, free, strict=True):
                assert len(set(pages)) == n and set(pages) <= allowed
            self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def share(self, data):
        source = data.draw(st.sampled_from(self.holders))
        ends = [data.draw(st.integers(0, len(pages))) for pages in source]
        copy = [pages[:end] for pages, end in zip(source, ends, strict=True)]
        for group, pages in enumerate(copy):
            self.pool.share(group, pages)
        self.holders.append(copy)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), sinks=st.integers(0, 2))
    def free_pages(self, data, sinks):
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        for group, pages in enumerate(holder):
            self.pool.free(group, [0] * sinks + pages)

    @invariant()
    def references_add_up(self):
        self.pool.check_integrity(self.holders)
        free = tuple(len(self.free(g)) for g in range(len(self.sizes)))
        assert self.pool.num_free_pages == free
        assert self.pool.num_usable_pages == tuple(n - 1 for n in self.sizes)
        for group, size in enumerate(self.sizes):
            for page in range(1, size):
                held = sum(holder[group].count(page) for holder in self.holders)
                assert self.pool.num_references(group, page) == held


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


def test_the_sink_is_never_allocated():
    pool = PagePool([5, 3])
    assert sorted(pool.allocate(0, 4)) == [1, 2, 3, 4] and sorted(pool.allocate(1, 2)) == [1, 2]
    assert pool.num_free_pages == (0, 0)


def test_a_page_is_not_freed_twice():
    pool = PagePool([4])
    first, second = pool.allocate(0, 2)
    pool.free(0, [first])
    with pytest.raises(RuntimeError, match=f"^page {first} of group 0 is freed twice"):
        pool.free(0, [second, first])
    pool.check_integrity([])
    assert sorted(pool.allocate(0, 3)) == [1, 2, 3]


def test_a_pool_may_have_no_groups():
    pool = PagePool(())
    assert pool.num_free_pages == ()
    pool.check_integrity([[], []])


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda pool, holder: holder[0].append(holder[0][0]),  # held twice, counted once
        lambda pool, holder: holder[0].pop(),  # lost
        lambda pool, holder: pool.share(0, [holder[0][0]]),  # counted twice, held once
        lambda pool, holder: pool.free(0, [holder[0][0]]),  # free while held
        lambda pool, holder: pool._free_pages[0].pop(),  # neither free nor held
        lambda pool, holder: pool._free_pages[0].append(holder[0][0]),  # free and held
        lambda pool, holder: pool._free_pages[0].append(pool._free_pages[0][0]),  # free twice
        lambda pool, holder: pool._free_pages[0].append(0),  # the sink is free
    ],
)
def test_integrity_can_fail(corrupt):
    pool = PagePool([6, 6])
    holder = [pool.allocate(0, 2), pool.allocate(1, 1)]
    pool.check_integrity([holder])
    corrupt(pool, holder)
    with pytest.raises(RuntimeError, match="group 0"):
        pool.check_integrity([holder])
