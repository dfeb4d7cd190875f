"""From logits to token ids: filters and sampler of the step, pure functions over packed rows.

Filters apply in one order, that of transformers' logits processors:

    mask (grammar, allowed and banned ids, min_tokens) -> bias -> repetition (prompt + output)
    -> presence, frequency (output) -> temperature -> top-k -> top-p -> min-p -> epsilon cutoff

Transformers has no presence and frequency penalties: they stand where vLLM has them. It masks after
the penalties, which comes to the same, since -inf stays -inf.

The last four each keep the logits that reach a threshold (all equals with it), so together they
keep those that reach the highest, the *floor*. A token is drawn by adding Gumbel noise
(`gumbel.py`) and taking the argmax; no distribution is normalized or sorted. Where one is needed,
to weigh drafts, `distribution` computes it with the same filters.

On a CPU the floor is computed from each row's best candidates. Where other tokens might reach it
too, the row is *open*: its floor is found by bisection over the whole row. Whether a row is open
depends on that row alone, and so does its sample. On an accelerator every row is searched whole,
without a branch or a loop, and draws the same token up to rounding.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from inference.sampling import gumbel
from inference.sampling.parameters import SlotSampling
from layers import topk
from layers.backends import backends
from layers.reduce import log_sum_exp, row_sum, sums_before
from sharding import collectives

_CANDIDATES = 72  # top_k = 64, a common default, is proven only by a smaller logit after the 64th
ALL = np.uint32(0xFFFFFFFF)


def log_probs(
    logits_QV: jax.Array, summary: topk.Summary, ids_Q: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The model's own log-probability of the ids, in nats, before every filter.

    Returns:
        f32[Q], and bool[Q]: False where the row's logits are all -inf, or hold a NaN or +inf.
    """
    return at(logits_QV, ids_Q) - summary.total_Q, jnp.isfinite(summary.total_Q)


def top_log_probs(
    logits_QV: jax.Array, summary: topk.Summary, n: int
) -> tuple[jax.Array, jax.Array]:
    """The model's own n most likely tokens, in falling order: f32[Q, n] in nats, ids i32[Q, n]."""
    if n == 0:
        rows = logits_QV.shape[0]
        return jnp.zeros((rows, 0), jnp.float32), jnp.zeros((rows, 0), jnp.int32)
    values_Qn, ids_Qn = topk.top_n(logits_QV, summary.maxima_QG, n)
    return values_Qn - summary.total_Q[:, None], ids_Qn


def sample(
    logits_QV: jax.Array,
    summary: topk.Summary,
    sampling: SlotSampling,
    position_Q: jax.Array,
    counts: jax.Array | None = None,
    mask_QX: jax.Array | None = None,
) -> jax.Array:
    """Applies every filter and draws one token a row.

    At temperature 0 that is the argmax of the logits after the penalties. On a CPU nothing more is
    computed where all rows are greedy, and nothing at all where none is edited.

    Args:
        logits_QV: f32[Q, V], the model's own.
        summary: of the logits.
        sampling: parameters gathered to the Q rows.
        position_Q: i32[Q], absolute position of the token that is sampled.
        counts: integers [Q, 2, V], occurrences in the prompt and in the output; None: no penalties.
        mask_QX: u32[Q, ceil(V / 32)], what a grammar permits, packed as by `pack_mask`; None: all.

    Returns:
        i32[Q]. A row that permits no token can only end: its first stop id, or 0 if it has none.
    """
    is_edited, edit = _edits(sampling, position_Q, counts, mask_QX, logits_QV.shape[1])
    if backends.current().has_wide_reductions:
        edited_QV = edit(logits_QV)
        ids_Q = _draw_whole(edited_QV, sampling, position_Q)
        return _or_end(ids_Q, at(edited_QV, ids_Q), sampling)
    is_drawn = jnp.any(sampling.temperature > 0)

    def choose(x_QV: jax.Array, summary: topk.Summary) -> tuple[jax.Array, jax.Array]:
        ids_Q = lax.cond(
            is_drawn,
            lambda: _draw(x_QV, summary.maxima_QG, sampling, position_Q),
            lambda: summary.best_Q,
        )
        return ids_Q, at(x_QV, ids_Q)

    def choose_edited() -> tuple[jax.Array, jax.Array]:
        edited_QV = edit(logits_QV)
        return choose(edited_QV, topk.summarize(edited_QV))

    # Twice the program: logits that are edited or not as the result of one branch are a copy.
    ids_Q, logit_Q = lax.cond(is_edited, choose_edited, lambda: choose(logits_QV, summary))
    return _or_end(ids_Q, logit_Q, sampling)


