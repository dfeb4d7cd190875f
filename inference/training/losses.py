"""What training makes small. A loss is a function (params, frozen, batch) -> float32 scalar: the
mean over a batch's rows, so that parts of a batch may be averaged.
"""

from typing import Any

import jax
import jax.numpy as jnp

from configs.model import ModelConfig
from inference.training.loop import Loss
from layers import decoder, params, ragged
from layers.params import Params

_BLOCK_ROWS = 2048  # whose logits are held at a time, 32 MiB of a vocabulary of 4,096


def next_token(config: ModelConfig) -> Loss:
    """The mean cross-entropy, in nats, of each token given those before it in its window.

    Parameters are float32 masters; the decoder that serves computes with them in their declared
    formats. A batch is {"tokens": i32[Y, W + 1]}.
    """
    infos = decoder.param_infos(config)

    def loss(masters: Params, frozen: Any, batch: dict[str, jax.Array]) -> jax.Array:
        values = jax.tree.map(
            lambda info, x: x.astype(info.format), infos, masters, is_leaf=params.is_info
        )
        inputs_YW, targets_YW = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        rows = ragged.contiguous(*inputs_YW.shape)
        hidden_TD, _ = decoder.forward(values, config, inputs_YW.reshape(-1), rows)
        hidden_YWD = hidden_TD.reshape(*inputs_YW.shape, -1)
        return cross_entropy(values, config, hidden_YWD, targets_YW)

    return loss


def cross_entropy(
    values: Params, config: ModelConfig, hidden_YWD: jax.Array, targets_YW: jax.Array
) -> jax.Array:
    """Mean negative log-probability of the targets, float32.

    The head works on a block of each window's positions at a time, and again on the way back, so
    that no more than `_BLOCK_ROWS` rows of logits (or one position of each window) are ever held.
    """
    Y, W, D = hidden_YWD.shape
    most = max(_BLOCK_ROWS // Y, 1)
    block = next(size for size in range(min(most, W), 0, -1) if W % size == 0)

    @jax.checkpoint
    def add(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        hidden_YXD, targets_YX = part
        logits_QV = decoder.logits(values, config, hidden_YXD.reshape(-1, D))
        of_target_Q = jnp.take_along_axis(logits_QV, targets_YX.reshape(-1, 1), axis=1)[:, 0]
        return total + (jax.nn.logsumexp(logits_QV, axis=1) - of_target_Q).sum(), None

    blocks = (
        hidden_YWD.reshape(Y, W // block, block, D).swapaxes(0, 1),
        targets_YW.reshape(Y, W // block, block).swapaxes(0, 1),
    )
    total, _ = jax.lax.scan(add, jnp.float32(0), blocks)
    return total / (Y * W)
