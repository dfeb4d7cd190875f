"""A plan as tables for people and as JSON for tools."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from configs.mesh import Mesh
from inference.planner.advise import Choice
from inference.planner.deployment import Deployment, Row
from inference.planner.parts import Explanation, Step
from inference.planner.request_cost import RequestCost
from inference.planner.slo import Answer, Disaggregated
from inference.planner.speculation import Speculation
from scripts.reports import advice_text, policy_text, shape_text
from scripts.reports.tables import new_table, seconds, size, yes

# --- JSON -----------------------------------------------------------------------------------------


def as_json(plan: dict[str, Any]) -> dict[str, Any]:
    """What `json` can write: data classes become objects, a mesh its axes."""
    plan = dict(plan)
    if "advice" in plan:
        plan["advice"] = advice_text.as_json(plan["advice"])
    for name, value in plan.items():
        items = [_plain(item) for item in value] if isinstance(value, list) else _plain(value)
        plan[name] = items
    return plan


def _plain(value: Any) -> Any:
    is_data = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if is_data else value


# --- tables ---------------------------------------------------------------------------------------


def show(deployment: Deployment, plan: dict[str, Any]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a file has no edge to wrap at
    for line in _heading(deployment, plan):
        console.print(line, markup=False, soft_wrap=True)
    if "slo" in plan:
        _show_answers(console, plan["slo"])
    elif "advice" in plan:
        advice_text.show(console, plan["advice"])
    elif "smaller" in plan:
        shape_text.show_advice(console, plan["smaller"])
    elif "grpo" in plan:
        policy_text.show(console, deployment, plan["grpo"])
    else:
        _show_rows(console, plan["rows"], plan["speculation"])
        if "requests" in plan:
            _show_requests(console, deployment, plan["requests"])
        for line in _memory(deployment, plan["parts"], plan["largest_batch"]):
            console.print(line, markup=False, soft_wrap=True)
        if "adapters" in plan:
            console.print(_adapters(plan["adapters"]), markup=False, soft_wrap=True)
        if "snapshots" in plan:
            console.print(_snapshots(plan["snapshots"]), markup=False, soft_wrap=True)
        if "disaggregated" in plan:
            for line in _disaggregated(plan["disaggregated"]):
                console.print(line, markup=False, soft_wrap=True)
        if "engine" in plan:
            for line in _engine(plan["engine"]):
                console.print(line, markup=False, soft_wrap=True)
        _show_parts(console, plan["parts"])
        if plan.get("drafts"):
            shape_text.show_drafts(console, plan["drafts"])


def _heading(deployment: Deployment, plan: dict[str, Any]) -> Iterable[str]:
    chip, formats = deployment.hardware, deployment.formats
    compute = formats.weights.compute if formats.weights.compute in chip.rates else "bfloat16"
    stored = f"{formats.weights.name} weights, {formats.cache.name} cache"
    if "advice" in plan:
        best: Choice = plan["advice"].choices[0]
        num_chips = best.deployment.mesh.num_chips * best.deployment.replicas
        yield f"{deployment.config.name} on {num_chips} x {chip.name}"
    elif "smaller" in plan:
        yield f"{deployment.config.name} on {chip.name}: decode steps of one sequence"
    elif "slo" in plan:
        yield f"{deployment.config.name} on {chip.name}: {stored}"
    else:
        chips = f"{deployment.replicas} x {_chips(deployment)}"
        kind = f"{deployment.accounting} accounting"
        yield f"{deployment.config.name} on {chips}: {stored}, {kind}"
    yield (
        f"a chip: {size(chip.memory_bytes)}, {size(chip.read_bandwidth)}/s, "
        f"{chip.rate(compute) / 1e12:.5g} TFLOP/s in {compute}, "
        f"ridge {chip.ridge(compute):.4g} FLOPs a byte"
    )
    for warning in plan["warnings"]:
        yield f"note: {warning}"


def _chips(deployment: Deployment) -> str:
    mesh, name = deployment.mesh, deployment.hardware.name
    return name if mesh == Mesh() else f"{mesh.num_chips} {name} ({mesh})"


def _show_rows(
    console: Console, rows: Sequence[Row], speculations: Sequence[Speculation | None]
) -> None:
    requests, priced = rows[0].request_s is not None, rows[0].dollars_per_million is not None
    columns = ["batch", "context", "memory", "fits", "step", "TTFT", "tok/s"]
    columns += ["request"] * requests + ["$/1M tok"] * priced
    columns += ["FLOPs/byte", "bound"] + ["drafts"] * any(speculations)
    table = new_table(columns)
    for row, drafts in zip(rows, speculations, strict=True):
        cells = [str(row.batch), f"{row.context:,}", size(row.memory_bytes), yes(row.fits)]
        cells += [seconds(row.step_s), seconds(row.ttft_s), f"{row.output_tok_s:,.1f}"]
        cells += [seconds(row.request_s)] if row.request_s is not None else []
        cells += [f"{row.dollars_per_million:.3g}"] if row.dollars_per_million is not None else []
        cells += [f"{row.intensity:.3g}", row.bound]
        cells += [_drafts(drafts)] if any(speculations) else []
        table.add_row(*cells)
    console.print(table)


def _drafts(drafts: Speculation | None) -> str:
    if drafts is None:
        return "none"
    size = f", {1 / drafts.size:.0f} x smaller" if drafts.size else ""
    return f"k={drafts.drafts}{size}: {drafts.tokens_per_step:.2f} tokens a step"


def _show_requests(
    console: Console, deployment: Deployment, requests: Sequence[RequestCost]
) -> None:
    """What more samples cost, and how long one sample could think meanwhile."""
    thinks, priced = requests[0].thinking_tokens > 0, requests[0].dollars is not None
    columns = ["samples", "request", *["answer from"] * thinks, "chip-seconds", *["$"] * priced]
    columns += ["tokens", "cache", "of a step's bytes", "fit", "one sample thinks for"]
    table = new_table(columns)
    for request in requests:
        cells = [f"{request.samples}{' *' * (request.samples == deployment.samples)}"]
        cells += [seconds(request.seconds), *[seconds(request.answer_s)] * thinks]
        cells += [f"{request.chip_s:.4g}"]
        cells += [f"{request.dollars:.3g}"] if request.dollars is not None else []
        cells += [f"{request.tokens:,}", size(request.cache_bytes), f"{request.cache_share:.0%}"]
        cells += [f"{request.largest_batch:,}", f"{request.equal_thinking_tokens:,} tokens"]
        table.add_row(*cells)
    console.print(table)
    console.print("the last column: a thought with which one sample takes as many seconds")


def _memory(
    deployment: Deployment, parts: Explanation, largest: Sequence[dict[str, int]]
) -> Iterable[str]:
    active = ""
    if parts.active_parameters < 0.9 * parts.parameters:
        active = f" ({parts.active_parameters / 1e9:.4g} B for a token)"
    yield (
        f"weights: {parts.parameters / 1e9:.4g} B parameters{active} = "
        f"{size(parts.weight_bytes)}, {size(deployment.chip_weight_bytes)} a chip"
    )
    yield (
        f"cache: {parts.cache_bytes_per_token:,.0f} bytes a token, "
        f"{size(parts.cache_bytes_per_sequence)} a sequence of {parts.context:,}"
    )
    fits = (f"{point['batch']:,} at {point['context']:,}" for point in largest)
    of_samples = f" of {deployment.samples} samples" if deployment.samples > 1 else ""
    yield f"largest batch: {', '.join(fits)}{of_samples}"


def _adapters(adapters: dict[str, Any]) -> str:
    added = (f"{seconds(time)} with {n}" for n, time in adapters["decode_s"].items())
    return (
        f"adapters: {adapters['slots']} slots of rank {adapters['rank']} = "
        f"{size(adapters['bytes'])}, part of the memory; a decode step takes longer by "
        f"{', '.join(added)} of them, a prompt by {seconds(adapters['prefill_s'])}"
    )


def _snapshots(snapshots: dict[str, int]) -> str:
    distance = (
        f"one every {snapshots['tokens']:,} tokens" if snapshots["tokens"] else "none in between"
    )
    return (
        f"snapshots of states for prefixes: {snapshots['number']:,} of "
        f"{size(snapshots['bytes_each'])} = {size(snapshots['bytes'])}, part of the memory; "
        f"of a prompt {distance}"
    )


def _disaggregated(plan: Disaggregated) -> Iterable[str]:
    yield (
        f"prompts on chips of their own: {size(plan.transfer_bytes)} of pages move in "
        f"{seconds(plan.transfer_s)}; {seconds(plan.saved_s)} a request of waiting for others' "
        f"prompts are saved; these chips are {plan.prefill_load:.0%} busy"
    )
    for name, point in (("apart", plan.apart), ("together", plan.together)):
        yield (
            f"  {name}: TTFT {seconds(point.ttft_s)}, TPOT {seconds(point.tpot_s)}, "
            f"{point.requests_s:.3g} requests/s"
        )
    verdict = {
        "rate": "it pays",
        "TPOT": "it pays where tokens must come evenly",
        "nothing": "it does not pay",
    }
    rate = plan.apart.requests_s / plan.together.requests_s
    tpot = plan.apart.tpot_s / plan.together.tpot_s
    yield (
        f"  {verdict[plan.pays]}: {rate:.2f} x the rate of the same chips together, "
        f"{tpot:.2f} x their TPOT"
    )
    counts = plan.balanced
    yield (
        f"  balanced: {counts.prefill} prefill and {counts.decode} decode processes, "
        f"{counts.requests_s:.3g} requests/s"
    )


def _engine(engine: dict[str, Any]) -> Iterable[str]:
    yield (
        f"engine: {engine['batch']:,} sequences of {engine['context']:,} in "
        f"{engine['cache_bytes']:,} bytes a chip of whole pages, in the model's dtype, by engine.*"
    )
    if snapshots := engine.get("snapshots"):
        yield (
            f"  {snapshots['number']:,} snapshots of states, one of them a sink: "
            f"{size(snapshots['bytes'])} a chip"
        )
    for group in engine.get("page_groups", ()):
        yield (
            f"  {group['layers']} layers that see {group['sees']}: {group['pages']:,} pages, "
            f"{size(group['bytes'])}"
        )


def _show_parts(console: Console, parts: Explanation) -> None:
    """Decode of the first point beside the prefill of one prompt, operation by operation."""
    table = new_table(["operation", "layers", "FLOPs", "bytes", "FLOPs/byte", "ridge", "time",
                       "bound", "| prefill: FLOPs/byte", "time", "bound"])  # fmt: skip
    for decode, prefill in zip(parts.decode.operations, parts.prefill.operations, strict=True):
        table.add_row(
            decode.operation, str(decode.layers), f"{decode.flops:.3g}", f"{decode.bytes:.3g}",
            f"{decode.intensity:.4g}", f"{decode.ridge:.4g}", seconds(decode.seconds), decode.bound,
            f"{prefill.intensity:.4g}", seconds(prefill.seconds), prefill.bound,
        )  # fmt: skip
    console.print(table)
    if parts.decode.exchanges:
        console.print(_exchanges(parts.decode))
    for name, step in (("decode", parts.decode), ("prefill", parts.prefill)):
        console.print(f"{name}: {_total(step)}", markup=False, soft_wrap=True)


def _exchanges(step: Step) -> Table:
    """What chips exchange in a decode step."""
    table = new_table(["exchange", "axis", "kind", "times", "bytes each", "time", "hidden"])
    for exchange in step.exchanges:
        collective = exchange.collective
        table.add_row(
            collective.place, collective.axis, collective.kind, str(collective.count),
            f"{exchange.bytes:,.0f}", seconds(exchange.seconds), yes(not collective.exposed),
        )  # fmt: skip
    return table


def _total(step: Step) -> str:
    time = step.time
    return (
        f"{seconds(time.total_s)} from {seconds(time.memory_s)} of memory, "
        f"{seconds(time.compute_s)} of arithmetic, {seconds(time.collective_s)} of exchange, "
        f"{seconds(time.overhead_s)} overhead: {time.bound}"
    )


def _show_answers(console: Console, answers: Sequence[Answer]) -> None:
    first = answers[0]
    console.print(
        f"smallest mesh: {first.mesh}, up to {first.batch} requests (limit: {first.limited_by}), "
        f"{first.replicas} replicas of it = {first.num_chips} chips",
        markup=False, soft_wrap=True,
    )  # fmt: skip
    table = new_table(["mesh", "batch", "limit", "TTFT", "TPOT", "req/s", "tok/s", "replicas",
                       "load", "chips", "$/1M tok"])  # fmt: skip
    for answer in answers:
        replica, dollars = answer.replica, answer.dollars_per_million
        table.add_row(
            str(answer.mesh), str(answer.batch), answer.limited_by, seconds(replica.ttft_s),
            seconds(replica.tpot_s), f"{replica.requests_s:.3g}", f"{replica.output_tok_s:,.0f}",
            str(answer.replicas), "" if answer.load is None else f"{answer.load:.0%}",
            str(answer.num_chips),
            "" if dollars is None else f"{dollars:.3g}",
        )  # fmt: skip
    console.print(table)
    console.print("TTFT is the step in flight and the prompt; time in the queue comes on top")
