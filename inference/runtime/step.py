"""The step: one pure function serves prefill, decode, verification and scoring.

    cache, slots, output = step(params, cache, slots, batch)

What the next step needs from this one stays on the device in `SlotState`, one row a running
sequence and a sink row for padding. Phases differ in data; only `StepShape` is static.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from configs.engine import MIN_DETERMINISTIC_ROWS, Config
from inference.runtime import sampling
from inference.runtime.batch import Admissions, Batch
from inference.scheduling.step_shapes import StepShape
from layers import decoder, kv_cache
from layers.kernels.attention import api
from layers.mixer import Mixer
from layers.params import Params
from layers.ragged import Ragged, Rectangle


@struct.dataclass
class SlotState:
    """Device state of the running sequences; row B is the sink of padding."""

    num_tokens: jax.Array  # i32[B+1] committed length; positions and random streams derive from it
    last_token: jax.Array  # i32[B+1] newest token, not in the cache yet
    sampling: sampling.SlotSampling  # per-request parameters, written at admission
    counts: jax.Array  # u16[B+1, 2, V] in prompt and output; [1, 1, 1] without penalties


@struct.dataclass
class Output:
    """What the host learns of a step. R rows, W = 1 + k tokens each (a tile emits at most one)."""

    tokens: jax.Array  # i32[R, W]
    num_emitted: jax.Array  # i32[R]
    finite: jax.Array  # bool[R] False: the row's logits held a NaN or an infinity
    logprobs: jax.Array  # f32[R, W] the model's own, before every filter
    top_ids: jax.Array  # i32[R, W, n]
    top_logprobs: jax.Array  # f32[R, W, n]
    target_logprobs: jax.Array  # f32[tiles, tokens] scored steps only
    target_top_ids: jax.Array  # i32[tiles, tokens, n]
    target_top_logprobs: jax.Array  # f32[tiles, tokens, n]


def init_slots(config: Config) -> SlotState:
    """Empty slots, put on the device without a program for each shape; the host keeps no part of
    them, since steps overwrite them.
    """
    rows, vocab = config.engine.max_seqs + 1, config.model.vocab_size
    counts = (rows, 2, vocab) if config.engine.penalties else (1, 1, 1)
    put = functools.partial(jax.device_put, may_alias=False)
    return SlotState(
        num_tokens=put(np.zeros(rows, np.int32)),
        last_token=put(np.zeros(rows, np.int32)),
        sampling=put(sampling.init(rows, vocab)),
        counts=put(np.zeros(counts, np.uint16)),
    )


def admit(
    cache: Any, slots: SlotState, admissions: Admissions, *, config: Config
) -> tuple[Any, SlotState]:
    """Writes the rows of sequences that take a slot: a fork takes over its source's states and open
    page, one that stays in its slot its own, others start from zero; tokens that are in the cache
    already are counted.
    """
    slot_A, source_A = admissions.slot_A, admissions.source_A
    is_fork_A = source_A >= 0
    group_of = config.model.group_of_layer

    def inherit(x: jax.Array) -> jax.Array:
        is_fork = is_fork_A.reshape(-1, *[1] * (x.ndim - 1))
        return x.at[slot_A].set(jnp.where(is_fork, x[source_A], 0))

    def take_over(layer: int, leaf: jax.Array | None) -> jax.Array | None:
        if leaf is None:
            return None
        if layer in group_of:
            return kv_cache.copy_pages(leaf, *admissions.page_copies[group_of[layer]])
        return inherit(leaf)

    cache = tuple(take_over(layer, leaf) for layer, leaf in enumerate(cache))
    slots = dataclasses.replace(
        slots,
        num_tokens=slots.num_tokens.at[slot_A].set(admissions.num_tokens_A),
        last_token=slots.last_token.at[slot_A].set(admissions.last_token_A),
        sampling=jax.tree.map(
            lambda old, new: old.at[slot_A].set(new), slots.sampling, admissions.sampling
        ),
        counts=_count_history(slots.counts, admissions),
    )
    return cache, slots


def _count_history(counts: jax.Array, admissions: Admissions) -> jax.Array:
    """Counts of the admitted rows, from the tokens that no step will feed."""
    if counts.size == 1:
        return counts
    slot_A, history = admissions.slot_A, admissions.history
    prompt_length_A = admissions.sampling.prompt_length[:, None]
    is_output = (jnp.arange(history.shape[1]) >= prompt_length_A).astype(jnp.int32)
    counts = counts.at[slot_A].set(0)
    is_token = (history >= 0).astype(counts.dtype)
    return counts.at[slot_A[:, None], is_output, history].add(is_token)


def step(
    params: Params,
    cache: Any,
    slots: SlotState,
    batch: Batch,
    *,
    config: Config,
    shape: StepShape,
    mixers: Mapping[str, Mixer] = decoder.MIXERS,
) -> tuple[Any, SlotState, Output]:
    """Feeds a batch through the model, samples, verifies drafts and advances the slots.

    Args:
        params: the model's parameters.
        cache: leaves of `kv_cache.abstract`, donated.
        slots: donated.
        batch: arrays of `shape`.
        config: model and engine, static.
        shape: static.
        mixers: implementations of the model's mixers.

    Returns:
        The cache with the step's tokens, the slots after it, and what the host is told.
    """
    ragged = view(shape, slots, batch, _rows_to_fill(shape.num_tokens, config))
    slot_T = jnp.pad(_per_token(batch.slot_R, shape), (0, ragged.num_fillers))
    tokens_T = jnp.pad(batch.tokens_T, (0, ragged.num_fillers))
    tokens_T = jnp.where(tokens_T < 0, slots.last_token[slot_T], tokens_T)
    hidden_TD, cache = decoder.forward(
        params, config.model, tokens_T, ragged, cache,
        deterministic=config.engine.deterministic, attention=api.choose(config), mixers=mixers,
    )  # fmt: skip
    rows, width = shape.decode
    logit_Q = jnp.concatenate([jnp.arange(rows * width), _last_of_tiles(shape, batch)])
    logit_Q = jnp.pad(logit_Q, (0, _rows_to_fill(shape.num_logits, config)))
    logits_QV = decoder.logits(params, config.model, hidden_TD[logit_Q])
    fed = _fed_counts(slots, tokens_T, slot_T, ragged, shape)
    with jax.named_scope("sample"):
        position_Q, slot_Q = ragged.position_T[logit_Q] + 1, slot_T[logit_Q]
        own = jax.tree.map(lambda x: x[slot_Q], slots.sampling)
        counts = _counts_seen(fed, slot_Q, tokens_T, shape)
        ids_Q = sampling.sample(logits_QV, own, position_Q, counts)
        logprob_Q, finite_Q = sampling.log_probs(logits_QV, ids_Q)
        top_Qn = sampling.top_log_probs(logits_QV, config.engine.top_logprobs)
    tokens_RW, num_emitted_R = _verify(shape, batch, ids_Q, tokens_T)
    by_row = lambda x_Q: _rows_of_logits(x_Q, shape)  # noqa: E731
    used_RW = jnp.arange(width) < jnp.maximum(num_emitted_R, 1)[:, None]
    output = Output(
        tokens=tokens_RW,
        num_emitted=num_emitted_R,
        finite=(by_row(finite_Q) | ~used_RW).all(-1),
        logprobs=by_row(logprob_Q),
        top_ids=by_row(top_Qn[1]),
        top_logprobs=by_row(top_Qn[0]),
        **_score(params, config, shape, batch, hidden_TD),
    )
    return cache, _advance(slots, shape, batch, output, fed), output


def _rows_to_fill(num_rows: int, config: Config) -> int:
    """Rows that a product lacks under `deterministic`: fewer are summed in another order."""
    return max(0, MIN_DETERMINISTIC_ROWS - num_rows) if config.engine.deterministic else 0


def view(shape: StepShape, slots: SlotState, batch: Batch, num_fillers: int = 0) -> Ragged:
    """The rectangles of a batch: positions follow from the slots' committed lengths."""
    rectangles, first = [], 0
    for rows, width in (shape.decode, shape.prefill):
        if rows:
            part = slice(first, first + rows)
            valid_CW = jnp.arange(width) < batch.query_length_R[part, None]
            start_C = slots.num_tokens[batch.slot_R[part]] + batch.query_start_R[part]
            position_CW = start_C[:, None] + jnp.arange(width)
            newest = jnp.max(jnp.where(valid_CW, position_CW, 0))
            position_CW = jnp.where(valid_CW, position_CW, newest)
            tables = tuple(table[part] for table in batch.tables)
            rectangles.append(Rectangle(batch.slot_R[part], position_CW, valid_CW, tables))
        first += rows
    return Ragged(tuple(rectangles), num_fillers)


