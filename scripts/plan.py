"""What a deployment costs: python -m scripts.plan --model=llama2-13b --batch=1,16,64.

Memory, latency and throughput before anything runs; loads no JAX for presets on known chips.
"""

from scripts import interrupts  # noqa: F401

# isort: split
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from configs import overrides, presets
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.hardware import catalog, targets
from configs.precision import PLANNED
from configs.recipes import run
from configs.recipes.policy import Iteration
from inference.files import user_files
from inference.planner import (
    acceptance,
    advise,
    cache_policy,
    parts,
    reinforcement,
    request_cost,
    slo,
    weights,
)
from inference.planner.calibration import lookup
from inference.planner.cost import Precision
from inference.planner.deployment import ACCOUNTINGS, Deployment
from inference.planner.speculation import Speculation
from scripts import common
from scripts.flags import (
    budget_flags,
    chip_flag,
    deployment_flags,
    file_flags,
    output_flag,
    placement_flags,
    price_flag,
    samples_flag,
    shared_flags,
    speculation_flags,
    task_flag,
)
from scripts.flags.requests import replicas_flag
from scripts.reports import plan_text

_HARDWARE = chip_flag.HARDWARE
_BATCH, _CONTEXT = placement_flags.BATCH, placement_flags.CONTEXT
_NEW_TOKENS = shared_flags.NEW_TOKENS
_WEIGHTS, _CACHE = deployment_flags.WEIGHTS, deployment_flags.CACHE
_MESH = deployment_flags.MESH
_REPLICAS = replicas_flag.REPLICAS
_SPECULATE = speculation_flags.SPECULATE
_SAMPLES = samples_flag.SAMPLES
_THINKING = flags.DEFINE_integer("thinking_tokens", 0, "Tokens of thought before --new_tokens.")
_ACCOUNTING = flags.DEFINE_string("accounting", "exact", f"{' or '.join(ACCOUNTINGS)}.")
_PLOT = file_flags.PLOT
_HTML = flags.DEFINE_string("html", None, "HTML file: the interactive page.")
_SLO = flags.DEFINE_string("slo", None, "Targets: ttft=0.5,tpot=0.03 (seconds).")
_RATE = shared_flags.RATE
_ADVISE = flags.DEFINE_bool("advise", False, "Rank combinations of techniques.")
_CHIPS = flags.DEFINE_integer("chips", 1, "Chips to --advise on.")
_GOAL = flags.DEFINE_string("goal", "throughput", f"Of --advise: {' or '.join(advise.GOALS)}.")
_VERIFY = flags.DEFINE_bool(
    "verify", False, "Time the engine's steps on this machine, calibrate it, show both."
)
_TASK = task_flag.TASK
_RECOMPUTE = flags.DEFINE_bool(
    "recompute", False, "--task=grpo: compute activations again instead of storing them."
)
_MFU = flags.DEFINE_float(
    "mfu", reinforcement.MFU, "--task=grpo: share of a chip's rate that training is taken to reach."
)
_OUTPUT = output_flag.OUTPUT
_shared = (
    *(common, file_flags, output_flag, placement_flags, price_flag, replicas_flag, shared_flags),
    *(budget_flags, chip_flag, deployment_flags, samples_flag, task_flag),
)
for _module in _shared:  # --help shows theirs too
    flags.adopt_module_key_flags(_module)

_OF_VERIFY = {
    "verify",
    "output",
    *(flag.name for flag in flags.FLAGS.get_key_flags_for_module(common)),
}
_TRAINING = "training."  # begins the settings of --task
_ADVISED_TOKENS = 256  # new tokens of a workload that names none


@dataclasses.dataclass(frozen=True)
class _Policy:
    """What --set changes in addition to a `Config` with --task=grpo."""

    training: Iteration = Iteration()


