"""What the suffix tree proposes, in comparison with plain Python and with n-grams."""

import collections
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.speculation import suffix
from inference.speculation.ngram import NGramProposer
from inference.speculation.suffix import SuffixProposer
from layers.ragged import Ragged, Rectangle
from scripts.reports import agentic_trace
from tests import compiling

pytestmark = pytest.mark.quick_code

DEPTHS, MOST_VOTES = (2, 3, 4, 6, 8, 12, 16, 24), 4


class Tree:
    """The same tree without hashes: the token that follows a suffix, and its votes."""

    def __init__(self):
        self.nodes = collections.defaultdict(lambda: [None, 0])

    def learn(self, texts, end):
        """The votes of the newest token of each text count from the next step on."""
        before = {suffix: tuple(node) for suffix, node in self.nodes.items()}
        for text in texts:
            for depth in (depth for depth in DEPTHS if depth < end):
                suffix = tuple(text[end - 1 - depth : end - 1])
                token, votes = before.get(suffix, (None, 0))
                if token == text[end - 1]:
                    self.nodes[suffix] = [token, min(votes + 1, MOST_VOTES)]
                else:
                    self.nodes[suffix] = [token, votes - 1] if votes > 1 else [text[end - 1], 1]

    def drafts(self, text, num_drafts):
        drafts = []
        while len(drafts) < num_drafts:
            suffixes = (tuple([*text, *drafts][-depth:]) for depth in reversed(DEPTHS))
            known = [suffix for suffix in suffixes if suffix in self.nodes]
            if not known:
                return drafts + [-1] * (num_drafts - len(drafts))
            drafts.append(self.nodes[known[0]][0])
        return drafts


class Reader:
    """Feeds one slot a time as steps do, with as many tokens of padding behind as a step has."""

    def __init__(self, proposer, longest, num_drafts):
        self._proposer, self._longest, self._num_drafts = proposer, longest, num_drafts
        self.state = jax.tree.map(jnp.asarray, proposer.init())
        self._propose = compiling.jit(self._proposed)
        self._observe = compiling.jit(self._observed, static_argnames="width", donate_argnums=0)

    def _proposed(self, state, slot, newest):
        rectangle = _row(slot, newest, 1 + self._num_drafts, 1 + self._num_drafts)
        inputs = types.SimpleNamespace(decode=rectangle)
        return self._proposer.propose({}, (), state, inputs)[1].tokens_Rk[0]

    def _observed(self, state, slot, start, fed_T, num_kept, emitted_W, num_emitted, *, width):
        step = types.SimpleNamespace(
            ragged=Ragged((_row(slot, start, num_kept, width),)), tokens_T=fed_T,
            num_kept_Y=num_kept[None], slot_Y=slot[None], sampled_YW=emitted_W[None],
            num_emitted_Y=num_emitted[None], newest_Y=(start + num_kept + num_emitted - 1)[None],
        )  # fmt: skip
        return self._proposer.observe({}, (), state, step)[1]

    def admit(self, slot, prompt):
        history = np.zeros((1, self._longest), np.int32)
        history[0, : len(prompt)] = prompt
        self.state = self._proposer.admit(
            self.state, np.array([slot]), np.array([-1]), jnp.asarray(history)
        )

    def feed(self, slot, start, tokens, num_fed, width):
        """Feeds `tokens[:num_fed]` from `start` on; the others are emitted."""
        fed, emitted = np.full(width, 7, np.int32), np.zeros(1 + self._num_drafts, np.int32)
        fed[:num_fed], emitted[: len(tokens) - num_fed] = tokens[:num_fed], tokens[num_fed:]
        self.state = self._observe(
            self.state, np.int32(slot), np.int32(start), fed, np.int32(num_fed), emitted,
            np.int32(len(tokens) - num_fed), width=width,
        )  # fmt: skip

    def drafts(self, slot, newest):
        return self._propose(self.state, np.int32(slot), np.int32(newest)).tolist()


def _row(slot, start, num_valid, width):
    nth_W = jnp.arange(width)
    return Rectangle(slot[None], (start + nth_W)[None], (nth_W < num_valid)[None], ())


def test_drafts_follow_the_longest_known_suffix_of_any_text():
    """Texts of few words that take turns in two slots: each token counts for both."""
    rng, tree, num_drafts = np.random.default_rng(0), Tree(), 5
    phrases = [rng.integers(0, 6, rng.integers(2, 9)).tolist() for _ in range(6)]
    reader = Reader(SuffixProposer(2, 64, 1 << 16), 64, num_drafts)
    num_proposed = 0
    for turn in range(4):
        texts = [sum((phrases[n] for n in rng.integers(0, 6, 12)), [])[:40] for _ in range(2)]
        for slot, text in enumerate(texts):
            reader.admit(slot, text[:1])
        for end in range(1, 40):
            for slot, text in enumerate(texts):
                expected = tree.drafts(text[:end], num_drafts)
                assert reader.drafts(slot, end - 1) == expected, (turn, slot, end)
                num_proposed += expected[0] >= 0
                tree.learn([text], end)
                reader.feed(slot, end - 1, text[end - 1 : end + 1], 1, 1 + num_drafts)
    assert num_proposed > 200


