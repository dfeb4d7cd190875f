"""An iteration of reinforcement learning as a table."""

from collections.abc import Iterable

from rich.console import Console

from inference.planner.deployment import Deployment
from inference.planner.reinforcement import Plan
from scripts.reports.tables import new_table, seconds, size

_SHARING = {
    "together": "the same chips hold all of it",
    "in turns": "the same chips hold all but cache and an update's arrays, which take turns",
    "by the host": "the same chips hold one at a time, and the trainer's state waits in the host",
    "not": "a chip is too small for one of both",
}


def show(console: Console, deployment: Deployment, plan: Plan) -> None:
    for line in _lines(deployment, plan):
        console.print(line, markup=False, soft_wrap=True)
    table = new_table(["schedule", "chips", "step", "samples/s", "samples/s a chip",
                       "engine idle", "trainer idle"])  # fmt: skip
    for schedule in plan.schedules:
        table.add_row(
            schedule.name, str(schedule.num_chips), seconds(schedule.step_s),
            f"{schedule.samples_s:,.4g}", f"{schedule.samples_s / schedule.num_chips:,.4g}",
            f"{schedule.sampling_idle:.0%}", f"{schedule.training_idle:.0%}",
        )  # fmt: skip
    console.print(table)
    waits = plan.sampling.seconds > plan.training.seconds
    first, second = ("trainer", "engine") if waits else ("engine", "trainer")
    console.print(
        f"apart, the {first} waits for the {second}; neither waits where the engine has "
        f"{plan.sampling_share:.0%} of the chips",
        markup=False, soft_wrap=True,
    )  # fmt: skip


def _lines(deployment: Deployment, plan: Plan) -> Iterable[str]:
    iteration, sampling = plan.iteration, plan.sampling
    training, memory = plan.training, plan.memory
    yield (
        f"an iteration: {iteration.batch:,} prompts of {plan.prompt_tokens:,} tokens x "
        f"{iteration.group_size} answers of {iteration.max_new_tokens:,} = "
        f"{iteration.num_answers:,} samples"
    )
    yield (
        f"sampling: {seconds(sampling.seconds)} = {seconds(sampling.prefill_s)} prefill + "
        f"{seconds(sampling.decode_s)} decode, {sampling.prompts:,} prompts at a time in "
        f"{sampling.waves} waves"
    )
    yield (
        f"training: {seconds(training.seconds)} = {seconds(training.compute_s)} for "
        f"{training.passes} forward passes' {training.flops:.3g} FLOPs a chip at "
        f"{training.mfu:.0%} of its rate (an assumption: --mfu) + {seconds(training.update_s)} "
        "for parameters and moments"
    )
    yield (
        f"memory a chip: {size(memory.chip_bytes)}; sampling {size(memory.sampling_bytes)} "
        f"({size(memory.cache_bytes)} of it cache), training {size(memory.training_bytes)} "
        f"({size(memory.state_bytes)} of it masters, moments and models, activations estimated): "
        f"{_SHARING[plan.sharing]}"
    )
    if plan.sharing == "by the host":
        cost = f"{seconds(plan.move_s)} an iteration" if plan.move_s else "at an unknown rate"
        yield f"the trainer's state moves to the host and back in {cost}"
