"""What a step computes of the tokens of prompts that are only read: their log-probabilities, and
the sums that vectors of prompts are made of.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from inference.sampling import sampler
from inference.sampling.parameters import Array
from inference.scheduling.step_shapes import StepShape
from layers import topk


def score(
    logits: Callable[[jax.Array, jax.Array | None], jax.Array],
    shape: StepShape,
    hidden_TD: jax.Array,
    adapter_T: jax.Array | None,
    targets_YW: Array,
    num_top: int,
) -> dict[str, jax.Array]:
    """Log-probabilities of the targets of every prefill token and of `num_top` alternatives, a
    chunk of logits at a time, as fields of `StepOutput`.

    Args:
        logits: float32 [Q, V] of hidden states [Q, D] and the slots of their adapters.
        targets_YW: the token behind each prefill token, i32[chunks, tokens].
    """
    if not shape.scored:
        none = jnp.zeros((0, 0, num_top))
        targets = jnp.zeros((0, 0)), none.astype(jnp.int32), none
    else:

        def score_chunk(
            chunk: tuple[jax.Array, jax.Array | None, jax.Array],
        ) -> tuple[jax.Array, ...]:
            hidden_QD, adapter_Q, targets_Q = chunk
            logits_QV = logits(hidden_QD, adapter_Q)
            summary = topk.summarize(logits_QV)
            values, ids = sampler.top_log_probs(logits_QV, summary, num_top)
            return sampler.log_probs(logits_QV, summary, targets_Q)[0], ids, values

        adapter_YW = None if adapter_T is None else _of_chunks(shape, adapter_T)
        chunks = _of_chunks(shape, hidden_TD), adapter_YW, targets_YW
        targets = jax.lax.map(score_chunk, chunks)
    return dict(
        zip(("target_logprobs", "target_top_ids", "target_top_logprobs"), targets, strict=True)
    )


def pool(shape: StepShape, hidden_TD: jax.Array, is_pooled_YW: Array | None) -> jax.Array:
    """Sums of the hidden states of each chunk's pooled tokens, f32[chunks, D]; [0, 0] without
    chunks, or in an engine without embeddings. A sum, not a product: that of one token has its bits
    on every device.
    """
    if is_pooled_YW is None or is_pooled_YW.size == 0:  # at such an input of a mesh XLA crashes
        return jnp.zeros((0, 0))
    is_pooled_YW1 = is_pooled_YW[:, :, None]
    return jnp.where(is_pooled_YW1, _of_chunks(shape, hidden_TD), 0.0).sum(1, dtype=jnp.float32)


def _of_chunks(shape: StepShape, x_TX: jax.Array) -> jax.Array:
    """The rows of the prefill rectangle: [T, ...] -> [chunks, tokens, ...]."""
    first, (chunks, tokens) = shape.decode[0] * shape.decode[1], shape.prefill
    return x_TX[first : first + chunks * tokens].reshape(chunks, tokens, *x_TX.shape[1:])
