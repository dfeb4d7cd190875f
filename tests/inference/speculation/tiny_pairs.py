"""A target of 8 tokens and proposers for it, as tables; and how often the verifier says what.

A state is a prefix of the output: 0 is the empty one, `child(s, t)` is s followed by t. Prefixes of
fewer than `LENGTH` tokens have rows in the tables, those of `LENGTH` are the cells to be counted.
Expected counts come from transformers' processors in numpy, in float64: nothing that is tested.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy import stats

from inference.sampling import gumbel, sampler
from inference.sampling.gumbel import Purpose
from inference.speculation.acceptance import rejection, trees
from tests import compiling
from tests.inference.sampling.test_sampling import (
    Request,
    pack,
    reference_edit,
    reference_warp,
    softmax,
    tile,
)

VOCAB, LENGTH, DRAFTS = 8, 3, 2
STATES, CELLS = 73, 512  # 1 + 8 + 64, and 8^3
PROMPT = (5, 2, 2)
BLOCK = 1 << 14  # rows at a time

PROPOSERS = ("ngram", "draft", "medusa", "eagle")
FILTERS = {"none": {}, "top_k": {"top_k": 4}, "top_p": {"top_p": 0.9}, "min_p": {"min_p": 0.04}}
KINDS = {  # how their drafts come about
    **{("chain", name): "drawn" for name in PROPOSERS[1:]}, ("chain", "ngram"): "given",
    ("chain", "choosy"): "choosy",
    ("tree", "ngram"): "given", ("tree", "draft"): "drawn", ("tree", "medusa"): "given",
    ("tree", "eagle"): "joint",
}  # fmt: skip
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3}


def _prefixes() -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for state in range(1, STATES):
        found.append((*found[(state - 1) // VOCAB], (state - 1) % VOCAB))
    return found


PREFIXES = _prefixes()
LAST = np.array([(PROMPT + prefix)[-1] for prefix in PREFIXES])
POSITION = np.array([len(PROMPT) + len(prefix) for prefix in PREFIXES], np.int32)
COUNTS = np.stack([
    [np.bincount(part, minlength=VOCAB) for part in (PROMPT, np.array(prefix, np.int64))]
    for prefix in PREFIXES
])  # fmt: skip


def request(temperature: float = 1.0, filtered: str = "none", penalties: bool = False) -> Request:
    own = PENALTIES if penalties else {}
    return Request(temperature, prompt_length=len(PROMPT), **FILTERS[filtered], **own)


def ancestors(steps: int) -> np.ndarray:
    """The state so many tokens before each; the empty one where there are not as many."""
    states = np.arange(STATES)
    for _ in range(steps):
        states = np.maximum(states - 1, 0) // VOCAB
    return states


# --- laws -----------------------------------------------------------------------------------------

_law = compiling.jit(sampler.distribution)


def law(logits_SV: np.ndarray, asked: Request, counts=COUNTS, position=POSITION) -> np.ndarray:
    """f32[S, V] by the sampler, a row a state."""
    own, _ = pack([asked], VOCAB)
    return np.asarray(_law(logits_SV, tile(own, STATES), position, counts))


def raw_law(logits_SV: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    return np.stack([softmax(row / temperature) for row in logits_SV]).astype(np.float32)


def target_logits() -> np.ndarray:
    table = np.random.default_rng(17).normal(size=(VOCAB, VOCAB)) * 1.6
    return table[LAST].astype(np.float32)


def expected_cells(asked: Request, logits_SV: np.ndarray) -> np.ndarray:
    """f64[CELLS], the probability of each sequence of `LENGTH` tokens."""
    rows = [
        softmax(reference_warp(reference_edit(x.copy(), asked, int(p), c), asked))
        for x, p, c in zip(logits_SV, POSITION, COUNTS, strict=True)
    ]
    return cells_of(np.stack(rows))


def cells_of(law_SV: np.ndarray) -> np.ndarray:
    """The probability of each sequence, from the laws of its tokens."""
    cells = np.ones(1)
    for length in range(LENGTH):
        first = (VOCAB**length - 1) // (VOCAB - 1)
        cells = (cells[:, None] * law_SV[first : first + VOCAB**length]).ravel()
    return cells


def proposer_laws(name: str, asked: Request) -> np.ndarray:
    """f32[DRAFTS, S, V]: with which law the draft after each state is drawn, by its depth.

    A draft model sees all tokens before it. Medusa's heads see those before the first draft.
    EAGLE's head sees the token before it, and a feature of those before the first draft.
    """
    rng = np.random.default_rng(18)
    near = target_logits() * 0.8 + (rng.normal(size=(VOCAB, VOCAB)))[LAST]
    found = []
    for depth in range(DRAFTS):
        root = ancestors(depth)
        head, feature = rng.normal(size=(2, VOCAB, VOCAB))
        if name == "medusa":
            logits = near[root] * 0.7**depth + head[LAST[root]] * depth
            found.append(law(logits.astype(np.float32), asked, COUNTS[root], POSITION[root]))
        else:
            logits = near + (feature[LAST[root]] if name == "eagle" else 0)
            found.append(law(logits.astype(np.float32), asked))
    return np.stack(found)


# --- sampling -------------------------------------------------------------------------------------


def child(state_R: jax.Array, token_R: jax.Array) -> jax.Array:
    return jnp.where(state_R < STATES, VOCAB * state_R + 1 + token_R, state_R)


def look(table_SX: jax.Array, state_R: jax.Array) -> jax.Array:
    """Rows of a table; past `LENGTH` any will do."""
    return jnp.asarray(table_SX)[jnp.minimum(state_R, STATES - 1)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pair:
    """What a pass of speculation needs to know."""

    law_WSV: np.ndarray  # the target's law at each place of a row, f32[1 + DRAFTS, S, V]
    draft_law_kSV: np.ndarray  # what proposers say that they draw from
    drawn_law_kSV: np.ndarray  # what they draw from


def pair(name: str, asked: Request) -> Pair:
    target, proposer = law(target_logits(), asked), proposer_laws(name, asked)
    return Pair(np.stack([target] * (1 + DRAFTS)), proposer, proposer)


def chain(
    pair: Pair, state_R: jax.Array, seed_R2: jax.Array, kind: str, purpose: Purpose
) -> tuple[jax.Array, jax.Array]:
    """One pass with a chain of drafts: tokens and how many count. A proposer that is choosy, which
    is wrong, drops a last draft that is unlikely.
    """
    position_R, is_drawn = position_of(state_R), kind != "given"
    states, drafts, draft_laws = [state_R], [], []
    for depth in range(DRAFTS):
        draft_laws.append(look(pair.draft_law_kSV[depth], states[-1]))
        scores_RV = children(pair, depth, states[-1], position_R, seed_R2, is_drawn, purpose)
        drafts.append(jnp.argmax(scores_RV, axis=-1).astype(jnp.int32))
        states.append(child(states[-1], drafts[-1]))
    laws = [look(law_SV, s) for law_SV, s in zip(pair.law_WSV, states, strict=True)]
    num_drafts_R = jnp.where(state_R % 3 == 2, DRAFTS - 1, DRAFTS)
    if kind == "choosy":
        likely_R = jnp.take_along_axis(draft_laws[-1], drafts[-1][:, None], axis=1)[:, 0] > 0.2
        num_drafts_R = jnp.where(likely_R, DRAFTS, DRAFTS - 1)
    draft_law = jnp.stack(draft_laws, axis=1) if is_drawn else None
    return rejection.verify(
        jnp.stack(laws, axis=1), seed_R2, position_R, jnp.stack(drafts, axis=1), num_drafts_R,
        draft_law,
    )  # fmt: skip


def tree(
    pair: Pair, state_R: jax.Array, seed_R2: jax.Array, kind: str, purpose: Purpose
) -> tuple[jax.Array, jax.Array]:
    """One pass with 2 children of the root and 4 of theirs, drawn without replacement or the
    likeliest, or with the 3 of theirs that are likeliest together with their parent, in a tree of
    another shape for each row (EAGLE-2: Li et al. 2024, arXiv 2406.16858).
    """
    position_R, is_drawn = position_of(state_R), kind == "drawn"
    scores_RV = children(pair, 0, state_R, position_R, seed_R2, is_drawn, purpose)
    first_RV, first_R2 = largest(scores_RV, 2)
    next_scores, next_tokens, next_parents = [], [], []
    for c in range(2):
        state = child(state_R, first_R2[:, c])
        scores_RV = children(pair, 1, state, position_R, seed_R2, is_drawn, purpose)
        values_Rn, tokens_Rn = largest(scores_RV, 3 if kind == "joint" else 2)
        next_scores.append(first_RV[:, c, None] + values_Rn)
        next_tokens.append(tokens_Rn)
        next_parents.append(jnp.full_like(tokens_Rn, 1 + c))
    second, parent = (jnp.concatenate(x, axis=1) for x in (next_tokens, next_parents))
    if kind == "joint":
        best = largest(jnp.concatenate(next_scores, axis=1), 3)[1]
        second, parent = (jnp.take_along_axis(x, best, axis=1) for x in (second, parent))
    rows = len(state_R)
    root_R3 = jnp.broadcast_to(jnp.array([-1, 0, 0]), (rows, 3))
    parent_RN = jnp.concatenate([root_R3, parent], axis=1)
    token_RN = jnp.concatenate([jnp.zeros((rows, 1), jnp.int32), first_R2, second], axis=1)
    states = [state_R]
    for n in range(1, parent_RN.shape[1]):
        before = jnp.take_along_axis(jnp.stack(states, 1), parent_RN[:, n, None], axis=1)[:, 0]
        states.append(child(before, token_RN[:, n]))
    depths = [0, 1, 1] + [2] * second.shape[1]
    after = list(zip(depths, states, strict=True))
    laws = jnp.stack([look(pair.law_WSV[d], state) for d, state in after], axis=1)
    draft_laws = [look(pair.draft_law_kSV[min(d, DRAFTS - 1)], state) for d, state in after]
    draft_law = jnp.stack(draft_laws, axis=1) if is_drawn else None
    found = trees.by_rejection(
        laws, seed_R2, position_R, token_RN, parent_RN, 1 + DRAFTS, draft_law
    )
    return found.tokens_RW, found.num_emitted_R


def largest(x_RX: jax.Array, n: int) -> tuple[jax.Array, jax.Array]:
    """`lax.top_k`, in a third of its time for a few of 8."""
    values, ids = [], []
    for _ in range(n):
        ids.append(jnp.argmax(x_RX, axis=-1).astype(jnp.int32))
        values.append(x_RX.max(axis=-1))
        x_RX = jnp.where(jnp.arange(x_RX.shape[1]) == ids[-1][:, None], -jnp.inf, x_RX)
    return jnp.stack(values, axis=1), jnp.stack(ids, axis=1)


def children(pair, depth, state_R, position_R, seed_R2, is_drawn, purpose) -> jax.Array:
    """What a state's children are the largest of: f32[R, V]."""
    scores_RV = jnp.log(look(pair.drawn_law_kSV[depth], state_R))
    if not is_drawn:
        return scores_RV
    keys_R2 = gumbel.row_keys(seed_R2, position_R + depth, purpose)
    return scores_RV + gumbel.gumbel(keys_R2, jnp.arange(VOCAB)[None])


