"""How far a student's distributions of the next token are from a teacher's, in nats."""

import jax
import jax.numpy as jnp

from configs.recipes import training


def forward(teacher_QV: jax.Array, student_QV: jax.Array) -> jax.Array:
    """Returns KL(teacher || student) of log-probabilities, float32 [Q]: the student learns to
    expect all that the teacher may say (Hinton et al. 2015, arXiv 1503.02531).
    """
    return (jnp.exp(teacher_QV) * (teacher_QV - student_QV)).sum(1)


def reverse(teacher_QV: jax.Array, student_QV: jax.Array) -> jax.Array:
    """Returns KL(student || teacher), likewise: the student learns to say nothing that the teacher
    would not (Gu et al. 2023, arXiv 2306.08543).
    """
    return forward(student_QV, teacher_QV)


def jensen_shannon(teacher_QV: jax.Array, student_QV: jax.Array) -> jax.Array:
    """Returns the mean of both divergences from the mean distribution, likewise, at most ln 2
    (Agarwal et al. 2023, arXiv 2306.13649, with a beta of 1/2).
    """
    mean_QV = jnp.logaddexp(teacher_QV, student_QV) - jnp.log(2.0)
    return (forward(teacher_QV, mean_QV) + forward(student_QV, mean_QV)) / 2


BY_NAME = dict(zip(training.DIVERGENCES, (forward, reverse, jensen_shannon), strict=True))


def likeliest(logits_QV: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the ids of the `count` likeliest tokens, i32[Q, K], and their log-probabilities, the
    last that of all other tokens, float32 [Q, K + 1].
    """
    _, ids_QK = jax.lax.top_k(logits_QV, count)
    return ids_QK, with_others(logits_QV, ids_QK)


def with_others(logits_QV: jax.Array, ids_QK: jax.Array) -> jax.Array:
    """Returns log-probabilities of tokens, the last that of all other tokens, float32 [Q, K + 1].

    A divergence of these is at most that of the whole distributions.
    """
    total_Q1 = jax.nn.logsumexp(logits_QV, axis=1, keepdims=True)
    of_tokens_QK = jnp.take_along_axis(logits_QV, ids_QK, axis=1)
    rows_Q1 = jnp.arange(len(logits_QV))[:, None]
    others_QV = logits_QV.at[rows_Q1, ids_QK].set(-jnp.inf)
    others_Q1 = jax.nn.logsumexp(others_QV, axis=1, keepdims=True)
    return jnp.concatenate([of_tokens_QK, others_Q1], axis=1) - total_Q1