def main(_: Sequence[str]) -> None:
    config = _config()
    if _VERIFY.value:
        return _verify(config)
    batches, contexts = map(shared_flags.whole_numbers, (_BATCH, _CONTEXT))
    _check_questions()
    file_flags.check_plot()
    if _HTML.value is not None:
        user_files.check_target(f"--html={_HTML.value}", _HTML.value, ".html")
    deployment = _deployment(config)
    padded = deployment.hardware.padded_caches
    there = config.for_platform(catalog.platform(_hardware()), bool(padded))
    report: dict[str, Any] = {
        "hardware": dataclasses.asdict(deployment.hardware),
        "ridge": deployment.hardware.ridge(deployment.formats.weights.compute),
        "warnings": list(deployment.warnings),
    }
    if _SLO.value is not None:
        report["slo"] = slo.answers(
            deployment, _targets(_SLO.value), contexts[0], _new_tokens(_ADVISED_TOKENS), _RATE.value
        )
    elif _TASK.present:
        report["grpo"] = reinforcement.plan(
            deployment, _iteration(), contexts[0], _RECOMPUTE.value, _MFU.value
        )
    elif _ADVISE.value and budget_flags.is_present():
        from inference.prune import advice as smaller

        budget = budget_flags.read(deployment.hardware, contexts[0])
        report["smaller"] = smaller.advise(common.model_name(), config.model, budget)
    elif _ADVISE.value:
        workload = advise.Workload(contexts[0], _new_tokens(_ADVISED_TOKENS), _GOAL.value)
        fixed = deployment.formats if _WEIGHTS.value or _CACHE.value else None
        report["advice"] = advise.advise(deployment, workload, _CHIPS.value, fixed)
    else:
        deployment = _with_drafts(deployment, batches[0], contexts[0])
        report |= _sweep(deployment, batches, contexts)
        if _SPECULATE.value is not None and _automatic(_SPECULATE.value):
            report["drafts"] = _children(deployment, batches[0], contexts[0])
        if config.engine.adapters.slots:
            report["adapters"] = _adapters(deployment, batches[0], contexts[0])
        if config.model.has_states:
            report["snapshots"] = {
                "number": deployment.num_snapshots(batches[0]) * deployment.mesh.num_groups,
                "bytes_each": deployment.snapshot_bytes,
                "bytes": report["rows"][0].snapshot_bytes,
                "tokens": cache_policy.snapshot_tokens(there, deployment.hardware),
            }
        if config.prefill.is_apart:
            point = batches[0], contexts[0], _new_tokens(_ADVISED_TOKENS)
            bandwidth = config.prefill.bandwidth if config.prefill.hosts else None
            report["disaggregated"] = slo.disaggregated(deployment, *point, bandwidth)
        if config.engine != EngineConfig():
            report["engine"] = {
                "context": there.max_context,
                "cache_bytes": there.engine.cache.cache_bytes,
                "batch": there.most_seqs * there.mesh.num_groups,
            }
            if config.model.has_states:
                snapshots = {"number": there.num_snapshots, "bytes": there.state_bytes(0)}
                report["engine"]["snapshots"] = snapshots
            if len(there.num_pages) > 1:
                report["engine"]["page_groups"] = _page_groups(there)
    if _HTML.value is not None:
        from inference.planner.page import render

        file_flags.write(_HTML.value, render.render().encode())
    if _PLOT.value is not None:
        from scripts.reports.plots import plan_plot

        figure = plan_plot.draw(deployment, batches, contexts[0], _new_tokens(0))
        file_flags.write(_PLOT.value, figure)
    if common.JSON.value:
        common.print_json(plan_text.as_json(report), there)
    else:
        plan_text.show(deployment, report)


def _verify(config: Config) -> None:
    from scripts.modes import plan_verify
    from scripts.reports import verify_text

    for flag in flags.FLAGS.get_key_flags_for_module(__name__):
        if flag.present and flag.name not in _OF_VERIFY:
            raise InputError(f"--verify answers one question: leave --{flag.name} out")
    plan_verify.check(config.model, config.engine.adapters)
    if _OUTPUT.value is not None:
        user_files.check_target(f"--output={_OUTPUT.value}", _OUTPUT.value, ".md")
    with common.bars() as progress:
        verification = plan_verify.run(config.model, config.engine.adapters, progress)
    render = verify_text.markdown(verification)
    if _OUTPUT.value is not None:
        file_flags.write(_OUTPUT.value, render.encode())
    if common.JSON.value:
        common.print_json(verify_text.as_json(verification), config)
    elif _OUTPUT.value is None:
        print(render, end="")


def _sweep(
    deployment: Deployment, batches: Sequence[int], contexts: Sequence[int]
) -> dict[str, object]:
    """A row for each batch and context, the parts of the first, and the largest batches. Each row
    has its best drafts where --speculate leaves them open; all else is for `deployment`, which has
    those of the first row.
    """
    new = _new_tokens(0)
    points = [(batch, context) for context in contexts for batch in batches]
    deployments = [_with_drafts(deployment, *point) for point in points]
    return {
        "rows": [d.row(*point, new) for d, point in zip(deployments, points, strict=True)],
        "speculation": [d.speculation for d in deployments],
        "largest_batch": [
            {"context": context, "batch": deployment.largest_batch(context, new)}
            for context in contexts
        ],
        "parts": parts.explain(deployment, batches[0], contexts[0]),
    } | _requests(deployment, batches[0], contexts[0])


