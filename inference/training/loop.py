"""The one training loop: any loss of any parameters, on one device or over a mesh.

A step is one jitted update whose state is donated. What comes next is a function of the state
alone: the batch of a step is a pure function of its number (`Data`), or of that and the parameters
(`PolicyData`), so the saved step is the saved position, and a run that goes on from a checkpoint
computes what the undisturbed one would have, bit for bit.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from configs.errors import InputError
from configs.recipes.training import TrainingConfig
from inference.training.step_folder import StepFolder
from layers.params import Params
from sharding import mesh as meshes

Sum = TypeVar("Sum")

# (params, frozen, batch) -> the mean over the batch's rows, a float32 scalar.
Loss = Callable[..., jax.Array]


class Data(Protocol):
    """Where batches come from."""

    def batch(self, step: int) -> Mapping[str, np.ndarray]:
        """The batch of a step, a pytree of numpy arrays [`TrainingConfig.batch`, ...]: a pure
        function of the step.
        """


@runtime_checkable
class PolicyData(Protocol):
    """Where batches come from that what is trained has sampled."""

    def sampled(self, step: int, params: Params, frozen: object) -> Mapping[str, np.ndarray]:
        """The batch of a step, as `Data.batch`, whose first axis may differ in length: a function
        of the step and of the parameters of this step and of those before it. They are overwritten
        after the call.
        """


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a checkpoint holds."""

    params: Params  # float32 masters
    optimizer: object  # of optax
    step: jax.Array  # i32[], the next one
    losses: jax.Array  # f32[steps], of those that are done


def train(
    loss_fn: Loss,
    params: Params,
    data: Data | PolicyData,
    config: TrainingConfig,
    *,
    frozen: object = None,
    folder: StepFolder | None = None,
    observe: Callable[[np.ndarray], None] = lambda losses: None,
    stop: Callable[[], bool] = lambda: False,
) -> Params:
    """Trains parameters where they lie: on their device, or over their mesh.

    Args:
        loss_fn: what is made small, differentiated by its first argument.
        params: float32 arrays; overwritten.
        frozen: a pytree that the loss needs and nothing trains, such as the model whose heads are.
        folder: of checkpoints; if it has one, training goes on from there.
        observe: called with the losses of all steps so far, after each and where some are done at
            the start.
        stop: asked before each step; if so, a checkpoint is written and the rest left out.

    Raises:
        InputError: a loss is not finite, a checkpoint cannot be read or written, or a store does
            not take the last one.
    """
    state = init(params, config)
    if folder is not None:
        state = folder.restore(state)
    done = saved = int(state.step)
    losses = np.array(state.losses)
    place = sharding_of(params, None, *meshes.EACH_GROUP)
    put = functools.partial(_put, data, config, place, frozen)
    batch = put(done, state.params)
    if done:
        observe(losses[:done])
    update = _update(loss_fn, config)
    while done < config.steps and not stop():
        state, loss = update(state, frozen, batch)
        batch = put(done + 1, state.params)  # while the device computes
        losses[done] = loss
        if not np.isfinite(losses[done]):
            last = folder and folder.newest()
            raise InputError(
                f"the loss of step {done} is {losses[done]}: lower training.learning_rate"
                + (f"; the last checkpoint is {last}" if last else "")
            )
        done += 1
        observe(losses[:done])
        if folder is not None and done % config.checkpoint_every == 0:
            folder.save(done, state)
            saved = done
    if folder is not None:
        if done != saved:
            folder.save(done, state)
        folder.finish()
    return state.params


def _update(
    loss_fn: Loss, config: TrainingConfig
) -> Callable[[TrainState, object, object], tuple[TrainState, jax.Array]]:
    """(state, frozen tree, batch) -> the next state, and the loss; compiled for each shape of a
    batch. The state is donated.
    """
    transform, gradients = _transform(config), jax.value_and_grad(loss_fn)

    def update(state: TrainState, frozen: object, batch: object) -> tuple[TrainState, jax.Array]:
        def add(total: Sum, part: object) -> tuple[Sum, None]:
            return jax.tree.map(jnp.add, total, gradients(state.params, frozen, part)), None

        zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, state.params)
        total, _ = jax.lax.scan(add, zeros, batch)
        loss, slopes = jax.tree.map(lambda x: x / config.accumulate, total)
        changes, moments = transform.update(slopes, state.optimizer, state.params)
        params = optax.apply_updates(state.params, changes)
        losses = state.losses.at[state.step].set(loss)
        return TrainState(params, moments, state.step + 1, losses), loss

    compiled: dict[tuple[tuple[int, ...], ...], Callable[..., tuple[TrainState, jax.Array]]] = {}

    def run(state: TrainState, frozen: object, batch: object) -> tuple[TrainState, jax.Array]:
        shapes = tuple(leaf.shape for leaf in jax.tree.leaves(batch))
        if shapes not in compiled:
            same = jax.tree.map(lambda x: x.sharding, state), None
            jitted = jax.jit(update, donate_argnums=0, out_shardings=same)
            compiled[shapes] = jitted.lower(state, frozen, batch).compile()
        return compiled[shapes](state, frozen, batch)

    return run


def _transform(config: TrainingConfig) -> optax.GradientTransformation:
    """Clipping by the global norm (Pascanu et al. 2013, arXiv 1211.5063), then AdamW; only matrices
    decay.
    """
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
            schedule, config.beta1, config.beta2, weight_decay=config.weight_decay,
            mask=functools.partial(jax.tree.map, lambda leaf: leaf.ndim > 1),
        ),
    )  # fmt: skip


def init(params: Params, config: TrainingConfig) -> TrainState:
    """The state before the first step; moments lie as their parameters do."""
    transform, sharding = _transform(config), sharding_of(params)
    shapes = jax.eval_shape(transform.init, params)
    shardings = optax.tree_map_params(
        transform,
        lambda _, leaf: leaf.sharding,
        shapes,
        params,
        transform_non_params=lambda _: sharding,
    )
    moments = jax.jit(transform.init, out_shardings=shardings)(params)
    step, losses = jax.device_put((np.int32(0), np.zeros(config.steps, np.float32)), sharding)
    return TrainState(params, moments, step, losses)


def sharding_of(params: Params, *axes: object) -> NamedSharding | SingleDeviceSharding:
    """The device of parameters, or their mesh with an array divided over these axes."""
    sharding = jax.tree.leaves(params)[0].sharding
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec(*axes))
    return sharding


def _put(
    data: Data | PolicyData,
    config: TrainingConfig,
    place: object,
    frozen: object,
    step: int,
    params: Params,
) -> object:
    """The batch of a step on the device, its rows in `accumulate` parts."""
    if step >= config.steps:
        return None
    if isinstance(data, PolicyData):
        batch = data.sampled(step, params, frozen)
    else:
        batch = data.batch(step)
    parts = jax.tree.map(lambda x: x.reshape(config.accumulate, -1, *x.shape[1:]), batch)
    return jax.device_put(parts, place)