def position_of(state_R: jax.Array) -> jax.Array:
    """i32[R], of the token after the state."""
    return len(PROMPT) + sum((state_R >= first).astype(jnp.int32) for first in (1, 9, STATES))


@functools.partial(jax.jit, static_argnames=("run_pass", "kind", "purpose", "blocks"))
def _count(pair, stream, *, run_pass, kind, purpose, blocks):
    def sample_block(block):
        low_R = block * BLOCK + jnp.arange(BLOCK, dtype=jnp.uint32)
        seed_R2 = jnp.stack([jnp.full(BLOCK, stream, jnp.uint32), low_R], axis=1)

        def one_pass(i, carry):
            state_R, emitted = carry
            tokens_RW, num_R = run_pass(pair, state_R, seed_R2, kind, purpose)
            for j in range(tokens_RW.shape[1]):
                state_R = jnp.where(j < num_R, child(state_R, tokens_RW[:, j]), state_R)
            return state_R, emitted.at[i].set(jnp.bincount(num_R, length=2 + DRAFTS))

        first = jnp.zeros(BLOCK, jnp.int32), jnp.zeros((LENGTH, 2 + DRAFTS), jnp.int32)
        state_R, emitted = lax.fori_loop(0, LENGTH, one_pass, first)
        return jnp.bincount(state_R - STATES, length=CELLS), emitted[0]

    counts, emitted = lax.map(sample_block, jnp.arange(blocks, dtype=jnp.uint32))
    return counts.sum(0), emitted.sum(0)


