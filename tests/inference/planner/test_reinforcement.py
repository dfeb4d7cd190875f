"""An iteration of reinforcement learning: by hand, by its invariants, and beside the compiler."""

import dataclasses
import itertools

import jax
import pytest

from configs import presets
from configs.errors import InputError
from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated
from configs.mesh import Mesh
from configs.model import LayerSpec, ModelConfig
from configs.recipes.policy import Iteration
from inference.planner import reinforcement, weights
from inference.planner.deployment import Deployment
from inference.training import losses
from layers import decoder, params
from tests import fakes

# 1e12 bytes and 1e15 FLOPs a second, 100 GB; 10 GB a second to the host.
CHIP = HardwareSpec("chip", 100e9, 1e12, {"bfloat16": 1e15}, host_bandwidth=10e9)
MODEL = ModelConfig(
    "thin", "llama", 512, width=16, num_layers=2, max_context=8192, dtype="bfloat16",
    pattern=(LayerSpec(Attention(3, 3, 64), Gated(48)),),
)  # fmt: skip
MATRICES = 2 * (16 * 3 * 192 + 192 * 16 + 16 * 2 * 48 + 48 * 16)  # elements, of both layers
ITERATION = Iteration(batch=4, group_size=3, max_new_tokens=11, kl_coefficient=0.0, accumulate=1)
LLAMA = presets.get("llama3-8b").config


def plan(iteration=ITERATION, chip=CHIP, model=MODEL, prompt_tokens=10, **settings):
    options = {name: settings.pop(name) for name in ("recompute", "mfu") if name in settings}
    deployment = Deployment(model, chip, **settings)
    return reinforcement.plan(deployment, iteration, prompt_tokens, **options)


# --- by hand --------------------------------------------------------------------------------------


def test_training_is_three_forward_passes():
    """12 answers of 11 tokens behind 10: 20 inputs, 210 pairs of query and key, 11 logits."""
    matrices = 2 * MATRICES * 12 * 20
    attention = 2 * 12 * 210 * 3 * 4 * 64
    head = 2 * 512 * 16 * 12 * 11
    training = plan(mfu=0.5).training
    assert training.passes == 3
    assert training.flops == pytest.approx(3 * (matrices + attention + head), rel=0.01)  # norms
    assert training.compute_s == pytest.approx(training.flops / (0.5 * 1e15))
    num_parameters = weights.num_parameters(MODEL)
    assert training.update_s == pytest.approx(32 * num_parameters / 1e12)
    assert plan(dataclasses.replace(ITERATION, updates=4)).training.update_s == pytest.approx(
        4 * training.update_s
    )


@pytest.mark.parametrize(
    ("rank", "kl", "recompute", "passes"),
    [(0, 0, False, 3), (0, 0, True, 4), (0, 0.1, True, 5), (8, 0, False, 2), (8, 0.1, True, 4)],
)
def test_what_adds_a_forward_pass(rank, kl, recompute, passes):
    iteration = dataclasses.replace(ITERATION, lora_rank=rank, kl_coefficient=float(kl))
    planned = plan(iteration, recompute=recompute).training
    assert planned.passes == passes
    assert planned.flops == pytest.approx(plan().training.flops * passes / 3)


def test_the_state_is_masters_and_moments_and_models_below():
    num_parameters = weights.num_parameters(MODEL)
    assert plan().memory.state_bytes == 12 * num_parameters
    compared = dataclasses.replace(ITERATION, kl_coefficient=0.1)
    assert plan(compared).memory.state_bytes == (12 + 2) * num_parameters
    adapter = dataclasses.replace(compared, lora_rank=4)
    factors = 4 * 2 * (3 * 16 + 3 * 192 + 192 + 16 + 2 * 16 + 96 + 48 + 16)  # a module each
    assert plan(adapter).memory.state_bytes == 12 * factors + 2 * num_parameters
    parts = dataclasses.replace(ITERATION, accumulate=4)  # a sum of gradients beside the last ones
    one, four = plan().memory.work_bytes, plan(parts).memory.work_bytes
    activations = one - (4 + 2) * num_parameters
    assert four == pytest.approx((2 * 4 + 2) * num_parameters + activations / 4)


