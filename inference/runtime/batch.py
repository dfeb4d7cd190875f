"""A schedule as numpy arrays of fixed shapes, the inputs of a step."""

import dataclasses
from collections.abc import Iterable
from typing import TypeVar

import jax
import numpy as np

from configs.engine import Config
from configs.settings.adapters import NO_SLOT
from configs.settings.drafts import LOOKUPS
from inference.sampling import parameters
from inference.sampling.parameters import Array, SlotSampling
from inference.scheduling.sequence import Status, blame
from inference.scheduling.step_schedule import Admission, ShardSchedule, StepSchedule
from inference.scheduling.step_shapes import StepShape

Tree = TypeVar("Tree")

_ADMISSIONS = 8  # rows of one call of `step.admit`; more take several calls


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Inputs of a step. Y rows of both rectangles, T packed tokens."""

    # i32[T]; -1: in a row's first column the slot's newest token, behind it the proposer's draft
    tokens_T: Array
    slot_Y: Array  # i32[Y], the last slot is the sink
    query_start_Y: Array  # i32[Y], first token's offset from the slot's committed length
    query_length_Y: Array  # i32[Y], valid tokens
    emits_Y: Array  # bool[Y], the row ends with a sampled token
    tables: tuple[Array, ...]  # i32[Y, P] a page group
    targets_YW: Array  # i32[chunks, tokens] next tokens to score; [0, 0] where nothing is scored
    # None without the feature of `engine.requests`: prompt_budgets, grammars, embeddings.
    num_dropped_Y: Array | None = None  # i32[Y] `Rectangle`'s
    mask_QX: Array | None = None  # u32[Q, ceil(V / 32)] constraints'
    is_pooled_YW: Array | None = None  # bool[chunks, tokens] whose hidden states are summed
    adapter_Y: Array | None = None  # i32[Y], slot of its adapter, -1: none; None: no slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Admissions:
    """Slots to write before a step, padded with sinks."""

    slot_A: Array  # i32[A]
    source_A: Array  # i32[A], slot to take states from; -1: starts afresh
    snapshot_A: Array  # i32[A], of the states to start from; 0: none
    num_tokens_A: Array  # i32[A]
    last_token_A: Array  # i32[A]
    sampling: SlotSampling  # [A, ...]
    page_copies: tuple[Array, ...]  # i32[2, A x device pages] a page group: from, to
    history: Array  # i32[A, longest] tokens by position, 0 after; [A, 0] where nothing reads them


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A schedule as the device gets it, whatever becomes of its sequences afterwards; masks alone
    are written when it is launched. Arrays of several data shards lie one behind the other along
    their first axis.
    """

    admissions: tuple[Admissions, ...]
    batch: Batch


def build(schedule: StepSchedule, config: Config) -> Inputs:
    """Returns the arrays of a schedule; rows and admissions of ended sequences are padding.

    Raises:
        SequenceFault: one of its sequences has no such arrays.
    """
    num_admissions = max(len(shard.admissions) for shard in schedule.shards)
    admissions = [
        joined(
            build_admissions(shard.admissions[first : first + _ADMISSIONS], config)
            for shard in schedule.shards
        )
        for first in range(0, num_admissions, _ADMISSIONS)
    ]
    batch = joined(build_batch(schedule.shape, shard, config) for shard in schedule.shards)
    return Inputs(tuple(admissions), batch)


def joined(shards: Iterable[Tree]) -> Tree:
    """Arrays of each data shard as one tree, one behind the other."""
    first, *more = shards
    if not more:
        return first
    return jax.tree.map(lambda *arrays: np.concatenate(arrays), first, *more)


