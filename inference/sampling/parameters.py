"""What each slot's tokens are sampled with, as arrays: a row a request."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from inference.request import MAX_BIASES, MAX_STOP_IDS
from inference.scheduling.sequence import Sequence

Array = Any  # numpy on the host, a traced jax.Array inside the step


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotSampling:
    """Sampling parameters of each slot, written at admission and gathered to Q rows for `sample`.
    Those of one request are a row of it, without the first axis.
    """

    temperature: Array  # f32[B+1] 0: greedy
    top_k: Array  # i32[B+1] 0: off
    top_p: Array  # f32[B+1] 1: off
    min_p: Array  # f32[B+1] 0: off
    repetition: Array  # f32[B+1] 1: off; divides positive, multiplies negative logits
    presence: Array  # f32[B+1] 0: off; subtracted once from each token of the output
    frequency: Array  # f32[B+1] 0: off; subtracted per occurrence in the output
    seed: Array  # u32[B+1, 2] high word, low word
    prompt_length: Array  # i32[B+1] position - prompt_length tokens were generated before one
    min_tokens: Array  # i32[B+1] stop_ids are banned while fewer were generated
    stop_ids: Array  # i32[B+1, NS] padded with -1
    bias_ids: Array  # i32[B+1, NB] padded with -1; repeated ids add up
    bias_values: Array  # f32[B+1, NB]
    allowed: Array  # u32[B+1, ceil(V / 32)] bit v % 32 of word v // 32


def neutral_row(vocab_size: int) -> SlotSampling:
    """One row that samples greedily, without any filter: numpy scalars and new numpy arrays."""
    zero, one, none = np.float32(0), np.float32(1), np.int32(0)
    return SlotSampling(
        temperature=zero,
        top_k=none,
        top_p=one,
        min_p=zero,
        repetition=one,
        presence=zero,
        frequency=zero,
        seed=np.zeros(2, np.uint32),
        prompt_length=none,
        min_tokens=none,
        stop_ids=np.full(MAX_STOP_IDS, -1, np.int32),
        bias_ids=np.full(MAX_BIASES, -1, np.int32),
        bias_values=np.zeros(MAX_BIASES, np.float32),
        allowed=pack_mask(vocab_size, None, ()),
    )


def request_row(sequence: Sequence, vocab_size: int) -> SlotSampling:
    """A request's parameters as one row: numpy scalars and arrays."""
    params, neutral = sequence.params, neutral_row(vocab_size)
    seed, ends, bias = (
        sequence.seed % 2**64,
        sorted(sequence.end_ids)[:MAX_STOP_IDS],
        params.logit_bias,
    )
    neutral.stop_ids[: len(ends)] = ends
    neutral.bias_ids[: len(bias)] = [token for token, _ in bias]
    neutral.bias_values[: len(bias)] = [value for _, value in bias]
    return dataclasses.replace(
        neutral,
        temperature=np.float32(params.temperature),
        top_k=np.int32(params.top_k),
        top_p=np.float32(params.top_p),
        min_p=np.float32(params.min_p),
        repetition=np.float32(params.repetition),
        presence=np.float32(params.presence),
        frequency=np.float32(params.frequency),
        seed=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        prompt_length=np.int32(sequence.num_prompt_tokens),
        min_tokens=np.int32(params.min_tokens),
        allowed=pack_mask(vocab_size, params.allowed_ids, params.banned_ids),
    )


def init(rows: int, vocab_size: int) -> SlotSampling:
    """Neutral parameters for `rows` slots, the sink of padding included; numpy arrays."""
    return jax.tree.map(lambda value: np.repeat(value[None], rows, axis=0), neutral_row(vocab_size))


def pack_mask(
    vocab_size: int, allowed_ids: Collection[int] | None, banned_ids: Collection[int]
) -> np.ndarray:
    """Bit mask of the tokens that may be sampled: u32[ceil(V / 32)], bit v % 32 of word v // 32.

    Args:
        vocab_size: V; bits past it are set.
        allowed_ids: only these, or None for all.
        banned_ids: never these, even if allowed.

    Raises:
        ValueError: an id is outside of the vocabulary, or no token is left.
    """
    bits = np.ones(-(-vocab_size // 32) * 32, np.bool_)
    for name, ids in (("allowed", allowed_ids or ()), ("banned", banned_ids)):
        if wrong := [i for i in ids if not 0 <= i < vocab_size]:
            raise ValueError(f"{name} id {wrong[0]} is not in 0 .. {vocab_size - 1}")
    if allowed_ids is not None:
        bits[:vocab_size] = False
        bits[list(allowed_ids)] = True
    bits[list(banned_ids)] = False
    if not bits[:vocab_size].any():
        raise ValueError("allowed and banned ids leave no token")
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