def _requests(deployment: Deployment, batch: int, context: int) -> dict[str, object]:
    """What other numbers of samples cost at a point, where --samples or --thinking_tokens asks."""
    lengths, new = (batch, context), _new_tokens(0)
    if not new or (_SAMPLES.value == 1 and not _THINKING.value):
        return {}
    return {"requests": request_cost.trade(deployment, *lengths, new, _THINKING.value)}


def _adapters(deployment: Deployment, batch: int, context: int) -> dict[str, object]:
    """What slots of adapters take, and how much longer steps are with 1, 2, 4... of them."""
    slots, rank = deployment.adapters.slots, deployment.adapters.rank
    decode, prefill = deployment.decode_work(batch, context), deployment.prefill_work(1, context)
    most = min(slots, decode.num_requests)
    numbers = sorted({*(1 << n for n in range(most.bit_length())), most})
    return {
        "slots": slots,
        "rank": rank,
        "bytes": deployment.adapter_bytes,
        "decode_s": {n: deployment.adapter_seconds(decode, n) for n in numbers},
        "prefill_s": deployment.adapter_seconds(prefill, 1),
    }


def _page_groups(config: Config) -> list[dict[str, object]]:
    groups, lanes = config.cached_model.page_groups, config.engine.cache.row_multiple or 1
    sizes = config.cached_model.page_bytes(config.chip_page_tokens, lanes)
    return [
        {"sees": group.spec.sight, "layers": len(group.layers), "pages": n, "bytes": n * size}
        for group, n, size in zip(groups, config.num_pages, sizes, strict=True)
    ]


# --- flags ----------------------------------------------------------------------------------------


def _config() -> Config:
    """The configuration that --model or --config and --set name; only checkpoints need JAX."""
    name = str(flags.FLAGS["model"].value)
    settings = [
        setting
        for setting in (*(flags.FLAGS["set"].value or ()), *common.flag_settings())
        if not (_TASK.present and setting.startswith(_TRAINING))
    ]
    if flags.FLAGS["config"].value is None:
        if name in presets.NAMES or name in presets.PLANNED:
            return overrides.apply(Config(presets.get(name).config), settings)
        try:
            exists = bool(name) and Path(name).exists()
        except (OSError, ValueError):  # too long, or holds a NUL
            exists = False
        if not exists:
            raise InputError(
                f"no model {name!r}; valid: {', '.join(presets.NAMES | presets.PLANNED)}, a "
                "directory in Hugging Face format, or a .gguf file"
            )
    config: Config = common.named_config({})[1]
    run_file = common.named_run()
    return config if run_file is None else run.stored(config, run_file.published)


def _iteration() -> Iteration:
    """What --set changes of training."""
    settings = [text for text in flags.FLAGS["set"].value or () if text.startswith(_TRAINING)]
    return overrides.apply(_Policy(), settings).training


def _hardware() -> str:
    """The chip of --hardware, or of --config's target."""
    run_file = common.named_run()
    if _HARDWARE.present or run_file is None or run_file.target is None:
        return str(_HARDWARE.value)
    return targets.parse(run_file.target).chip


def _deployment(config: Config) -> Deployment:
    formats_of_model = Precision.of(config.model)
    stored = formats_of_model.weights
    if _WEIGHTS.value is not None:
        name = _WEIGHTS.value
        if name not in PLANNED:
            raise InputError(f"no number format {name!r}; valid: {', '.join(PLANNED)}")
        stored = weights.fitting(config.model, name)
    formats = Precision(stored, formats_of_model.cache, formats_of_model.rest)
    price = price_flag.price()
    drafts = _SPECULATE.value
    speculation = None if drafts is None or _automatic(drafts) else _speculation(drafts)
    chip = lookup.get(_hardware(), config.model)  # last: this machine is measured
    if price is not None:
        chip = dataclasses.replace(chip, price_per_hour=price)
    replicas = 1 if _REPLICAS.value is None else _REPLICAS.value
    return Deployment(
        config.model, chip, formats, config.mesh, replicas, speculation, _ACCOUNTING.value,
        snapshots=config.engine.cache.snapshots if config.num_snapshots > 1 else 0,
        samples=_SAMPLES.value, adapters=config.engine.adapters,
    )  # fmt: skip