def count(pair, stream, samples, name, run_pass=chain, purpose=Purpose.DRAFT):
    """i64[CELLS], how often each sequence is sampled, in at least so many samples; and how many
    tokens the first pass emits, as a histogram.
    """
    blocks, kind = -(-samples // BLOCK), KINDS[run_pass.__name__, name]
    found = _count(
        pair, np.uint32(stream), run_pass=run_pass, kind=kind, purpose=purpose, blocks=blocks
    )
    counts, emitted = (np.asarray(x, np.int64) for x in found)
    assert counts.sum() == emitted.sum() == blocks * BLOCK, "a sample is in no cell"
    return counts, emitted


def p_value(counts: np.ndarray, cells: np.ndarray) -> float:
    """Of a chi-square test, cells pooled to 5 expected or more; 0 where the impossible was seen."""
    if counts[cells == 0].any():
        return 0.0
    order = np.argsort(cells)
    expected, observed = counts.sum() * cells[order], counts[order]
    pooled, e, o = [], 0.0, 0
    for more_e, more_o in zip(expected, observed, strict=True):
        e, o = e + more_e, o + more_o
        if e >= 5:
            pooled.append((e, o))
            e, o = 0.0, 0
    pooled[-1] = pooled[-1][0] + e, pooled[-1][1] + o
    assert len(pooled) >= 6, "too few cells for a test"
    e, o = np.array(pooled).T
    return float(stats.chi2.sf(((o - e) ** 2 / e).sum(), len(pooled) - 1))
