"""A plan as arrays: one numpy pass, fixed shapes."""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import struct

from configs.engine import Config
from inference.runtime import sampling
from inference.runtime.sampling import SlotSampling
from inference.scheduling.step_schedule import Admission, Plan

Array = Any  # numpy on the host, a traced array inside the step

_ADMISSIONS = 8  # rows of the admission program; more arrive in several calls


@struct.dataclass
class Batch:
    """What the host tells a step. R rows of both rectangles, T packed tokens."""

    tokens_T: Array  # i32[T], -1: the slot's last token
    slot_R: Array  # i32[R], the last slot is the sink
    query_start_R: Array  # i32[R], first token's offset from the slot's committed length
    query_length_R: Array  # i32[R], valid tokens
    emits_R: Array  # bool[R], the row ends with a sampled token
    tables: tuple[Array, ...]  # i32[R, P] a page group
    targets_T: Array  # i32[tiles, tokens] next tokens to score; [0, 0] where nothing is scored


@struct.dataclass
class Admissions:
    """Rows of the device state to write before a step, padded with sinks."""

    slot_A: Array  # i32[A]
    source_A: Array  # i32[A], slot to take states from; -1: starts afresh
    num_tokens_A: Array  # i32[A]
    last_token_A: Array  # i32[A]
    sampling: SlotSampling  # [A, ...]
    page_copies: tuple[Array, ...]  # i32[2, A x device pages] a page group: from, to
    history: (
        Array  # i32[A, longest] tokens in the cache already, -1 after; [A, 0] without penalties
    )


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What the device is told of a plan: it holds whatever becomes of the sequences later."""

    admissions: tuple[Admissions, ...]
    batch: Batch


def build(plan: Plan, config: Config) -> Inputs:
    """The arrays of a plan."""
    firsts = range(0, len(plan.admissions), _ADMISSIONS)
    admissions = [plan.admissions[first : first + _ADMISSIONS] for first in firsts]
    return Inputs(
        tuple(build_admissions(some, config) for some in admissions), build_batch(plan, config)
    )


def build_batch(plan: Plan, config: Config) -> Batch:
    """The arrays of a plan's rows, in its shape."""
    shape, sink = plan.shape, config.engine.max_seqs
    (rows, width), (_, tile_tokens) = shape.decode, shape.prefill
    decode_RW = np.zeros((rows, width), np.int32)
    tile_RW = np.zeros((shape.prefill[0], tile_tokens), np.int32)
    slot_R = np.full(shape.num_rows, sink, np.int32)
    start_R, length_R = np.zeros_like(slot_R), np.zeros_like(slot_R)
    emits_R = np.zeros(shape.num_rows, bool)
    columns = -(-config.page_columns // config.device_pages)
    tables = [np.zeros((shape.num_rows, columns), np.int32) for _ in config.model.page_groups]
    targets = np.zeros(tile_RW.shape if shape.scored else (0, 0), np.int32)
    for r, row in enumerate(plan.decode):
        decode_RW[r, 0] = -1
        decode_RW[r, 1 : row.length] = row.sequence.drafts[: row.length - 1]
    for r, row in enumerate(plan.tiles):
        first = row.start
        tile_RW[r, : row.length] = row.sequence.tokens[first : first + row.length]
        if row.sequence.scores:
            targets[r, : row.length] = row.sequence.tokens[first + 1 : first + 1 + row.length]
    places = [*enumerate(plan.decode), *((rows + r, row) for r, row in enumerate(plan.tiles))]
    for r, row in places:
        slot_R[r], start_R[r], length_R[r] = row.slot, row.offset, row.length
        emits_R[r] = row.emits
        for table, pages in zip(tables, row.sequence.pages, strict=True):
            table[r, : len(pages)] = pages
    tokens_T = np.concatenate([decode_RW.ravel(), tile_RW.ravel()])
    expanded = tuple(device_pages(table, config)[:, : config.page_columns] for table in tables)
    return Batch(tokens_T, slot_R, start_R, length_R, emits_R, expanded, targets)


def device_pages(pages: np.ndarray, config: Config) -> np.ndarray:
    """Pages of the device that pages are made of, [..., P] -> [..., P * device_pages]."""
    n = config.device_pages
    if n == 1:
        return pages
    return (pages[..., None] * n + np.arange(n, dtype=np.int32)).reshape(*pages.shape[:-1], -1)


def build_admissions(admissions: tuple[Admission, ...], config: Config) -> Admissions:
    """The arrays of some admissions, as many as the program has rows at most."""
    size, sink, vocab = _ADMISSIONS, config.engine.max_seqs, config.model.vocab_size
    slot_A, num_tokens_A = np.full(size, sink, np.int32), np.zeros(size, np.int32)
    source_A, last_token_A = np.full(size, -1, np.int32), num_tokens_A.copy()
    copies = [np.zeros((2, size), np.int32) for _ in config.model.page_groups]
    longest = config.max_context if config.engine.penalties else 0
    history = np.full((size, longest), -1, np.int32)
    for a, admission in enumerate(admissions):
        sequence = admission.sequence
        slot_A[a] = admission.slot
        source_A[a] = -1 if admission.source is None else admission.source
        num_tokens_A[a] = sequence.num_computed_tokens
        last_token_A[a] = sequence.tokens[-1]
        for group, source, target in admission.page_copies:
            copies[group][:, a] = source, target
        if longest:
            history[a, : num_tokens_A[a]] = sequence.tokens[: num_tokens_A[a]]
    rows = [sampling.request_row(admission.sequence, vocab) for admission in admissions]
    rows += [sampling.neutral_row(vocab)] * (size - len(rows))
    stacked = jax.tree.map(lambda *values: np.stack(values), *rows)
    copied = tuple(device_pages(pages, config) for pages in copies)
    return Admissions(slot_A, source_A, num_tokens_A, last_token_A, stacked, copied, history)