def distribution(
    logits_QV: jax.Array,
    sampling: SlotSampling,
    position_Q: jax.Array,
    counts: jax.Array | None = None,
    mask_QX: jax.Array | None = None,
) -> jax.Array:
    """The probabilities with which `sample` draws each token, given the same arguments: f32[Q, V],
    on a mesh the chip's part of them. Greedy rows, and those that can only end, have one of 1.
    """
    edited_QV = _edits(sampling, position_Q, counts, mask_QX, logits_QV.shape[1])[1](logits_QV)
    summary = topk.summarize(edited_QV)
    best_logit_Q = at(edited_QV, summary.best_Q)
    is_certain_Q1 = ((sampling.temperature == 0) | (best_logit_Q == -jnp.inf))[:, None]
    best_Q1 = _or_end(summary.best_Q, best_logit_Q, sampling)[:, None]
    floor_Q = _floor(edited_QV, summary.maxima_QG, sampling)
    weight_QV = jnp.exp(
        _keep(_scale(edited_QV, sampling), floor_Q) - _scale(best_logit_Q[:, None], sampling)
    )
    drawn_QV = weight_QV / collectives.total(row_sum(weight_QV))
    return jnp.where(is_certain_Q1, ids_of(logits_QV) == best_Q1, drawn_QV)


def best(
    logits_QV: jax.Array,
    sampling: SlotSampling,
    position_Q: jax.Array,
    counts: jax.Array | None,
    n: int,
    is_drawn: bool,
) -> tuple[jax.Array, jax.Array]:
    """The n tokens that `sample` would draw, one without the others before it, among each row's
    candidates.

    Args:
        is_drawn: with the noise of `sample`; else the likeliest of those it may draw.

    Returns:
        i32[Q, n], -1 where fewer are left; and how sure that is, f32[Q, n]: the log of a share.
    """
    edited_QV = _edits(sampling, position_Q, counts, None, logits_QV.shape[1])[1](logits_QV)
    maxima_QG = topk.summarize(edited_QV).maxima_QG
    num = min(_CANDIDATES, logits_QV.shape[1])
    values_QJ, ids_QJ = topk.top_n(edited_QV, maxima_QG, num)
    scaled_QJ = _scale(values_QJ, sampling)
    drawn_QJ = _keep(scaled_QJ, _floor(edited_QV, maxima_QG, sampling))
    if is_drawn:
        drawn_QJ += gumbel.gumbel(gumbel.row_keys(sampling.seed, position_Q), ids_QJ)
    scaled_QJ = jnp.where((sampling.temperature == 0)[:, None], scaled_QJ, drawn_QJ)
    score_Qn, nth_Qn = lax.top_k(scaled_QJ, min(n, num))
    ids_Qn = jnp.take_along_axis(ids_QJ, nth_Qn, axis=1)
    ids_Qn = jnp.where(score_Qn > -jnp.inf, ids_Qn, -1)
    sure_Qn = jnp.where(ids_Qn >= 0, score_Qn - log_sum_exp(scaled_QJ)[:, None], -jnp.inf)
    more = (0, 0), (0, n - ids_Qn.shape[1])
    return (
        jnp.pad(ids_Qn, more, constant_values=-1), jnp.pad(sure_Qn, more, constant_values=-jnp.inf)
    )  # fmt: skip


