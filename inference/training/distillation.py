"""Losses of a student that learns a teacher's distributions of the next token.

The teacher computes its distributions in each step (`from_memory`), or has computed them once for a
file (`from_file`, `TeacherFile`). A batch has what `losses.next_token` reads. Mixtures have no loss
for uneven routing here.
"""

import jax
import jax.numpy as jnp
import numpy as np

from configs.model import ModelConfig
from configs.recipes.training import Distillation
from inference.training import divergences, loop, losses
from inference.training.loop import Loss
from inference.training.losses import Model
from layers import decoder, ragged
from layers.params import Params

_STUDENT, _PROJECTION = "student", "projection"  # what is trained where hidden states are learned

_LEVELS = 4  # of a model's depth whose hidden states are learned


def from_file(student: ModelConfig, training: Distillation) -> Loss:
    """Returns the mean divergence, in nats, of the student's distributions from those that a batch
    has: "ids", i32[Y, W, K], and "logprobs", float16 [Y, W, K + 1], as `divergences.likeliest`.
    """
    model, diverge = losses.whole(student), divergences.BY_NAME[training.divergence]

    def loss(masters: Params, frozen: None, batch: dict[str, jax.Array]) -> jax.Array:
        values, inputs_YW = model(masters, frozen), batch["tokens"][:, :-1]
        rows = ragged.contiguous(*inputs_YW.shape)
        hidden_YWD, _ = losses.hidden_states(values, student, inputs_YW, rows)

        def lose(hidden_QD: jax.Array, ids_QK: jax.Array, logprobs_QK: jax.Array) -> jax.Array:
            logits_QV = decoder.logits(values, student, hidden_QD) / training.temperature
            teacher_QK = jax.nn.log_softmax(logprobs_QK.astype(jnp.float32))  # was rounded
            return diverge(teacher_QK, divergences.with_others(logits_QV, ids_QK))

        lost = losses.mean(lose, hidden_YWD, batch["ids"], batch["logprobs"])
        return training.temperature**2 * lost

    return loss


def from_memory(
    teacher: ModelConfig,
    student: ModelConfig,
    training: Distillation,
    model: Model | None = None,
) -> Loss:
    """Returns the mean divergence, in nats, of a student's distributions from the teacher's, whose
    parameters are frozen; with `training.hidden_weight` times the distance of hidden states
    (`masters`), which is the mean of 1 - cosine (Sanh et al. 2019, arXiv 1910.01108).

    Args:
        model: makes the student's parameters of float32 masters; None: in their declared formats.
    """
    model = model or losses.whole(student)
    diverge, learns_states = divergences.BY_NAME[training.divergence], training.hidden_weight > 0

    def loss(masters: Params, frozen: Params, batch: dict[str, jax.Array]) -> jax.Array:
        inputs_YW = batch["tokens"][:, :-1]
        rows = ragged.contiguous(*inputs_YW.shape)
        values = model(student_of(masters, training), None)
        output, target = (
            losses.layers_output(
                of_model, config, inputs_YW, rows, _levels(config) if learns_states else ()
            )
            for of_model, config in ((values, student), (frozen, teacher))
        )
        target = jax.lax.stop_gradient(target)

        def lose(student_QD: jax.Array, teacher_QD: jax.Array) -> jax.Array:
            logits_QV = decoder.logits(values, student, student_QD)
            target_QV = decoder.logits(frozen, teacher, teacher_QD)
            return diverge(
                *(jax.nn.log_softmax(x / training.temperature) for x in (target_QV, logits_QV))
            )

        states = (x.hidden_TD.reshape(*inputs_YW.shape, -1) for x in (output, target))
        lost = training.temperature**2 * losses.mean(lose, *states)
        if learns_states:
            projections = masters.get(_PROJECTION, [None] * _LEVELS)
            distances = map(_distance, projections, output.streams, target.streams)
            lost += training.hidden_weight * sum(distances) / _LEVELS
        return lost

    return loss


def masters(
    student: Params, config: ModelConfig, teacher: ModelConfig, training: Distillation
) -> Params:
    """Returns what `from_memory` trains: the student's parameters, and where hidden states are
    learned and the models' widths differ, a matrix a level from the student's to the teacher's.
    """
    if not training.hidden_weight:
        return student
    if config.width == teacher.width:
        return {_STUDENT: student}
    rng = np.random.default_rng(training.seed)
    shape = _LEVELS, teacher.width, config.width
    matrices = rng.standard_normal(shape, np.float32) / np.float32(config.width**0.5)
    place = loop.sharding_of(student)
    return {_STUDENT: student, _PROJECTION: [jax.device_put(matrix, place) for matrix in matrices]}


def student_of(values: Params, training: Distillation) -> Params:
    """The student's parameters among those that are trained (`masters`)."""
    return values[_STUDENT] if training.hidden_weight else values


def _levels(config: ModelConfig) -> tuple[int, ...]:
    """Layers behind which equal shares of a model's depth lie."""
    return tuple(max(config.num_layers * nth // _LEVELS, 1) for nth in range(1, _LEVELS + 1))


def _distance(
    matrix_DD: jax.Array | None, student_TD: jax.Array, teacher_TD: jax.Array
) -> jax.Array:
    if matrix_DD is not None:
        student_TD = student_TD @ matrix_DD.T
    norms_T = jnp.linalg.norm(student_TD, axis=1) * jnp.linalg.norm(teacher_TD, axis=1)
    return 1 - ((student_TD * teacher_TD).sum(1) / norms_T).mean()
