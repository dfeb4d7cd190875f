"""The prefix cache, one rule at a time, by hand."""

import pytest

from configs.cache import SNAPSHOT, CacheSpec
from inference.kv_pages.page_pool import PagePool
from inference.kv_pages.prefix_cache import Match, PageCosts, PrefixCache, Transfer


def cache_of(num_pages, windows=(None,), page_tokens=2, host=None, **settings) -> PrefixCache:
    """A cache over `num_pages` usable pages of each group, `host` likewise."""
    pools = [
        PagePool([n + 1 for n in sizes]) if sizes is not None else None
        for sizes in (num_pages, host)
    ]
    specs = [
        window if isinstance(window, CacheSpec) else CacheSpec(1, 1, window=window)
        for window in windows
    ]
    return PrefixCache(pools[0], specs, page_tokens, pools[1], **settings)


class Run:
    """A sequence as the scheduler has it: its pages, and its deepest node."""

    def __init__(self, cache: PrefixCache, tokens, key=(), limit=None):
        self.cache, self.tokens, self.key = cache, list(tokens), key
        match = cache.match_prefix(self.tokens, key, limit)
        self.num_tokens = self.num_cached_tokens = match.num_tokens
        self.pages = cache.attach(match)
        self.node = match.nodes[-1] if match.nodes else None

    def allocate(self, num_tokens):
        """Allocates pages for the next tokens."""
        stop = -(-(self.num_tokens + num_tokens) // self.cache._page_tokens)
        for group, pages in enumerate(self.pages):
            pages += self.cache.allocate(group, max(0, stop - len(pages)))

    def commit(self, num_tokens):
        self.num_tokens += num_tokens
        self.node = self.cache.insert(self.tokens, self.num_tokens, self.pages, self.key, self.node)

    def slide(self):
        """Frees what every window has passed, as the scheduler does."""
        for group, (spec, pages) in enumerate(zip(self.cache._specs, self.pages, strict=True)):
            for index in spec.dead_pages(self.num_tokens, self.cache._page_tokens):
                if index >= len(pages):
                    break
                self.cache.free(group, [pages[index]])
                pages[index] = 0

    def end(self):
        for group, pages in enumerate(self.pages):
            self.cache.free(group, pages)


def run(cache, tokens, **settings) -> Run:
    """A sequence that has computed all its tokens."""
    new = Run(cache, tokens, **settings)
    new.allocate(len(new.tokens) - new.num_tokens)
    new.commit(len(new.tokens) - new.num_tokens)
    return new


def put(cache, tokens, **settings) -> list[list[int]]:
    """Leaves a finished sequence's pages behind."""
    done = run(cache, tokens, **settings)
    done.end()
    cache.check_integrity([])
    return done.pages


def cached(cache, tokens, **settings) -> int:
    return cache.match_prefix(tokens, limit=len(tokens), **settings).num_tokens


# --- matching -------------------------------------------------------------------------------------


def test_a_match_is_whole_pages_of_equal_tokens_and_leaves_one_to_feed():
    cache = cache_of([9])
    put(cache, "abcdefg")
    assert (
        cache.match_prefix("abcdefg").num_tokens == 6
        and cache.match_prefix("abcdef").num_tokens == 4
    )
    assert cache.match_prefix("abcdef", limit=6).num_tokens == 6
    assert cache.match_prefix("abcdef", limit=5).num_tokens == 4
    assert cache.match_prefix("abcdef", limit=1).num_tokens == 0
    assert cached(cache, "abcXef") == 2 and cached(cache, "Xbcdef") == 0
    assert cache.match_prefix("") == Match((), 0, 0, (0,))
    assert cache.num_nodes == 3


def test_keys_share_nothing():
    cache = cache_of([9])
    put(cache, "abcd", key=("v1", "salt"))
    assert cached(cache, "abcd") == cached(cache, "abcd", key=("v2", "salt")) == 0
    assert cached(cache, "abcd", key=("v1", "salt")) == 4


def test_a_hit_shares_pages_and_branches_where_tokens_differ():
    cache = cache_of([9])
    first = run(cache, "abcdef")
    second = run(cache, "abcdXY")
    assert second.num_cached_tokens == 4
    assert second.pages[0][:2] == first.pages[0][:2] and second.pages[0][2] != first.pages[0][2]
    assert cache.num_nodes == 4 and cache.num_available_pages == (5,)
    cache.check_integrity([first.pages, second.pages])
    first.end()
    assert cache.num_available_pages == (6,)  # the other still holds what both share


def test_pages_are_cached_as_they_fill():
    cache = cache_of([9])
    new = Run(cache, "abcde")
    new.allocate(5)
    for num_tokens, nodes in ((1, 0), (0, 0), (1, 1), (3, 2)):
        new.commit(num_tokens)
        assert cache.num_nodes == nodes and cached(cache, "abcde") == 2 * nodes
        cache.check_integrity([new.pages])


def test_a_state_resumes_where_it_was_kept():
    """Pages of all tokens, and of the state one snapshot, behind the second page."""
    cache = cache_of([9, 2], (None, SNAPSHOT))
    first = Run(cache, "abcdefgh")
    first.pages[0] += cache.allocate(0, 4)
    first.pages[1] += [0, *cache.allocate(1, 1), 0, 0]
    first.commit(8)
    first.end()
    found = cache.match_prefix("abcdefgh!")
    assert (found.num_tokens, found.num_known_tokens) == (4, 8)
    assert cache.match_prefix("abc").num_tokens == 0
    again = Run(cache, "abcdefgh!")
    assert again.pages[1] == [0, first.pages[1][1]] and len(again.pages[0]) == 2
    cache.check_integrity([again.pages])
    cache.allocate(1, 1)  # the other one is free, and the one in use is not evicted
    assert not cache.can_allocate((0, 1))


def test_a_model_may_have_no_groups():
    cache = cache_of([], ())
    put(cache, "abcd")
    assert cache.match_prefix("abcd") == Match((), 0, 0, ()) and cache.can_allocate(())


def test_computed_twice_is_kept_once():
    cache = cache_of([9])
    twins = [Run(cache, "abcde") for _ in range(2)]  # neither finds anything
    for twin in twins:
        twin.allocate(5)
    own = [list(twin.pages[0]) for twin in twins]
    for twin in twins:
        twin.commit(5)
    assert twins[0].pages[0] == own[0]
    assert twins[1].pages[0] == [*own[0][:2], own[1][2]] and twins[0].node is twins[1].node
    assert cache.num_available_pages == (9 - 4,)
    cache.check_integrity([twin.pages for twin in twins])


# --- eviction -------------------------------------------------------------------------------------


def test_leaves_go_first_the_least_recently_used_before_others():
    cache = cache_of([6])
    put(cache, "aabbcc")
    put(cache, "xxyy")
    put(cache, "aabb")  # now aa and bb are used more recently than xx
    cache.allocate(0, 1 + 1)  # one is free
    assert [cached(cache, t) for t in ("aabbcc", "xxyy")] == [4, 4]
    cache.allocate(0, 1)
    assert [cached(cache, t) for t in ("aabbcc", "xxyy")] == [4, 2]
    cache.allocate(0, 2)
    assert [cached(cache, t) for t in ("aabbcc", "xxyy")] == [2, 0]
    assert cache.num_available_pages == (1,) and not cache.can_allocate((2,))


def test_pages_in_use_stay():
    cache = cache_of([4])
    put(cache, "aabbcc")
    user = Run(cache, "aabbX")
    assert user.num_cached_tokens == 4 and cache.num_available_pages == (2,)
    taken = cache.allocate(0, 2)
    assert not set(taken) & set(user.pages[0]) and cached(cache, "aabbcc") == 4
    cache.check_integrity([user.pages, [taken]])


def test_a_page_freed_twice_is_refused_and_still_found():
    """Else another sequence would get it, while prompts go on to match what it held."""
    cache = cache_of([4])
    [pages] = put(cache, "abcdef")
    for page in pages:
        with pytest.raises(RuntimeError, match=f"^page {page} of group 0 is freed twice"):
            cache.free(0, [page])
    cache.check_integrity([])
    assert cached(cache, "abcdef") == 6


def test_attaching_evicts_others_never_itself():
    cache = cache_of([4], host=[2])
    [old] = put(cache, "aabb")
    taken = cache.allocate(0, 3)  # bb goes to the host
    assert cache.take_transfers() == (Transfer(0, old[1], 1, True),)
    cache.free(0, taken)
    put(cache, "xxyyzz")
    match = cache.match_prefix("aabbX")
    assert match.num_tokens == 4 and match.num_new_pages == (
        2,
    )  # aa was evictable, bb needs a page
    assert cache.can_allocate((4,)) and not cache.can_allocate((5,))
    pages = cache.attach(match)
    assert cache.num_available_pages == (2,) and cached(cache, "xxyyzz") == 6  # zz is on the host
    assert cache.take_transfers() == (
        Transfer(0, pages[0][1], 2, True), Transfer(0, pages[0][1], 1, False),
    )  # fmt: skip
    cache.check_integrity([pages])


def test_what_is_attached_from_the_host_is_not_evicted_there():
    cache = cache_of([4], host=[2])
    put(cache, "aabb")
    hoard = cache.allocate(0, 4)  # fills the host
    cache.free(0, hoard)
    [others] = put(cache, "wwxxyyzz")
    cache.take_transfers()
    [pages] = cache.attach(cache.match_prefix("aabbX"))
    # zz finds no room there, yy has aa's, which is copied back by then.
    assert cache.take_transfers() == (
        Transfer(0, pages[0], 2, False),
        Transfer(0, others[2], 2, True),
        Transfer(0, pages[1], 1, False),
    )
    assert cached(cache, "wwxxyyzz") == 6 and cached(cache, "aabb") == 4
    cache.check_integrity([[pages]])


# --- windows --------------------------------------------------------------------------------------


def test_a_window_needs_its_last_pages_only():
    cache = cache_of([9, 9], (None, 4))
    pages = put(cache, "aabbccdd")
    match = cache.match_prefix("aabbccddX")
    assert match.num_tokens == 8 and match.num_new_pages == (4, 2)
    user = Run(cache, "aabbccddX")
    assert user.pages == [pages[0], [0, 0, *pages[1][2:]]]
    assert cache.num_available_pages == (5, 7)
    cache.check_integrity([user.pages])


def test_every_group_must_be_able_to_resume():
    cache = cache_of([9, 3], (None, 4))
    user = Run(cache, "aabbccdd")
    for _ in range(4):
        user.allocate(2)
        user.commit(2)
        user.slide()
    # With 3 pages for the window, dd got aa's when that had slid out of use.
    assert user.pages[1][:2] == [0, 0] and cache.num_nodes == 4
    assert [cached(cache, "aabbccdd"[:n]) for n in (2, 4, 6, 8)] == [0, 0, 6, 8]
    assert cached(cache, "aabbX") == 0 and cached(cache, "aabbccX") == 6
    cache.check_integrity([user.pages])
    user.end()
    put(cache, "aabb")  # computes both again, and aa has a page in the window's group once more
    assert cached(cache, "aabb") == 4


def test_a_slid_page_goes_alone_and_an_evictable_leaf_whole():
    cache = cache_of([9, 4], (None, 2), host=[9, 9])
    user = run(cache, "aabbcc")
    user.slide()
    assert user.pages[1] == [0, 0, user.pages[1][2]] and cache.num_available_pages == (6, 3)
    first = cache.allocate(1, 2)  # one is free, the other aa's
    assert cache.take_transfers() == () and cached(cache, "aa") == 0 and cached(cache, "aabb") == 4
    user.end()
    second = cache.allocate(1, 1)  # bb's
    assert cache.take_transfers() == () and cached(cache, "aabb") == 0
    assert cache.num_available_pages == (9, 1) and cache.num_nodes == 3
    third = cache.allocate(1, 1)  # cc with its page of the first group
    assert cache.take_transfers() == (
        Transfer(0, user.pages[0][2], 1, True), Transfer(1, user.pages[1][2], 1, True),
    )  # fmt: skip
    assert cached(cache, "aabbcc") == 6 and cache.num_available_pages == (9, 0)
    cache.check_integrity([[[], first + second + third]])


def test_the_deepest_page_of_a_running_sequence_may_slide():
    cache = cache_of([9, 2], (None, 1), host=[9, 9])
    user = run(cache, "aabb")
    user.slide()
    hoard = cache.allocate(1, 2)
    assert user.pages[1] == [0, 0] and cache.take_transfers() == ()
    assert cached(cache, "aabb") == 4  # the window of one token sees nothing before it
    cache.check_integrity([user.pages, [[], hoard]])


def test_only_what_is_needed_is_evicted():
    cache = cache_of([4, 4], (None, 4))
    put(cache, "aabbccdd")
    cache.allocate(0, 1)
    assert cache.num_available_pages == (3, 4)
    cache.allocate(1, 1)  # dd had a page in either group
    assert cached(cache, "aabbccdd") == 6 and cache.num_available_pages == (3, 3)


def test_where_all_groups_slide_empty_nodes_go_and_a_kept_one_comes_back():
    cache = cache_of([3], (1,))  # whose window is shorter than a page
    user = Run(cache, "aabbcc")
    for nodes in (1, 2):
        user.allocate(2)
        user.commit(2)
        user.slide()
        assert cache.num_nodes == nodes and cached(cache, "aabb"[: 2 * nodes]) == 2 * nodes
    hoard = cache.allocate(0, 3)
    assert cache.num_nodes == 0 and cached(cache, "aabb") == 0
    cache.free(0, hoard)
    user.allocate(2)
    user.commit(2)
    assert cache.num_nodes == 3 and cached(cache, "aabbcc") == 6  # aa and bb without pages
    assert cache.match_prefix("aabbccX").num_new_pages == (
        0,
    )  # a window of one token sees only itself
    cache.check_integrity([user.pages])
    user.end()
    cache.allocate(0, 3)
    assert cache.num_nodes == 0
    user = Run(cache, "aabb")
    user.num_tokens, user.pages = 4, [[0, 0]]  # slid before they were cached
    user.commit(0)
    assert cache.num_nodes == 0


def test_a_page_that_slid_away_is_adopted_from_the_next_who_computes_it():
    cache = cache_of([9, 9], (None, 2))
    first = run(cache, "aabbcc")
    first.slide()
    hoard = cache.allocate(1, 8)  # all that slid away
    assert cached(cache, "aa") == 0 and cached(cache, "aabbcc") == 6
    cache.free(1, hoard)
    second = run(cache, "aabbX")
    assert second.num_cached_tokens == 0 and second.pages[0][:2] == first.pages[0][:2]
    assert cached(cache, "aabb") == 4 and cache.match_prefix("aabbX").num_new_pages == (0, 0)
    cache.check_integrity([first.pages, second.pages])


# --- the host -------------------------------------------------------------------------------------


def test_what_is_evicted_comes_back_from_the_host():
    cache = cache_of([3], host=[3])
    [old] = put(cache, "aabb")
    hoard = cache.allocate(0, 3)
    assert cache.take_transfers() == (
        Transfer(0, old[1], 1, True), Transfer(0, old[0], 2, True),
    )  # fmt: skip
    assert cache.num_nodes == 2
    assert cache.match_prefix("aabbX").num_new_pages == (2,) and cache.num_available_pages == (0,)
    cache.free(0, hoard)
    user = Run(cache, "aabbX")
    [new] = user.pages
    assert cache.take_transfers() == (
        Transfer(0, new[0], 2, False), Transfer(0, new[1], 1, False),
    )  # fmt: skip
    assert cache._host_pool.num_free_pages == (3,)
    assert cache.take_transfers() == ()
    cache.check_integrity([user.pages])


def test_the_host_keeps_the_most_recently_used():
    cache = cache_of([4], host=[2])
    put(cache, "aabb")
    put(cache, "xxyy")
    cache.allocate(0, 2)
    assert cached(cache, "aabb") == cached(cache, "xxyy") == 4
    cache.allocate(0, 1)  # yy in place of bb
    assert cached(cache, "aabb") == 2 and cached(cache, "xxyy") == 4
    cache.allocate(0, 1)  # xx in place of aa
    assert cached(cache, "aabb") == 0 and cached(cache, "xxyy") == 4 and cache.num_nodes == 2


def test_what_is_expected_again_outlives_what_was_used_later():
    cache = cache_of([6])
    put(cache, "aabb")
    put(cache, "xxyy")
    put(cache, "ccdd")
    cache.retain("aabb!")
    cache.free(0, cache.allocate(0, 2))
    cache.check_integrity([])
    assert [cached(cache, tokens) for tokens in ("aabb", "xxyy", "ccdd")] == [4, 0, 4]
    put(cache, "eeff")
    cache.allocate(0, 4)  # its one lifetime has begun after "ccdd", and "eeff" came later
    assert [cached(cache, tokens) for tokens in ("aabb", "ccdd", "eeff")] == [0, 0, 4]


def test_what_has_come_again_is_as_others():
    cache = cache_of([6])
    put(cache, "aabb")
    cache.retain("aabb")
    put(cache, "aabbcc")
    put(cache, "xxyy")
    cache.allocate(0, 4)
    assert [cached(cache, tokens) for tokens in ("aabb", "xxyy")] == [0, 4]


def test_what_has_come_again_in_part_is_as_others():
    cache = cache_of([4], costs=PageCosts(return_percent=lambda num_tokens: 10**6))
    put(cache, "aabbcc")
    cache.retain("aabbcc")
    other = run(cache, "xx")
    cache.free(0, cache.allocate(0, 1))
    assert cached(cache, "aabbcc") == 4, "there was no other page to evict"
    other.end()
    run(cache, "aabb!").end()
    put(cache, "yy")
    cache.allocate(0, 2)
    assert [cached(cache, tokens) for tokens in ("xx", "aabb", "yy")] == [0, 2, 2]


def test_all_that_is_expected_again_is_evicted_in_turn():
    cache = cache_of([4])
    put(cache, "aabb")
    put(cache, "xxyy")
    for tokens in ("aabb", "xxyy"):
        cache.retain(tokens)
    cache.free(0, cache.allocate(0, 2))
    assert [cached(cache, tokens) for tokens in ("aabb", "xxyy")] == [0, 4]
    assert cache.can_allocate((4,)) and len(cache.allocate(0, 4)) == 4


@pytest.mark.parametrize(("percent", "num_lifetimes"), [(100, 1), (300, 3), (10**6, 8), (1, 1)])
def test_a_price_buys_lifetimes(percent, num_lifetimes):
    cache = cache_of([4], costs=PageCosts(return_percent=lambda num_tokens: percent))
    for tokens in ("aabb", "xxyy"):
        put(cache, tokens)
    cache.retain("aabb")
    survived = 0
    for n in range(12):
        put(cache, [2 * n, 2 * n, 2 * n + 1, 2 * n + 1])
        survived += cached(cache, "aabb") == 4
    assert survived == num_lifetimes


def test_the_less_others_are_used_again_the_longer():
    lifetimes = []
    for is_used in (True, False):
        cache = cache_of([4])
        for n in range(4):
            put(cache, [n] * 4)
            run(cache, [n] * (5 if is_used else 1)).end()
        put(cache, "aabb")
        cache.retain("aabb")
        lifetimes.append(cache.match_prefix("aabb!").nodes[-1].retention.num_renewals)
    assert lifetimes == [1, 7]


@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_the_number_of_groups_changes_no_lifetime(num_groups):
    cache = cache_of([4] * num_groups, [None] * num_groups)
    for n in range(60):
        put(cache, [n] * 4)
        if n % 3 == 2:
            run(cache, [n] * 5).end()
    cache.retain([59] * 4)
    assert cache.match_prefix([59] * 5).nodes[-1].retention.num_renewals == 3
    cache.check_integrity([])


def test_a_state_that_is_expected_again_stays():
    cache = cache_of([9, 1], (None, SNAPSHOT))
    first = Run(cache, "abcdef")
    first.pages[0] += cache.allocate(0, 3)
    first.pages[1] += [0, *cache.allocate(1, 1), 0]
    first.commit(6)
    first.end()
    cache.retain("abcdef")
    cache.free(1, cache.allocate(1, 1))
    assert cached(cache, "abcdef") == 0  # the only one there is room for
    cache.check_integrity([])


def test_pages_cheap_to_compute_are_dropped_with_what_depends_on_them():
    asked = []
    cache = cache_of([3], host=[3], costs=PageCosts(lambda n: asked.append(n) or n > 4))
    put(cache, "aabbcc")
    cache.allocate(0, 1)
    assert cached(cache, "aabbcc") == 6 and asked == [6]
    cache.allocate(0, 1)
    assert cached(cache, "aabbcc") == 2 and asked == [6, 4] and cache.num_nodes == 1
    assert cache._host_pool.num_free_pages == (3,)


def test_a_group_without_room_on_the_host_keeps_none_there():
    cache = cache_of([2, 2], (None, 4), host=[2, 0])
    put(cache, "aabb")
    cache.allocate(0, 1)
    assert cached(cache, "aabb") == 2 and cache.take_transfers() == ()


def test_pages_computed_again_replace_those_on_the_host():
    cache = cache_of([2], host=[2])
    put(cache, "aabb")
    cache.free(0, cache.allocate(0, 2))
    assert cache._host_pool.num_free_pages == (0,)
    user = run(cache, "aabb", limit=0)
    assert user.num_cached_tokens == 0 and cache._host_pool.num_free_pages == (2,)
    assert cache.num_nodes == 2
    assert all(transfer.to_host for transfer in cache.take_transfers())
    cache.check_integrity([user.pages])


def test_a_window_leaves_on_the_host_what_it_does_not_need():
    cache = cache_of([3, 3], (None, 2), host=[3, 3])
    put(cache, "aabbcc")
    hoards = [cache.allocate(group, 3) for group in range(2)]
    cache.take_transfers()
    for group, hoard in enumerate(hoards):
        cache.free(group, hoard)
    user = Run(cache, "aabbccX")
    assert user.num_cached_tokens == 6 and [t.group for t in cache.take_transfers()] == [0] * 3 + [
        1
    ]
    assert cache._host_pool.num_free_pages == (3, 1) and cached(cache, "aabb") == 4
    cache.check_integrity([user.pages])


# --- forgetting -----------------------------------------------------------------------------------


def test_a_key_is_dropped_with_its_pages():
    cache = cache_of([6], host=[2])
    put(cache, "aabb", key=1)
    user = run(cache, "aabbc", key=2)
    hoard = cache.allocate(0, 2)  # one of them bb's of key 1, which goes to the host
    cache.drop(1)
    cache.drop("unknown")
    assert cached(cache, "aabb", key=1) == 0 and cached(cache, "aabb", key=2) == 4
    assert cache._host_pool.num_free_pages == (2,) and cache.num_available_pages == (1,)
    cache.drop(2)
    cache.check_integrity([user.pages, [hoard]])
    user.tokens += "d"
    user.allocate(1)
    user.commit(1)  # all of it is known again
    assert cached(cache, "aabbcd", key=2) == 6


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda cache, tree, node: cache._pool.share(0, [node.pages[0]]),
        lambda cache, tree, node: cache._host_pool.allocate(0, 1),
        lambda cache, tree, node: tree.evictable[0].popitem(),
        lambda cache, tree, node: tree.evictable[0].move_to_end(node.pages[0]),
        lambda cache, tree, node: tree._nodes[1].popitem(),
        lambda cache, tree, node: tree.child(node, "empty"),
        lambda cache, tree, node: node.children.clear(),
        lambda cache, tree, node: tree.remove_page(node.parent, 0),
        lambda cache, tree, node: setattr(node, "num_device_children", 3),
        lambda cache, tree, node: setattr(tree, "_num_nodes", 9),
        lambda cache, tree, node: tree.set_host_page(node, 1, cache._host_pool.allocate(1, 1)[0]),
    ],
)
def test_integrity_can_fail(corrupt):
    cache = cache_of([6, 6], (None, 4), host=[6, 6])
    put(cache, "aabbccdd")
    cache.free(0, cache.allocate(0, 3))
    cache.check_integrity([])
    corrupt(cache, cache._tree, cache.match_prefix("aabbX").nodes[-1])
    with pytest.raises(RuntimeError):
        cache.check_integrity([])