def draw(weight_QV: jax.Array, keys_Q2: jax.Array) -> jax.Array:
    """One token a row, each as likely as its share of the row's weights, f32[Q, V]: i32[Q]."""
    score_QV = jnp.log(weight_QV) + gumbel.gumbel(keys_Q2, ids_of(weight_QV))
    return topk.summarize(score_QV).best_Q


def ids_of(x_QV: jax.Array) -> jax.Array:
    """The ids of a row's columns, on a mesh of the chip's own: i32[1, V]."""
    return collectives.chip() * x_QV.shape[1] + jnp.arange(x_QV.shape[1])[None]


def _floor(logits_QV: jax.Array, maxima_QG: jax.Array | None, sampling: SlotSampling) -> jax.Array:
    """Threshold of all filters, f32[Q], of logits / temperature."""
    if backends.current().has_wide_reductions:
        return _whole_floor(_scale(logits_QV, sampling), sampling)
    padded_QV = topk.pad_to_groups(logits_QV)
    values_QJ, _ = topk.top_n(logits_QV, maxima_QG, _CANDIDATES)
    floor_Q, is_open_Q = _candidate_floor(padded_QV, values_QJ, sampling)
    is_open_Q &= _is_filtered(sampling) & (sampling.temperature > 0)
    whole_Q = lax.cond(jnp.any(is_open_Q), lambda: _row_floor(padded_QV, sampling), lambda: floor_Q)
    return jnp.where(is_open_Q, whole_Q, floor_Q)


def _or_end(ids_Q: jax.Array, logit_Q: jax.Array, sampling: SlotSampling) -> jax.Array:
    """The ids, or what ends the row where its best logit is impossible."""
    return jnp.where(logit_Q == -jnp.inf, jnp.maximum(sampling.stop_token_ids[:, 0], 0), ids_Q)


def at(x_QV: jax.Array, ids_Q: jax.Array) -> jax.Array:
    """One entry of each row, on a mesh of whole rows by parts: [Q]."""
    if collectives.num_chips() == 1:
        return jnp.take_along_axis(x_QV, ids_Q[:, None], axis=-1)[:, 0]
    index_Q = ids_Q - collectives.chip() * x_QV.shape[1]
    is_local_Q = (index_Q >= 0) & (index_Q < x_QV.shape[1])
    index_Q1 = jnp.clip(index_Q, 0, x_QV.shape[1] - 1)[:, None]
    x_Q = jnp.take_along_axis(x_QV, index_Q1, axis=-1)[:, 0]
    return collectives.total(jnp.where(is_local_Q, x_Q, 0))


@jax.jit  # traced once for all steps with as many rows of logits
def _draw(
    logits_QV: jax.Array, maxima_QG: jax.Array, sampling: SlotSampling, position_Q: jax.Array
) -> jax.Array:
    """One token a row, of the edited logits and the maxima of their groups: i32[Q]."""
    padded_QV = topk.pad_to_groups(logits_QV)
    keys_Q2 = gumbel.row_keys(sampling.seed, position_Q)
    values_QJ, ids_QJ = topk.top_n(logits_QV, maxima_QG, _CANDIDATES)
    floor_Q, is_open_Q = _candidate_floor(padded_QV, values_QJ, sampling)
    score_QJ = _keep(_scale(values_QJ, sampling), floor_Q) + gumbel.gumbel(keys_Q2, ids_QJ)
    is_greedy_Q = sampling.temperature == 0
    best_Q = jnp.where(is_greedy_Q, 0, jnp.argmax(score_QJ, axis=-1))
    ids_Q = jnp.take_along_axis(ids_QJ, best_Q[:, None], axis=-1)[:, 0]
    first_id = collectives.chip() * logits_QV.shape[1]
    is_open_Q &= ~is_greedy_Q
    ids_Q = _sample_open(padded_QV, sampling, keys_Q2, ids_Q, is_open_Q, first_id)
    last_id = logits_QV.shape[1] * collectives.num_chips() - 1
    return jnp.minimum(ids_Q, last_id)  # the padding of a row of -NaN, which is the smallest, wins