def _with_drafts(deployment: Deployment, batch: int, context: int) -> Deployment:
    """The deployment with the best drafts for a point, where --speculate leaves them open."""
    if _SPECULATE.value is None or not _automatic(_SPECULATE.value):
        return deployment
    deployment.check_lengths(batch, context, _new_tokens(0))
    greedy = _SPECULATE.value == "auto,greedy"
    speculation = acceptance.best(deployment, batch, context + _new_tokens(0), greedy)
    return dataclasses.replace(deployment, speculation=speculation)


def _children(deployment: Deployment, batch: int, context: int) -> list[Any]:
    """Pruned children of the model as its drafts, at the longest of a point."""
    from inference.prune import advice as smaller

    is_greedy, length = _SPECULATE.value == "auto,greedy", context + _new_tokens(0)
    return smaller.drafts(common.model_name(), deployment, batch, length, is_greedy)


def _automatic(text: str) -> bool:
    return text in ("auto", "auto,greedy")


def _new_tokens(usual: int) -> int:
    """Tokens of each sample, its thought included."""
    return _THINKING.value + (int(_NEW_TOKENS.value) if _NEW_TOKENS.present else usual)


def _speculation(text: str) -> Speculation:
    try:
        drafts, accepted, cost = text.split(",")
        fields = int(drafts), float(accepted), float(cost)
    except ValueError:
        raise InputError(
            f"--speculate is k,acceptance,cost (4,0.8,0.11), auto or auto,greedy, not {text!r}"
        ) from None
    return Speculation(*fields)


def _targets(text: str) -> slo.Targets:
    limits: dict[str, float] = {}
    names = [field.name for field in dataclasses.fields(slo.Targets)]
    try:
        for part in text.split(","):
            name, _, limit = part.partition("=")
            if name not in names or name in limits:
                raise ValueError
            limits[name] = float(limit)
    except ValueError:
        raise InputError(f"--slo is like ttft=0.5,tpot=0.03 (seconds), not {text!r}") from None
    return slo.Targets(**limits)


def _check_questions() -> None:
    if _SLO.value is not None and _ADVISE.value:
        raise InputError("give either --slo or --advise")
    if _TASK.present and _TASK.value != "grpo":
        raise InputError(f"--task={_TASK.value}: `plan` knows grpo")
    for flag, field in (
        (_BATCH, "batch"),
        (_SAMPLES, "group_size"),
        (_NEW_TOKENS, "max_new_tokens"),
    ):
        if _TASK.present and flag.present:
            raise InputError(f"--{flag.name}: --task=grpo reads --set training.{field}=... instead")
    for name in (_RECOMPUTE.name, _MFU.name):
        if flags.FLAGS[name].present and not _TASK.present:
            raise InputError(f"--{name} needs --task=grpo")
    if _TASK.present and (_SLO.value is not None or _ADVISE.value or _PLOT.value is not None):
        raise InputError("--task=grpo answers one question: leave --slo, --advise and --plot out")
    has_question = _SLO.value is not None or _ADVISE.value
    drafts = _SPECULATE.value
    if has_question and drafts is not None and (_ADVISE.value or _automatic(drafts)):
        raise InputError("--advise finds drafts by itself, --slo takes them as k,acceptance,cost")
    if has_question and _PLOT.value is not None:
        raise InputError("--plot draws a sweep: leave --slo and --advise out")
    if _OUTPUT.value is not None:
        raise InputError("--output needs --verify")
    if _SLO.value is None and _RATE.value is not None:
        raise InputError("--rate needs --slo")
    if _THINKING.value < 0:
        raise InputError(f"--thinking_tokens is at least 0, not {_THINKING.value}")
    if _ADVISE.value and _SAMPLES.value != 1:
        raise InputError("--advise ranks for requests of one sample: leave --samples out")
    if budget_flags.is_present():
        budget_flags.check()
        if not _ADVISE.value:
            raise InputError(f"--{budget_flags.name()} needs --advise")
        for name in (f.name for f in (_CHIPS, _GOAL, _NEW_TOKENS, _BATCH, _WEIGHTS, _CACHE)):
            if flags.FLAGS[name].present:
                raise InputError(
                    f"--{name}: the shape for a target is sized for one sequence on one chip, "
                    "beside the formats that there are; leave it out"
                )
    for flag in (_CHIPS, _GOAL):
        if flag.present and not _ADVISE.value:
            raise InputError(f"--{flag.name} needs --advise")
    if has_question and (_MESH.value or _REPLICAS.value is not None):
        raise InputError("--slo and --advise find the mesh and the replicas: leave both out")


if __name__ == "__main__":
    common.run(main)
