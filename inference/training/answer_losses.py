"""Losses of answers alone, whose batches are those of `packing.filled`."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from configs.model import ModelConfig
from inference.training import loop, losses
from inference.training.loop import Loss
from inference.training.losses import Model
from layers import decoder, ragged
from layers.params import Params
from sharding import mesh as meshes

# (what is trained, frozen, batch) -> of each pair its reward margin, float32 [Y].
Margins = Callable[[Params, Params, dict[str, jax.Array]], jax.Array]


def answers(config: ModelConfig, model: Model | None = None) -> Loss:
    """The mean cross-entropy, in nats, of each token of an answer given what is before it in its
    sequence; of mixtures with what `losses.next_token` adds. `model` says what is trained; None:
    all of it.
    """
    model = model or losses.whole(config)

    def loss(masters: Params, frozen: Params | None, batch: dict[str, jax.Array]) -> jax.Array:
        lost_Y, unbalanced = _lost(model(masters, frozen), config, batch, batch["weight"])
        return lost_Y.sum() / batch["weight"].size + unbalanced

    return loss


def preference(margins: Margins) -> Loss:
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290): the mean over pairs
    of the negative log-probability, in nats, that the chosen answer wins by its reward margin.
    """

    def loss(masters: Params, reference: Params, batch: dict[str, jax.Array]) -> jax.Array:
        return jax.nn.softplus(-margins(masters, reference, batch)).mean()

    return loss


def reward_margins(config: ModelConfig, beta: float, model: Model | None = None) -> Margins:
    """Of pairs, how much more `beta` times the log-probability of the chosen answer has grown over
    the reference's than that of the rejected one: float32 [Y]. The reference is parameters in the
    model's declared formats. `model` says what is trained; None: all of it.
    """
    model = model or losses.whole(config)

    def margins(masters: Params, reference: Params, batch: dict[str, jax.Array]) -> jax.Array:
        is_answer = (batch["weight"] > 0).astype(jnp.float32)
        policy_Y, _ = _lost(model(masters, reference), config, batch, is_answer)
        reference_Y, _ = _lost(reference, config, batch, is_answer)
        growth_Y2 = (jax.lax.stop_gradient(reference_Y) - policy_Y).reshape(-1, 2)
        return beta * (growth_Y2[:, 0] - growth_Y2[:, 1])

    return margins


def measured(
    margins: Margins,
    values: Params,
    reference: Params | None,
    batches: Iterable[Mapping[str, np.ndarray]],
) -> np.ndarray:
    """The reward margins of batches one behind the other, float32; the parameters may lie on a
    mesh.
    """
    place, jitted = loop.sharding_of(values, *meshes.EACH_GROUP), jax.jit(margins)
    parts = (jitted(values, reference, jax.device_put(batch, place)) for batch in batches)
    return np.concatenate([np.asarray(part) for part in parts])


def _lost(
    values: Params, config: ModelConfig, batch: dict[str, jax.Array], weight: jax.Array
) -> tuple[jax.Array, jax.Array | float]:
    """Weighted sums of negative log-probabilities of a batch's targets, as `target_sums`."""
    return target_sums(values, config, batch, lambda lost_Q, weight_Q: weight_Q * lost_Q, weight)


def target_sums(
    values: Params,
    config: ModelConfig,
    batch: dict[str, jax.Array],
    lose: Callable[..., jax.Array],
    *arrays: jax.Array,
) -> tuple[jax.Array, jax.Array | float]:
    """Sums over each row of each window, float32, of what `lose` makes of the negative
    log-probabilities of the batch's targets, float32 [Q], and of these arrays, [Q] each; and the
    rest of `losses.hidden_states`.
    """

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(-1, x.shape[-1])

    rows = ragged.packed(flat(batch["position"]), flat(batch["is_valid"]))
    hidden_YWD, unbalanced = losses.hidden_states(values, config, flat(batch["tokens"]), rows)
    logits = partial(decoder.logits, values, config)

    def of_block(hidden_QD: jax.Array, target_Q: jax.Array, *arrays_Q: jax.Array) -> jax.Array:
        return lose(losses.negative_logprobs(logits, hidden_QD, target_Q), *arrays_Q)

    sums_Y = losses.row_sums(of_block, hidden_YWD, flat(batch["targets"]), *map(flat, arrays))
    return sums_Y, unbalanced