def _draw_whole(logits_QV: jax.Array, sampling: SlotSampling, position_Q: jax.Array) -> jax.Array:
    """As `_draw`, from the whole of every row: i32[Q]."""
    scaled_QV = _scale(logits_QV, sampling)
    keys_Q2 = gumbel.row_keys(sampling.seed, position_Q)
    ids_1V = ids_of(logits_QV)
    noise_QV = gumbel.gumbel(keys_Q2, ids_1V)
    score_QV = _keep(scaled_QV, _whole_floor(scaled_QV, sampling)) + noise_QV
    is_greedy_Q1 = (sampling.temperature == 0)[:, None]
    score_QV = jnp.where(is_greedy_Q1, scaled_QV, score_QV)
    best_Q = jnp.argmax(score_QV, axis=-1)
    best_score_Q = jnp.take_along_axis(score_QV, best_Q[:, None], axis=-1)[:, 0]
    return topk.best_of_chips(best_score_Q, (ids_1V[0, 0] + best_Q).astype(jnp.int32))


def _whole_floor(scaled_QV: jax.Array, sampling: SlotSampling) -> jax.Array:
    """Threshold of all filters from the whole row, f32[Q], of logits / temperature."""
    key_QV, top_Q = topk.ordered_key(scaled_QV), collectives.maximum(scaled_QV.max(axis=-1))

    def value(weight_QV: jax.Array, mass_Q: jax.Array) -> jax.Array:
        threshold_Q = topk.mass_key(key_QV, weight_QV, mass_Q)
        return topk.value_of_key(jnp.minimum(threshold_Q, topk.ordered_key(top_Q)))

    vocab_size = scaled_QV.shape[1] * collectives.num_chips()
    k_Q = jnp.clip(sampling.top_k, 1, vocab_size).astype(jnp.float32)
    kth_Q = value(jnp.ones_like(scaled_QV), k_Q)
    kth_Q = jnp.where(sampling.top_k > 0, kth_Q, -jnp.inf)
    weight_QV = jnp.exp(_keep(scaled_QV, kth_Q) - top_Q[:, None])
    whole_Q = collectives.total(row_sum(weight_QV))[:, 0]
    nucleus_Q = value(weight_QV, sampling.top_p * whole_Q)
    floor_Q = jnp.where(sampling.top_p < 1, nucleus_Q, kth_Q)
    floor_Q = jnp.maximum(floor_Q, _min_p_floor(top_Q, sampling))
    mass_Q = collectives.total(_mass(scaled_QV, floor_Q, top_Q))
    return _cut_off(floor_Q, mass_Q, top_Q, sampling)


