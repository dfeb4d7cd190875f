"""Coupled acceptance (Daliri et al. 2024, arXiv 2408.07978): every position is sampled with the
Gumbel noise that plain decoding would use there, and drafts are accepted while they equal the
samples. The output is plain decoding's for any proposer.
"""

import jax
import jax.numpy as jnp


def num_accepted(ids_RW: jax.Array, draft_Rk: jax.Array, num_drafts_R: jax.Array) -> jax.Array:
    """How many drafts of each row are accepted: i32[R].

    Args:
        ids_RW: i32[R, 1 + k], sampled at each position.
        draft_Rk: i32[R, k].
        num_drafts_R: i32[R], 0 .. k; those after are padding.
    """
    is_draft_Rk = jnp.arange(draft_Rk.shape[1]) < num_drafts_R[:, None]
    accepted_Rk = jnp.cumprod((draft_Rk == ids_RW[:, :-1]) & is_draft_Rk, axis=1)
    return accepted_Rk.sum(1).astype(jnp.int32)
