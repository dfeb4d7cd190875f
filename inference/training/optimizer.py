"""AdamW as optax has it, with everything that `TrainingConfig` says of it."""

import jax
import optax

from configs.recipes.training import TrainingConfig


def of(config: TrainingConfig) -> optax.GradientTransformation:
    """Clipping by the global norm (Pascanu et al. 2013, arXiv 1211.5063), then AdamW."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=config.steps,
        end_value=config.learning_rate * config.last_learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=_matrices
        ),
    )


def _matrices(params: object) -> object:
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)