def test_prompts_that_do_not_fit_wait_for_another_wave():
    model, iteration = LLAMA, Iteration(batch=10, group_size=8, max_new_tokens=1024)
    weight_bytes = weights.weight_bytes(model)
    whole = plan(iteration, model=model, prompt_tokens=1024)
    assert whole.sampling.waves == 1 and whole.sampling.prompts == 10
    engine = Deployment(model, CHIP, samples=8)
    room = 4 * engine.request_bytes(1024, 1024) + 1
    small = dataclasses.replace(CHIP, memory_bytes=weight_bytes + room)
    planned = plan(iteration, small, model, 1024)
    assert (planned.sampling.prompts, planned.sampling.waves) == (4, 3)
    times = [engine.request_seconds(size, 1024, 1024) for size in (4, 4, 2)]
    assert planned.sampling.seconds == pytest.approx(sum(times))
    assert planned.memory.cache_bytes == pytest.approx(room - 1)
    # Each replica has half of the prompts, and half of the samples to learn.
    halves = plan(iteration, small, model, 1024, replicas=2)
    assert halves.sampling.waves == 2
    assert halves.training.flops == pytest.approx(planned.training.flops / 2)


@pytest.mark.parametrize(
    ("chip_bytes", "sharing"),
    [
        (38, "together"), (37, "in turns"), (33, "in turns"), (32, "by the host"),
        (23, "by the host"), (22, "not"),
    ],
)  # fmt: skip
def test_how_chips_are_shared_depends_on_what_fits(chip_bytes, sharing):
    assert reinforcement.Memory(10, 5, 3, 20, chip_bytes).sharing == sharing


def test_a_state_that_waits_in_the_host_moves_twice():
    """8 G parameters are a state of 112 GB, and 4,096 sequences of 512 tokens a cache of 150 GB."""
    iteration = Iteration(batch=512, group_size=8, max_new_tokens=256, accumulate=4096)
    roomy = plan(iteration, dataclasses.replace(CHIP, memory_bytes=900e9), LLAMA, 256)
    assert roomy.memory.sharing == "together" and roomy.move_s == 0
    tight = dataclasses.replace(CHIP, memory_bytes=roomy.memory.training_bytes)
    planned = plan(iteration, tight, LLAMA, 256)
    assert planned.memory.sharing == "by the host"
    assert planned.move_s == pytest.approx(2 * planned.memory.state_bytes / 10e9)
    shared, apart, _ = planned.schedules
    assert shared.step_s == pytest.approx(apart.step_s + planned.move_s)
    idle = pytest.approx(planned.move_s / shared.step_s)
    assert shared.training_idle == idle and shared.sampling_idle == idle


# --- invariants -----------------------------------------------------------------------------------

GRID = list(
    itertools.product((Mesh(), Mesh(model=4), Mesh(data=2)), (2, 16), (64, 1024), (0, 3), (0, 16))
)


@pytest.mark.parametrize(("mesh", "group_size", "max_new_tokens", "staleness", "rank"), GRID)
def test_sums_are_of_their_parts_and_asynchronous_is_never_slower(
    mesh, group_size, max_new_tokens, staleness, rank
):
    iteration = Iteration(
        batch=16, group_size=group_size, max_new_tokens=max_new_tokens, staleness=staleness,
        lora_rank=rank,
    )  # fmt: skip
    planned = plan(iteration, catalog.get("h100"), LLAMA, 512, mesh=mesh)
    sampling, training = planned.sampling, planned.training
    assert sampling.seconds == sampling.prefill_s + sampling.decode_s
    assert training.seconds == training.compute_s + training.update_s
    shared, synchronous, asynchronous = planned.schedules
    assert synchronous.step_s == sampling.seconds + training.seconds
    assert shared.step_s == synchronous.step_s + planned.move_s
    assert asynchronous.step_s == max(sampling.seconds, training.seconds) < synchronous.step_s
    assert asynchronous.step_s >= synchronous.step_s / 2
    assert 2 * shared.num_chips == synchronous.num_chips == asynchronous.num_chips
    assert synchronous.sampling_idle + synchronous.training_idle == pytest.approx(1)
    assert min(asynchronous.sampling_idle, asynchronous.training_idle) == 0
    assert asynchronous.name.endswith(f"by {max(1, staleness)}")
    for schedule in planned.schedules:
        assert schedule.samples_s * schedule.step_s == pytest.approx(16 * group_size)
        assert 0 <= schedule.sampling_idle < 1 and 0 <= schedule.training_idle < 1
    # Chips divided so that neither waits are as fast as the same chips one after the other.
    share = planned.sampling_share
    assert sampling.seconds / share == pytest.approx(training.seconds / (1 - share))


