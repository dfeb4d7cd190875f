"""Sampling parameters of the slots as arrays: a row a request."""

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from inference.request import FIELDS, MAX_BIASES, MAX_STOP_IDS, SamplingParams
from inference.scheduling.sequence import Sequence

Array = Any  # numpy on the host, a traced jax.Array inside the step


_DTYPES = {name: np.dtype(field.dtype) for name, field in FIELDS.items() if field.dtype}

if TYPE_CHECKING:

    class _Numbers:
        def __getattr__(self, name: str) -> Array: ...
else:
    _Numbers = dataclasses.make_dataclass(
        "_Numbers", [(name, Array) for name in _DTYPES], frozen=True
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotSampling(_Numbers):
    """Sampling parameters of each slot, written at admission and gathered to Q rows for `sample`.

    The first ones, [B+1], are the fields of `SamplingParams` that declare a dtype. Those of one
    request are a row, without the first axis.
    """

    seed: Array  # u32[B+1, 2] high word, low word
    prompt_length: Array  # i32[B+1] position - prompt_length tokens were generated before one
    stop_token_ids: Array  # i32[B+1, NS] padded with -1; banned while fewer than min_tokens
    bias_ids: Array  # i32[B+1, NB] padded with -1; repeated ids add up
    bias_values: Array  # f32[B+1, NB]
    allowed: Array  # u32[B+1, ceil(V / 32)] bit v % 32 of word v // 32


def neutral_row(vocab_size: int) -> SlotSampling:
    """One row that samples greedily, without any filter: numpy scalars and new numpy arrays."""
    return SlotSampling(
        **_numbers(SamplingParams()),
        seed=np.zeros(2, np.uint32),
        prompt_length=np.int32(0),
        stop_token_ids=np.full(MAX_STOP_IDS, -1, np.int32),
        bias_ids=np.full(MAX_BIASES, -1, np.int32),
        bias_values=np.zeros(MAX_BIASES, np.float32),
        allowed=pack_mask(vocab_size, None, ()),
    )


def request_row(sequence: Sequence, vocab_size: int) -> SlotSampling:
    """A request's parameters as one row: numpy scalars and arrays."""
    params, neutral = sequence.params, neutral_row(vocab_size)
    seed, bias = sequence.seed % 2**64, params.logit_bias
    end_ids = sorted(sequence.end_ids)[:MAX_STOP_IDS]
    neutral.stop_token_ids[: len(end_ids)] = end_ids
    neutral.bias_ids[: len(bias)] = [token for token, _ in bias]
    neutral.bias_values[: len(bias)] = [value for _, value in bias]
    return dataclasses.replace(
        neutral,
        **_numbers(params),
        seed=np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32),
        prompt_length=np.int32(sequence.num_prompt_tokens),
        allowed=pack_mask(vocab_size, params.allowed_token_ids, params.banned_token_ids),
    )


def _numbers(params: SamplingParams) -> dict[str, Array]:
    return {name: dtype.type(getattr(params, name)) for name, dtype in _DTYPES.items()}


def init(rows: int, vocab_size: int) -> SlotSampling:
    """Neutral parameters for `rows` slots, the padding slot included; numpy arrays."""
    return jax.tree.map(lambda value: np.repeat(value[None], rows, axis=0), neutral_row(vocab_size))


def pack_mask(
    vocab_size: int, allowed_token_ids: Collection[int] | None, banned_token_ids: Collection[int]
) -> np.ndarray:
    """Bit mask of the tokens that may be sampled: u32[ceil(V / 32)], bit v % 32 of word v // 32.

    Args:
        vocab_size: V; bits past it are set.
        allowed_token_ids: only these, or None for all.
        banned_token_ids: never these, even if allowed.

    Raises:
        ValueError: an id is outside of the vocabulary, or no token is left.
    """
    bits = np.ones(-(-vocab_size // 32) * 32, np.bool_)
    for name, ids in (("allowed", allowed_token_ids or ()), ("banned", banned_token_ids)):
        if invalid := [i for i in ids if not 0 <= i < vocab_size]:
            raise ValueError(f"{name} id {invalid[0]} is not in 0 .. {vocab_size - 1}")
    if allowed_token_ids is not None:
        bits[:vocab_size] = False
        bits[list(allowed_token_ids)] = True
    bits[list(banned_token_ids)] = False
    if not bits[:vocab_size].any():
        raise ValueError("allowed and banned ids leave no token")
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