def _edits(
    sampling: SlotSampling,
    position_Q: jax.Array,
    counts: jax.Array | None,
    mask_QX: jax.Array | None,
    vocab_size: int,
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Mask, bias and penalties: whether any row has some, and what applies them to f32[Q, V]."""
    rows = position_Q.shape[0]
    allowed_QX = sampling.allowed if mask_QX is None else sampling.allowed & mask_QX
    num_generated_Q = position_Q - sampling.prompt_length
    is_early_Q1 = (num_generated_Q < sampling.min_tokens)[:, None]
    allowed_QX &= ~_bits(jnp.where(is_early_Q1, sampling.stop_token_ids, -1), allowed_QX.shape[1])
    is_needed = jnp.any(allowed_QX != ALL) | jnp.any(sampling.bias_ids >= 0)
    if counts is not None:
        is_needed |= jnp.any(sampling.repetition_penalty != 1)
        is_needed |= jnp.any((sampling.presence_penalty != 0) | (sampling.frequency_penalty != 0))

    def edit(x_QV: jax.Array) -> jax.Array:
        bits_QX32 = allowed_QX[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
        x_QV = jnp.where(_local(bits_QX32.reshape(rows, -1), vocab_size) == 1, x_QV, -jnp.inf)
        # Padding (-1) would wrap around to the last token; past the end it is dropped.
        ids_QJ = sampling.bias_ids - collectives.chip() * vocab_size
        ids_QJ = jnp.where((sampling.bias_ids < 0) | (ids_QJ < 0), vocab_size, ids_QJ)
        x_QV = x_QV.at[jnp.arange(rows)[:, None], ids_QJ].add(sampling.bias_values, mode="drop")
        if counts is not None:
            output_QV = _local(counts[:, 1], vocab_size).astype(jnp.float32)
            factor_Q1 = sampling.repetition_penalty[:, None]
            penalized_QV = jnp.where(x_QV < 0, x_QV * factor_Q1, x_QV / factor_Q1)
            x_QV = jnp.where(
                (_local(counts[:, 0], vocab_size) > 0) | (output_QV > 0), penalized_QV, x_QV
            )
            x_QV -= jnp.where(output_QV > 0, sampling.presence_penalty[:, None], 0.0)
            x_QV -= output_QV * sampling.frequency_penalty[:, None]
        return x_QV

    return is_needed, edit


def _local(x_QV: jax.Array, vocab_size: int) -> jax.Array:
    """Of what is known of all tokens, that of the chip's own: [Q, ...] -> [Q, vocab_size]."""
    chips, rows = collectives.num_chips(), x_QV.shape[0]
    if chips == 1:
        return x_QV[:, :vocab_size]
    x_QV = jnp.pad(x_QV, ((0, 0), (0, max(0, chips * vocab_size - x_QV.shape[1]))))
    first = collectives.chip() * vocab_size
    return lax.dynamic_slice(x_QV, (0, first), (rows, vocab_size))


def _bits(ids_QJ: jax.Array, words: int) -> jax.Array:
    """Packed mask with the bits of the ids set, negative ids ignored: u32[Q, words]."""
    is_word_QJX = (ids_QJ >> 5)[:, :, None] == jnp.arange(words)
    bit_QJ1 = (jnp.uint32(1) << (ids_QJ & 31).astype(jnp.uint32))[:, :, None]
    return lax.reduce(
        jnp.where(is_word_QJX, bit_QJ1, jnp.uint32(0)), jnp.uint32(0), lax.bitwise_or, (1,)
    )


def _scale(logits_QJ: jax.Array, sampling: SlotSampling) -> jax.Array:
    """Logits divided by the temperature; greedy rows unchanged."""
    # The inverse must be finite; at 1e-6 the argmax is drawn already, or an equal of it.
    divisor_Q = jnp.where(sampling.temperature > 0, jnp.maximum(sampling.temperature, 1e-6), 1.0)
    return logits_QJ * (1 / divisor_Q)[:, None]


def _keep(scaled_QJ: jax.Array, floor_Q: jax.Array) -> jax.Array:
    """The logits that reach the floor, -inf for others; to be applied before the noise is added,
    else XLA needs twice the time.
    """
    return jnp.where(scaled_QJ >= floor_Q[:, None], scaled_QJ, -jnp.inf)


def _candidate_floor(
    logits_QV: jax.Array, values_QJ: jax.Array, sampling: SlotSampling
) -> tuple[jax.Array, jax.Array]:
    """Threshold of all filters from the best candidates: `values_QJ`, in falling order.

    Returns:
        f32[Q], in units of logits / temperature, and bool[Q]: the row is open, that is, tokens that
        are no candidates may reach the floor too.
    """
    num_candidates = values_QJ.shape[1]
    scaled_QJ = _scale(values_QJ, sampling)
    # All other tokens lie at or below the last candidate, and are impossible where that is -inf.
    lowest_Q = scaled_QJ[:, -1]
    is_complete_Q = lowest_Q == -jnp.inf

    has_k_Q = sampling.top_k > 0
    index_Q1 = jnp.clip(sampling.top_k - 1, 0, num_candidates - 1)[:, None]
    kth_Q = jnp.take_along_axis(scaled_QJ, index_Q1, axis=-1)[:, 0]
    kth_Q = jnp.where(has_k_Q, kth_Q, -jnp.inf)
    is_in_Q = (sampling.top_k <= num_candidates) & (kth_Q > lowest_Q)
    is_k_proven_Q = ~has_k_Q | is_complete_Q | is_in_Q

    has_p_Q = sampling.top_p < 1
    within_QJ = _keep(scaled_QJ, kth_Q)
    # Without top-k the mass is that of the whole row, not only of its candidates.
    needs_row_Q = has_p_Q & ~has_k_Q & ~is_complete_Q
    top_Q1 = scaled_QJ[:, :1]
    weight_QJ = jnp.exp(within_QJ - top_Q1)
    total_Q = lax.cond(
        jnp.any(needs_row_Q),
        lambda: collectives.total(row_sum(jnp.exp(_scale(logits_QV, sampling) - top_Q1)))[:, 0],
        lambda: jnp.zeros_like(lowest_Q),
    )
    total_Q = jnp.where(needs_row_Q, total_Q, row_sum(weight_QJ)[:, 0])
    before_QJ = sums_before(weight_QJ / total_Q[:, None])
    is_nucleus_QJ = (before_QJ < sampling.top_p[:, None]).at[:, 0].set(True)
    nucleus_Q = jnp.where(is_nucleus_QJ, within_QJ, jnp.inf).min(axis=-1)
    nucleus_Q = jnp.where(has_p_Q, nucleus_Q, -jnp.inf)

    floor_Q = jnp.maximum(jnp.maximum(kth_Q, nucleus_Q), _min_p_floor(scaled_QJ[:, 0], sampling))
    is_open_Q = ~(is_k_proven_Q & (is_complete_Q | (floor_Q > lowest_Q)))
    # In a row that is not open all tokens that reach the floor are candidates.
    mass_Q = _mass(scaled_QJ, floor_Q, scaled_QJ[:, 0])
    return _cut_off(floor_Q, mass_Q, scaled_QJ[:, 0], sampling), is_open_Q


def _min_p_floor(top_Q: jax.Array, sampling: SlotSampling) -> jax.Array:
    """Threshold of min-p, from the row's largest scaled logit; -inf where min-p is off."""
    return jnp.where(sampling.min_p > 0, top_Q + jnp.log(sampling.min_p), -jnp.inf)


def _mass(scaled_QJ: jax.Array, floor_Q: jax.Array, top_Q: jax.Array) -> jax.Array:
    """Weight of the logits that reach the floor, relative to the row's largest, f32[Q]."""
    return row_sum(jnp.exp(_keep(scaled_QJ, floor_Q) - top_Q[:, None]))[:, 0]


def _cut_off(
    floor_Q: jax.Array, mass_Q: jax.Array, top_Q: jax.Array, sampling: SlotSampling
) -> jax.Array:
    """The floor of the other filters, raised to that share of its `_mass` which the epsilon cutoff
    requires of a token.
    """
    cut_Q = top_Q + jnp.log(jnp.minimum(sampling.epsilon_cutoff * mass_Q, 1.0))
    return jnp.where(sampling.epsilon_cutoff > 0, jnp.maximum(floor_Q, cut_Q), floor_Q)


def _is_filtered(sampling: SlotSampling) -> jax.Array:
    """Whether a row may draw fewer tokens than all, bool[Q]."""
    is_nucleus_Q = (sampling.top_k > 0) | (sampling.top_p < 1)
    return is_nucleus_Q | (sampling.min_p > 0) | (sampling.epsilon_cutoff > 0)


def _sample_open(
    logits_QV: jax.Array,
    sampling: SlotSampling,
    keys_Q2: jax.Array,
    ids_Q: jax.Array,
    is_open_Q: jax.Array,
    first_id: jax.Array | int,
) -> jax.Array:
    """Replaces the ids of open rows, X at a time, so that other rows cost nothing: i32[Q]."""
    num_rows = logits_QV.shape[0]
    block = min(num_rows, 2)  # they stay in a CPU's cache over the passes of a bisection
    order_Q = jnp.argsort(~is_open_Q, stable=True)  # open rows first
    order_Q = jnp.pad(order_Q, (0, -num_rows % block), mode="edge")

    def replace(i: jax.Array, ids_Q: jax.Array) -> jax.Array:
        rows_X = lax.dynamic_slice(order_Q, (i * block,), (block,))
        row_sampling = jax.tree.map(lambda leaf: leaf[rows_X], sampling)
        drawn_X = _sample_rows(logits_QV[rows_X], row_sampling, keys_Q2[rows_X], first_id)
        return ids_Q.at[rows_X].set(jnp.where(is_open_Q[rows_X], drawn_X, ids_Q[rows_X]))

    num_blocks = (is_open_Q.sum() + block - 1) // block
    # XLA moves what all blocks share in front of the loop, where it runs even without any block.
    return lax.cond(
        num_blocks > 0,
        lambda: lax.fori_loop(0, num_blocks, replace, ids_Q),
        lambda: ids_Q,
    )


def _sample_rows(
    logits_XV: jax.Array,
    sampling: SlotSampling,
    keys_X2: jax.Array,
    first_id: jax.Array | int = 0,
) -> jax.Array:
    """One token a row from the whole vocabulary, exact for open rows and others: i32[X]."""
    floor_X = lax.cond(
        jnp.any(_is_filtered(sampling)),
        lambda: _row_floor(logits_XV, sampling),
        lambda: jnp.full(logits_XV.shape[0], -jnp.inf),
    )

    def score(logits_XJ: jax.Array, ids_XJ: jax.Array) -> jax.Array:
        return _keep(_scale(logits_XJ, sampling), floor_X) + gumbel.gumbel(keys_X2, ids_XJ)

    # The winning group's scores are computed once more: an argmax over all of them takes twice as
    # long.
    score_XV = score(logits_XV, first_id + jnp.arange(logits_XV.shape[1])[None])
    group_X1 = jnp.argmax(topk.group_maxima(score_XV), axis=-1)[:, None]
    ids_XJ = first_id + topk.group_ids(group_X1)
    score_XJ = score(topk.take_groups(logits_XV, group_X1), ids_XJ)
    best_X1 = jnp.argmax(score_XJ, axis=-1)[:, None]
    ids_X, score_X = (jnp.take_along_axis(x, best_X1, axis=-1)[:, 0] for x in (ids_XJ, score_XJ))
    return topk.best_of_chips(score_X, ids_X)


def _row_floor(logits_XV: jax.Array, sampling: SlotSampling) -> jax.Array:
    """Threshold of all filters from the whole row: f32[X], as `_candidate_floor`."""
    scaled_XV = _scale(logits_XV, sampling)
    key_XV, top_X = topk.ordered_key(scaled_XV), collectives.maximum(scaled_XV.max(axis=-1))
    has_X = jnp.stack([sampling.top_k > 0, sampling.top_p < 1])
    vocab_size = logits_XV.shape[1] * collectives.num_chips()
    k_X = jnp.clip(sampling.top_k, 1, vocab_size).astype(jnp.float32)

    def raise_floor(stage: jax.Array, floor_X: jax.Array) -> jax.Array:
        """Top-k counts tokens, top-p weighs those that top-k keeps: one search, compiled once."""
        is_top_k = stage == 0
        weight_XV = jnp.where(is_top_k, 1.0, jnp.exp(scaled_XV - top_X[:, None]))
        weight_XV = jnp.where(key_XV >= floor_X[:, None], weight_XV, 0.0)
        whole_X = collectives.total(row_sum(weight_XV))[:, 0]
        mass_X = jnp.where(is_top_k, k_X, sampling.top_p * whole_X)
        threshold_X = topk.mass_key(key_XV, weight_XV, mass_X)
        return jnp.where(has_X[stage], jnp.minimum(threshold_X, topk.ordered_key(top_X)), floor_X)

    any_k, any_p = jnp.any(has_X, axis=1).astype(jnp.int32)
    nothing_X = jnp.zeros(logits_XV.shape[0], jnp.uint32)
    floor_X = topk.value_of_key(lax.fori_loop(1 - any_k, 1 + any_p, raise_floor, nothing_X))
    floor_X = jnp.maximum(floor_X, _min_p_floor(top_X, sampling))
    mass_X = collectives.total(_mass(scaled_XV, floor_X, top_X))
    return _cut_off(floor_X, mass_X, top_X, sampling)