def test_more_to_sample_or_to_learn_takes_longer():
    base = Iteration(batch=16, group_size=8, max_new_tokens=256)
    seconds = plan(base, CHIP, LLAMA, 512).schedules[0].step_s
    for name, value in (("batch", 32), ("group_size", 16), ("max_new_tokens", 512), ("updates", 4)):
        more = dataclasses.replace(base, **{name: value})
        assert plan(more, CHIP, LLAMA, 512).schedules[0].step_s > seconds, name
    assert plan(base, CHIP, LLAMA, 512, mfu=0.8).schedules[0].step_s < seconds


def test_recomputed_activations_take_less():
    iteration = Iteration(batch=8, group_size=8, accumulate=1)
    stored, recomputed = (
        plan(iteration, CHIP, LLAMA, 512, recompute=r).memory for r in (False, True)
    )
    assert recomputed.work_bytes < stored.work_bytes / 4
    assert (
        recomputed.state_bytes == stored.state_bytes
        and recomputed.cache_bytes == stored.cache_bytes
    )


@pytest.mark.parametrize(
    ("num_layers", "window", "rows"), [(2, 128, 4), pytest.param(6, 512, 1, marks=pytest.mark.long)]
)
def test_activations_are_about_what_the_compiler_says(num_layers, window, rows):
    model = fakes.llama(width=128, num_layers=num_layers, vocab_size=512, max_context=2048)
    masters = jax.tree.map(
        lambda info: jax.ShapeDtypeStruct(info.shape, "float32"), decoder.param_infos(model),
        is_leaf=params.is_info,
    )  # fmt: skip
    batch = {"tokens": jax.ShapeDtypeStruct((rows, window + 1), "int32")}
    lowered = jax.jit(jax.value_and_grad(losses.next_token(model))).lower(masters, None, batch)
    compiled = lowered.compile().memory_analysis().temp_size_in_bytes
    iteration = Iteration(rows, 2, window // 2, kl_coefficient=0.0, accumulate=2)
    memory = plan(iteration, model=model, prompt_tokens=window - window // 2 + 1).memory
    num_parameters = weights.num_parameters(model)
    activations = memory.work_bytes - 2 * 4 * num_parameters - 2 * num_parameters
    assert 0.6 < activations / compiled < 1.2


# --- refused --------------------------------------------------------------------------------------


def test_what_is_no_iteration():
    for changes, message in (
        ({"group_size": 1}, "training.group_size=1: an answer alone"),
        ({"batch": 0}, "training.batch=0"), ({"lora_rank": 257}, "training.lora_rank=257"),
        ({"updates": 3}, "training.updates=3: must divide training.batch"),
        ({"kl_coefficient": float("nan")}, "training.kl_coefficient=nan"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            dataclasses.replace(ITERATION, **changes)


def test_what_cannot_be_planned():
    with pytest.raises(InputError, match="context and new_tokens are at most"):
        plan(prompt_tokens=8190)
    with pytest.raises(InputError, match=r"--mfu=0.0"):
        plan(mfu=0.0)
    linked = catalog.get("h100")
    with pytest.raises(InputError, match="mesh.context=2: divides cached tokens"):
        plan(chip=linked, model=LLAMA, mesh=Mesh(context=2))
