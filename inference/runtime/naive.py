"""Decoding without a cache: every new token runs the whole sequence again.

The baseline of the ablation and an oracle for the engine, with which it shares decoder and sampler,
but no pages, slots or scheduling.
"""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled

from configs.cache import BLOCK_TOKENS
from configs.model import ModelConfig
from inference.runtime.executables import abstract
from inference.sampling import parameters, sampler
from inference.sampling.parameters import SlotSampling
from inference.scheduling.sequence import Sequence
from layers import decoder, topk
from layers.params import Params
from layers.ragged import contiguous

BLOCK = BLOCK_TOKENS  # lengths are padded to multiples of it, so that few executables are compiled


def decode(
    params: Params,
    config: ModelConfig,
    sequence: Sequence,
    on_token: Callable[[int], None] = lambda token: None,
) -> list[float]:
    """Generates `sequence`, whose penalties are not applied, to its end, appending to its tokens;
    returns each token's seconds, without compilation.
    """
    sampling = _one_row(parameters.request_row(sequence, config.vocab_size))
    leaves, tree = jax.tree.flatten(abstract(params))
    seconds: list[float] = []
    while sequence.num_output_tokens < sequence.params.max_new_tokens:
        length = len(sequence.tokens)
        padded = np.zeros(-(-length // BLOCK) * BLOCK, np.int32)
        padded[:length] = sequence.tokens
        executable = _compiled(config, len(padded), tuple(leaves), tree)
        start = time.perf_counter()
        token, logprob = jax.device_get(executable(params, padded, np.int32(length), sampling))
        seconds.append(time.perf_counter() - start)
        sequence.tokens.append(int(token))
        sequence.results.logprobs.append(float(logprob))
        on_token(int(token))
        if sequence.is_end(int(token)):
            break
    return seconds


@functools.cache
def _compiled(
    config: ModelConfig, num_tokens: int, leaves: tuple[jax.ShapeDtypeStruct, ...], tree: object
) -> Compiled:
    """(params, tokens, length, sampling) -> token, log-probability; for one padded length."""

    def next_token(
        params: Params, tokens_T: jax.Array, length: jax.Array, sampling: SlotSampling
    ) -> tuple[jax.Array, jax.Array]:
        hidden_TD, _ = decoder.forward(params, config, tokens_T, contiguous(1, num_tokens))
        last_1D = jax.lax.dynamic_slice_in_dim(hidden_TD, length - 1, 1)
        logits_1V = decoder.logits(params, config, last_1D)
        summary = topk.summarize(logits_1V)
        ids = sampler.sample(logits_1V, summary, sampling, length[None])
        return ids[0], sampler.log_probs(logits_1V, summary, ids)[0][0]

    sampling = _one_row(parameters.neutral_row(config.vocab_size))
    arguments = (np.zeros(num_tokens, np.int32), np.int32(1), sampling)
    params = jax.tree.unflatten(tree, leaves)
    return jax.jit(next_token).lower(params, *arguments).compile()


def _one_row(row: SlotSampling) -> SlotSampling:
    return jax.tree.map(lambda value: jnp.asarray(value)[None], row)
