"""How far one model's distributions of the next token are from another's, over the same windows."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from configs.model import ModelConfig
from layers import decoder
from layers.params import Params
from layers.ragged import contiguous

_ROWS = 128  # whose logits are held at a time, of both models


class Model(NamedTuple):
    """A model as an engine has it: its configuration, and parameters of whatever leaves."""

    config: ModelConfig
    params: Params


class Distance(NamedTuple):
    """Between two models, over tokens.

    Attributes:
        kl: mean Kullback-Leibler divergence KL(other || own), nats: what is lost where the model
            in question stands for the other one.
        agreement: share of tokens for which both find the same likeliest successor.
        tokens: for how many there was a successor.
    """

    kl: float
    agreement: float
    tokens: int


def distance(
    model: Model,
    other: Model,
    windows: Sequence[Sequence[int]],
    progress: Callable[[int, int, str], None] | None = None,
) -> Distance:
    """How far a model is from another, which it stands for.

    Args:
        other: of the same vocabulary.
        windows: token ids; each window is read by itself, and its last token predicts nothing.
    """
    width = -(-max(map(len, windows)) // _ROWS) * _ROWS
    total, same, tokens = 0.0, 0, 0
    for nth, window in enumerate(windows):
        padded_W = np.zeros(width, np.int32)  # behind the window, where nothing of it looks
        padded_W[: len(window)] = window
        kl_W, is_same_W = _compared(
            model.params, other.params, padded_W, config=model.config, other=other.config
        )
        count = len(window) - 1
        total += float(np.asarray(kl_W[:count], np.float64).sum())
        same += int(np.asarray(is_same_W[:count]).sum())
        tokens += count
        if progress:
            progress(nth + 1, len(windows), "comparing distributions")
    return Distance(total / tokens, same / tokens, tokens)


@functools.partial(jax.jit, static_argnames=("config", "other"))
def _compared(
    params: Params,
    other_params: Params,
    tokens_W: jax.Array,
    *,
    config: ModelConfig,
    other: ModelConfig,
) -> tuple[jax.Array, jax.Array]:
    """Divergence after each token, and whether the likeliest successors are the same."""
    rows = contiguous(1, len(tokens_W))
    hidden = []
    for weights, model in ((params, config), (other_params, other)):
        x_TD = decoder.embedded(weights, model, tokens_W, rows)
        output = decoder.layers(weights, model, x_TD, rows, tokens_T=tokens_W)
        hidden.append(output.hidden_TD.reshape(-1, _ROWS, model.width))

    def compare(parts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        logprobs_QV = jax.nn.log_softmax(decoder.logits(params, config, parts[0]))
        other_QV = jax.nn.log_softmax(decoder.logits(other_params, other, parts[1]))
        kl_Q = (jnp.exp(other_QV) * (other_QV - logprobs_QV)).sum(1)
        return kl_Q, logprobs_QV.argmax(1) == other_QV.argmax(1)

    kl_XQ, is_same_XQ = jax.lax.map(compare, (hidden[0], hidden[1]))
    return kl_XQ.reshape(-1), is_same_XQ.reshape(-1)