def test_a_prompt_in_one_step_is_learnt_without_its_padding():
    prompt = [1, 2, 3, 4, 5, 6, 1, 2, 3]
    reader = Reader(SuffixProposer(2, 16, 1 << 12), 16, 4)
    reader.admit(0, prompt)
    reader.feed(0, 0, [*prompt, 4], len(prompt), 12)
    assert reader.drafts(0, len(prompt)) == [5, 6, 1, 2]
    reader.admit(1, [9, 2, 3])  # another request reads the same
    assert reader.drafts(1, 2) == [4, 5, 6, 1]
    reader.admit(1, [9, 9, 3])  # and one that shares a single token does not
    assert reader.drafts(1, 2) == [-1] * 4


def test_what_was_not_accepted_does_not_vote():
    reader = Reader(SuffixProposer(1, 16, 1 << 12), 16, 3)
    reader.admit(0, [1, 2, 3])
    before = np.asarray(reader.state[1])
    reader.feed(0, 2, [3], 1, 4)  # behind it stand three drafts that were refused
    places = np.flatnonzero((np.asarray(reader.state[1]) != before).any(-1))
    chex.assert_trees_all_equal(np.asarray(reader.state[1])[places, 1:], np.array([[3, 1]]))


def test_memory_is_bounded_and_text_beyond_it_is_forgotten():
    tokens = np.random.default_rng(0).integers(0, 500, 400).tolist()
    reader = Reader(SuffixProposer(1, 512, 16), 512, 3)
    reader.admit(0, tokens)
    reader.feed(0, 0, [*tokens, 1], len(tokens), 512)
    chex.assert_shape(reader.state[1], (16, 3))
    for end in range(30, 400, 50):
        drafts = reader.drafts(0, end)
        assert all(draft in tokens or draft == -1 for draft in drafts)


def test_the_order_of_votes_within_a_step_does_not_matter():
    """Accelerators scatter in no order: of votes for one node the last of the step counts."""
    rng, num_nodes = np.random.default_rng(0), 1 << 8
    text_YS = jnp.asarray(rng.integers(0, 3, (4, 64)), jnp.int32)
    end_W = np.arange(40, 64)
    place_YWN, node_YWN3 = suffix.votes(
        jnp.zeros((num_nodes, 3), jnp.int32), text_YS[:, end_W[:, None] - 1 - np.arange(24)],
        text_YS[:, end_W], jnp.ones((4, 24), bool),
    )  # fmt: skip
    places, voted = np.ravel(place_YWN), np.reshape(node_YWN3, (-1, 3))
    for order in (np.arange(places.size)[::-1], rng.permutation(places.size)):
        scattered = [np.zeros((num_nodes + 1, 3), np.int32) for _ in range(2)]
        for nodes, nth_X in zip(scattered, (np.arange(places.size), order), strict=True):
            for nth in nth_X:
                nodes[places[nth]] = voted[nth]
        chex.assert_trees_all_equal(*(nodes[:num_nodes] for nodes in scattered))
    reader = Reader(SuffixProposer(1, 16, 1 << 12), 16, 1)
    reader.admit(0, [1, 2, 3, 1, 2, 4, 1, 2])
    reader.feed(0, 0, [1, 2, 3, 1, 2, 4, 1, 2, 9], 8, 8)
    reader.admit(0, [1, 2])
    assert reader.drafts(0, 1) == [4]


def accepted_per_pass(proposer, turns, num_drafts):
    """How many drafts a pass verifies as right where the model writes these answers."""
    longest = 704
    reader = Reader(proposer, longest, num_drafts)
    num_accepted = num_passes = 0
    for prompt, answer in turns:
        text, newest = [*prompt, *answer], len(prompt)
        reader.admit(0, prompt)
        reader.feed(0, 0, text[: newest + 1], newest, longest)
        while newest + 1 < len(text):
            ahead = text[newest + 1 : newest + 1 + num_drafts]
            drafts = reader.drafts(0, newest)[: len(ahead)]
            accepted = int(np.cumprod(np.array(drafts) == np.array(ahead)).sum())
            emitted = min(1 + accepted, len(ahead))
            fed = text[newest : newest + 1 + emitted]
            reader.feed(0, newest, fed, emitted, 1 + num_drafts)
            num_accepted, num_passes, newest = (
                num_accepted + accepted,
                num_passes + 1,
                newest + emitted,
            )
    return num_accepted / num_passes


def test_agents_are_drafted_better_than_by_n_grams():
    turns = agentic_trace.requests(num_tasks=2)
    suffix = accepted_per_pass(SuffixProposer(1, 704, 1 << 16), turns, 4)
    ngram = accepted_per_pass(NGramProposer(1, 704), turns, 4)
    print(f"accepted a pass: {suffix:.2f} by the suffix tree, {ngram:.2f} by n-grams")
    assert suffix > 1.5 * ngram
