"""The loss of group-relative policy optimization (GRPO, Shao et al. 2024, arXiv 2402.03300)."""

import jax
import jax.numpy as jnp

from configs.model import ModelConfig
from configs.recipes.training import PolicyTraining
from inference.training import answer_losses, losses
from inference.training.loop import Loss
from inference.training.losses import Model
from layers.params import Params

# Figures of each target of a batch: its log-probability under the weights that are trained, those
# at the start of the iteration and the reference; how likely it was under the second in comparison
# with those that sampled it, capped; and how much better its answer is than others of its group.
FIGURES = LOGPROB, POLICY, REFERENCE, IMPORTANCE, ADVANTAGE = (
    "logprob", "policy", "reference", "importance", "advantage",
)  # fmt: skip


def clipped(config: ModelConfig, training: PolicyTraining, model: Model | None = None) -> Loss:
    """The mean over tokens of answers of the clipped surrogate (PPO, Schulman et al. 2017, arXiv
    1707.06347) and `training.kl_coefficient` times the estimated divergence from the reference, in
    nats. Batches are those of `packing.policy_batch` with `FIGURES`.

    Log-probabilities have the values of the batch, which are an engine's own (`engine_logprobs`),
    and the gradient of the decoder without a cache: before the first update of an iteration the
    ratio is exactly 1. `model` says what is trained; None: all of it.
    """
    model, clip = model or losses.whole(config), training.clip_ratio

    def lose(
        lost_Q: jax.Array,
        weight_Q: jax.Array,
        logprob_Q: jax.Array,
        policy_Q: jax.Array,
        reference_Q: jax.Array,
        importance_Q: jax.Array,
        advantage_Q: jax.Array,
    ) -> jax.Array:
        logprob_Q = _with_values(-lost_Q, logprob_Q)
        ratio_Q = jnp.exp(logprob_Q - policy_Q)
        limited_Q = jnp.clip(ratio_Q, 1 - clip, 1 + clip)
        gain_Q = jnp.minimum(ratio_Q * advantage_Q, limited_Q * advantage_Q)
        divergence_Q = _divergence(reference_Q - logprob_Q)
        return weight_Q * (training.kl_coefficient * divergence_Q - importance_Q * gain_Q)

    def loss(masters: Params, frozen: object, batch: dict[str, jax.Array]) -> jax.Array:
        arrays = batch["weight"], *(batch[name] for name in FIGURES)
        sums_Y, _ = answer_losses.target_sums(model(masters, frozen), config, batch, lose, *arrays)
        return sums_Y.sum() / batch["weight"].size

    return loss


def _divergence(excess_Q: jax.Array) -> jax.Array:
    """An estimate of a divergence by the reference's log-probabilities less the policy's, which is
    unbiased and never negative (k3, Schulman 2020).
    """
    return jnp.exp(excess_Q) - excess_Q - 1


@jax.custom_vjp
def _with_values(x_Q: jax.Array, values_Q: jax.Array) -> jax.Array:
    """`values_Q`, with the gradient of `x_Q`."""
    return values_Q


_with_values.defvjp(
    lambda x_Q, values_Q: (values_Q, None), lambda _, slope_Q: (slope_Q, jnp.zeros_like(slope_Q))
)