def _per_token(x_R: jax.Array, shape: StepShape) -> jax.Array:
    """Row values repeated for each packed token: [R] -> [T]."""
    (rows, width), (_, tokens) = shape.decode, shape.prefill
    return jnp.concatenate([jnp.repeat(x_R[:rows], width), jnp.repeat(x_R[rows:], tokens)])


def _last_of_tiles(shape: StepShape, batch: Batch) -> jax.Array:
    """Packed index of each tile's last valid token."""
    (rows, width), (tiles, tokens) = shape.decode, shape.prefill
    last = jnp.maximum(batch.query_length_R[rows:], 1) - 1
    return rows * width + jnp.arange(tiles) * tokens + last


def _rows_of_logits(x_Q: jax.Array, shape: StepShape) -> jax.Array:
    """[Q, ...] -> [R, W, ...]; a tile's only row is padded with zeros."""
    rows, width = shape.decode
    decode = x_Q[: rows * width].reshape(rows, width, *x_Q.shape[1:])
    tiles = x_Q[rows * width : shape.num_logits, None]
    padding = [(0, 0), (0, width - 1)] + [(0, 0)] * (x_Q.ndim - 1)
    return jnp.concatenate([decode, jnp.pad(tiles, padding)])


def _verify(
    shape: StepShape, batch: Batch, ids_Q: jax.Array, tokens_T: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Sampled tokens [R, W] and how many of them count.

    Coupled acceptance (Daliri et al. 2024, arXiv 2408.07978): every position is sampled with the
    noise that plain decoding would use there, and a draft is accepted while it equals the sample.
    The output is plain decoding's for any proposer.
    """
    rows, width = shape.decode
    tokens_RW = _rows_of_logits(ids_Q, shape)
    draft_Rk = tokens_T[: rows * width].reshape(rows, width)[:, 1:]
    is_draft_Rk = jnp.arange(1, width) < batch.query_length_R[:rows, None]
    accepted_Rk = jnp.cumprod((draft_Rk == tokens_RW[:rows, :-1]) & is_draft_Rk, axis=1)
    num_accepted_R = jnp.pad(accepted_Rk.sum(1), (0, shape.prefill[0]))
    return tokens_RW, jnp.where(batch.emits_R, 1 + num_accepted_R, 0).astype(jnp.int32)


def _fed_counts(
    slots: SlotState, tokens_T: jax.Array, slot_T: jax.Array, ragged: Ragged, shape: StepShape
) -> jax.Array | None:
    """Counts with every token that is certain to stay: all but the drafts. None without
    penalties.
    """
    if slots.counts.size == 1:
        return None
    rows, width = shape.decode
    is_certain_T = ragged.valid_T.at[: rows * width].set(
        (ragged.valid_T[: rows * width].reshape(rows, width) & (jnp.arange(width) == 0)).ravel()
    )
    is_output_T = ragged.position_T >= slots.sampling.prompt_length[slot_T]
    return slots.counts.at[slot_T, is_output_T.astype(jnp.int32), tokens_T].add(
        is_certain_T.astype(slots.counts.dtype)
    )


def _counts_seen(
    fed: jax.Array | None, slot_Q: jax.Array, tokens_T: jax.Array, shape: StepShape
) -> jax.Array | None:
    """Counts as each row of logits sees them, [Q, 2, V]: a draft is seen by the rows after it."""
    if fed is None:
        return None
    rows, width = shape.decode
    counts_Q = fed[slot_Q]
    tokens_RW = tokens_T[: rows * width].reshape(rows, width)
    for earlier in range(1, width):
        for later in range(earlier, width):
            row = jnp.arange(rows) * width + later
            counts_Q = counts_Q.at[row, 1, tokens_RW[:, earlier]].add(1)
    return counts_Q


def _advance(
    slots: SlotState, shape: StepShape, batch: Batch, output: Output, fed: jax.Array | None
) -> SlotState:
    """Slots after the step: lengths, newest tokens, counts of accepted drafts."""
    rows, width = shape.decode
    is_decode_R = jnp.arange(shape.num_rows) < rows
    fed_R = jnp.where(is_decode_R, output.num_emitted, batch.query_length_R)
    newest_R = jnp.take_along_axis(
        output.tokens, jnp.maximum(output.num_emitted - 1, 0)[:, None], axis=1
    )[:, 0]
    sink = slots.num_tokens.shape[0] - 1
    emitting_R = jnp.where(output.num_emitted > 0, batch.slot_R, sink)
    counts = slots.counts if fed is None else fed
    if fed is not None and width > 1:
        accepted = jnp.arange(width - 1) < output.num_emitted[:rows, None] - 1
        counts = counts.at[batch.slot_R[:rows, None], 1, output.tokens[:rows, :-1]].add(
            accepted.astype(counts.dtype)
        )
    return dataclasses.replace(
        slots,
        num_tokens=slots.num_tokens.at[batch.slot_R].add(fed_R).at[sink].set(0),
        last_token=slots.last_token.at[emitting_R].set(newest_R),
        counts=counts,
    )


def _score(
    params: Params, config: Config, shape: StepShape, batch: Batch, hidden_TD: jax.Array
) -> dict[str, jax.Array]:
    """Log-probabilities of the targets of every prefill token, a tile of logits at a time."""
    n, (tiles, tokens) = config.engine.top_logprobs, shape.prefill
    if not shape.scored:
        tiles, tokens = 0, 0
        targets = jnp.zeros((0, 0)), jnp.zeros((0, 0, n), jnp.int32), jnp.zeros((0, 0, n))
    else:
        first = shape.decode[0] * shape.decode[1]
        hidden_TD = hidden_TD[first : first + tiles * tokens]
        hidden_CWD = hidden_TD.reshape(tiles, tokens, -1)

        def score_tile(rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            logits_QV = decoder.logits(params, config.model, rows[0])
            values, ids = sampling.top_log_probs(logits_QV, n)
            return sampling.log_probs(logits_QV, rows[1])[0], ids, values

        targets = jax.lax.map(score_tile, (hidden_CWD, batch.targets_T))
    return dict(
        zip(("target_logprobs", "target_top_ids", "target_top_logprobs"), targets, strict=True)
    )
