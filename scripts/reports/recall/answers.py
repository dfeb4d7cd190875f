"""What recall is trained on and judged by: the logits where keys are asked for, and no others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from configs.model import ModelConfig
from inference.training.loop import Loss
from layers import decoder, params, ragged
from layers.params import Params
from scripts.reports.recall import sequences
from scripts.reports.recall.recipes import Task

_ROWS = 16  # that are judged at a time


def loss(config: ModelConfig) -> Loss:
    """The mean over rows of the weighted cross-entropy, in nats, of their answers.

    A batch is `sequences.Rows` as a dict. Parameters are float32 masters, as `losses.next_token`
    has them.
    """
    infos = decoder.param_infos(config)

    def lose(masters: Params, frozen: object, batch: dict[str, jax.Array]) -> jax.Array:
        values = jax.tree.map(
            lambda info, x: x.astype(info.format), infos, masters, is_leaf=params.is_info
        )
        logits_YJV = _logits_at(values, config, batch["tokens"], batch["positions"])
        answers_YJ1 = batch["answers"][..., None]
        of_answer_YJ = jnp.take_along_axis(logits_YJV, answers_YJ1, axis=2)[..., 0]
        lost_YJ = jax.nn.logsumexp(logits_YJV, axis=2) - of_answer_YJ
        return (batch["weights"] * lost_YJ).sum() / len(lost_YJ)

    return lose


def accuracy(values: Params, config: ModelConfig, task: Task, num_rows: int) -> float:
    """The share of held-out queries whose likeliest token is their answer."""
    rows, is_right = sequences.held_out(task, num_rows), []
    for first in range(0, num_rows, _ROWS):
        batch = sequences.Rows(*(x[first : first + _ROWS] for x in rows))
        is_right.append(_likeliest(values, config, batch.tokens, batch.positions) == batch.answers)
    return float(np.concatenate(is_right).mean())


@functools.partial(jax.jit, static_argnames="config")
def _likeliest(
    values: Params, config: ModelConfig, tokens_YW: jax.Array, positions_YJ: jax.Array
) -> jax.Array:
    return _logits_at(values, config, tokens_YW, positions_YJ).argmax(2)


def _logits_at(
    values: Params, config: ModelConfig, tokens_YW: jax.Array, positions_YJ: jax.Array
) -> jax.Array:
    """Logits at some positions of each row, float32 [Y, J, V]."""
    (Y, W), J = tokens_YW.shape, positions_YJ.shape[1]
    hidden_TD, _ = decoder.forward(values, config, tokens_YW.reshape(-1), ragged.contiguous(Y, W))
    at_Q = (jnp.arange(Y)[:, None] * W + positions_YJ).reshape(-1)
    return decoder.logits(values, config, hidden_TD[at_Q]).reshape(Y, J, -1)