def build_batch(shape: StepShape, schedule: ShardSchedule, config: Config) -> Batch:
    """The arrays of a data shard's rows."""
    sink = config.engine.max_seqs
    (rows, width), (_, chunk_tokens) = shape.decode, shape.prefill
    decode_YW = np.zeros((rows, width), np.int32)
    chunk_YW = np.zeros((shape.prefill[0], chunk_tokens), np.int32)
    slot_Y = np.full(shape.num_rows, sink, np.int32)
    start_Y, length_Y = np.zeros_like(slot_Y), np.zeros_like(slot_Y)
    dropped_Y = np.zeros_like(slot_Y) if config.engine.requests.prompt_budgets else None
    adapter_Y = np.full_like(slot_Y, NO_SLOT) if config.engine.adapters.slots else None
    emits_Y = np.zeros(shape.num_rows, bool)
    columns = -(-config.page_columns // config.device_pages)
    tables = [
        np.zeros((shape.num_rows, columns), np.int32) for _ in config.cached_model.page_groups
    ]
    targets_YW = np.zeros(chunk_YW.shape if shape.scored else (0, 0), np.int32)
    finished = Status.FINISHED
    for r, row in (*enumerate(schedule.decode), *enumerate(schedule.prefill, rows)):
        sequence = row.sequence
        if sequence.status is finished:
            continue
        try:
            if r < rows:
                decode_YW[r, 0] = -1
                drafts = sequence.drafts[: row.length - 1]
                decode_YW[r, 1 : row.length] = -1 if sequence.speculates else drafts
            else:
                fed = slice(row.start, row.start + row.length)
                chunk_YW[r - rows, : row.length] = sequence.tokens[fed]
                if sequence.scores:
                    fed = slice(row.start + 1, row.start + 1 + row.length)
                    targets_YW[r - rows, : row.length] = sequence.tokens[fed]
            for table, pages in zip(tables, sequence.pages, strict=False):  # no snapshots'
                table[r, : len(pages)] = pages
        except BaseException as error:
            raise blame(sequence, error) from error
        slot_Y[r], start_Y[r], length_Y[r] = row.slot, row.offset, row.length
        emits_Y[r] = row.emits
        if dropped_Y is not None:
            dropped_Y[r] = row.num_dropped
        if adapter_Y is not None:
            adapter_Y[r] = sequence.adapter.slot
    tokens_T = np.concatenate([decode_YW.ravel(), chunk_YW.ravel()])
    expanded = tuple(device_pages(table, config)[:, : config.page_columns] for table in tables)
    mask_QX = None
    if config.engine.requests.grammars:
        words = -(-config.model.vocab_size // 32)
        mask_QX = np.full((shape.num_logits, words), 2**32 - 1, np.uint32)
    is_pooled_YW = _pooled(shape, schedule) if config.engine.requests.embeddings else None
    return Batch(
        tokens_T, slot_Y, start_Y, length_Y, emits_Y, expanded, targets_YW, dropped_Y, mask_QX,
        is_pooled_YW, adapter_Y,
    )  # fmt: skip


def fill_masks(mask_QX: np.ndarray, schedule: StepSchedule) -> None:
    """Writes into `mask_QX` (u32[Q, X], all shards' rows of logits) what constraints permit; they
    have seen all tokens before this step's. A sequence whose next token is limited has no drafts.

    Raises:
        SequenceFault: a constraint has failed; once its sequence has ended, the others' masks can
            be written.
    """
    shape = schedule.shape
    rows, width = shape.decode
    for index, shard in enumerate(schedule.shards):
        first = index * shape.num_logits
        decode = ((first + r * width, row) for r, row in enumerate(shard.decode))
        for q, row in (*decode, *enumerate(shard.prefill, first + rows * width)):
            sequence = row.sequence
            is_asked = row.emits and sequence.status is not Status.FINISHED
            if is_asked and sequence.constraint is not None and sequence.is_constrained:
                try:
                    mask_QX[q] = sequence.constraint.mask()
                except BaseException as error:
                    raise blame(sequence, error) from error


def _pooled(shape: StepShape, schedule: ShardSchedule) -> np.ndarray:
    is_pooled_YW = np.zeros(shape.prefill, bool)
    for r, row in enumerate(schedule.prefill):
        pooling, end = row.sequence.params.pooling, row.start + row.length
        if pooling == "mean":
            is_pooled_YW[r, : row.length] = True
        elif pooling == "last" and end == row.sequence.num_prompt_tokens:
            is_pooled_YW[r, row.length - 1] = True
    return is_pooled_YW


def device_pages(pages: np.ndarray, config: Config, group: int = 0) -> np.ndarray:
    """Device pages of a group's pages, or of snapshots, [..., P] -> [..., P * device_pages]."""
    n = num_device_pages(config, group)
    if n == 1:
        return pages
    return (pages[..., None] * n + np.arange(n, dtype=np.int32)).reshape(*pages.shape[:-1], -1)


def num_device_pages(config: Config, group: int) -> int:
    """Device pages that a page of one of `Config.cached_groups` consists of: a snapshot is one."""
    return 1 if config.cached_groups[group].spec.is_state else config.device_pages


def build_admissions(admissions: tuple[Admission, ...], config: Config) -> Admissions:
    """The arrays of at most `_ADMISSIONS` admissions."""
    size, sink, vocab = _ADMISSIONS, config.engine.max_seqs, config.model.vocab_size
    slot_A, num_tokens_A = np.full(size, sink, np.int32), np.zeros(size, np.int32)
    source_A, last_token_A = np.full(size, -1, np.int32), num_tokens_A.copy()
    snapshot_A = num_tokens_A.copy()
    copies = [np.zeros((2, size), np.int32) for _ in config.cached_model.page_groups]
    has_history = config.engine.requests.penalties or config.engine.drafts.proposer in LOOKUPS
    longest = config.max_context if has_history else 0
    history = np.zeros((size, longest), np.int32)
    rows = [parameters.neutral_row(vocab)] * size
    for a, admission in enumerate(admissions):
        sequence = admission.sequence
        if sequence.status is Status.FINISHED:
            continue
        try:
            rows[a] = parameters.request_row(sequence, vocab)
        except BaseException as error:
            raise blame(sequence, error) from error
        slot_A[a] = admission.slot
        source_A[a] = -1 if admission.source is None else admission.source
        snapshot_A[a] = admission.snapshot
        num_tokens_A[a] = sequence.num_computed_tokens
        last_token_A[a] = sequence.tokens[-1]
        for group, source, target in admission.page_copies:
            copies[group][:, a] = source, target
        if longest:
            history[a, : len(sequence.tokens)] = sequence.tokens
    stacked = jax.tree.map(lambda *values: np.stack(values), *rows)
    copied = tuple(device_pages(pages, config) for pages in copies)
    return Admissions(
        slot_A, source_A, snapshot_A, num_tokens_A, last_token_A, stacked, copied, history
    )
