"""Smaller models: python -m scripts.prune --text=FILE --target_params=0.7 --output=DIR.

What matters least is removed: layers, heads, channels, experts (docs/prune.md).
"""

from scripts import interrupts  # noqa: F401

# isort: split
import dataclasses
import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from configs.engine import Config
from configs.errors import InputError
from inference.checkpoints import new_directory
from scripts import common
from scripts.flags import budget_flags, chip_flag, output_flag, samples_flag, seed_flag, text_flag
from scripts.modes import prune_samples

if TYPE_CHECKING:
    from configs.model import ModelConfig
    from inference.checkpoints.checkpoint import Checkpoint
    from inference.prune.budget import Budget
    from inference.prune.importance import Importance, Method
    from inference.prune.refit import Refitted
    from inference.prune.search import Candidate

_OUTPUT, _TEXT = output_flag.OUTPUT, text_flag.TEXT
_WIDTHS = flags.DEFINE_list(
    "widths", [],
    "What stays: layers=24,ffn_width=1152,kv_heads=2, and of models that have it width, experts, "
    "expert_width, shared_width, state_heads, state_channels, latent_heads, kv_rank, query_rank.",
)  # fmt: skip
_SAMPLE_TOKENS = flags.DEFINE_integer("sample_tokens", 128, "Tokens of each of --samples.")
_AGGREGATE = flags.DEFINE_string(
    "aggregate", "l2,mean",
    "How activations become a score: over samples, then over tokens of each, by mean or l2.",
)  # fmt: skip
_DEPTH = flags.DEFINE_enum(
    "depth", "influence", ["influence", "loss"],
    "A layer matters as far as it turns the residual stream, or as the loss rises without it.",
)  # fmt: skip
_CONTIGUOUS = flags.DEFINE_bool("contiguous", False, "Layers that are removed are one span.")
_EXPERTS_BY = flags.DEFINE_enum(
    "experts_by", "norm", ["norm", "visits"],
    "An expert matters by the norms of its results, or by the tokens that are routed to it.",
)  # fmt: skip
_REFIT = flags.DEFINE_bool(
    "refit", True,
    "Matrices behind removed units are fitted to what they returned before (least squares).",
)  # fmt: skip
_RANDOM = flags.DEFINE_bool(
    "random", False, "Units and layers stay at random (--seed), as a baseline."
)
_NATIVE = flags.DEFINE_bool(
    "native", False, "Write our native format, which can say any shape, not transformers'."
)
for _module in (common, budget_flags, chip_flag, output_flag, samples_flag, seed_flag, text_flag):
    flags.adopt_module_key_flags(_module)

UNREAD = common.UNREAD_BY_TRAINERS
_PARTS = ".pruning"  # how the name of the folder beside the output ends
_SAMPLES = 1024


def main(_: Sequence[str]) -> None:
    if not _OUTPUT.value:
        raise InputError("--output=DIR names the directory to write")
    output = new_directory.target(_OUTPUT.value)
    common.check_unread("prune", UNREAD)
    widths: Mapping[str, int] = _widths()
    _check_budget(widths)
    if common.settings_asked():
        raise InputError("pruning changes nothing else of a model: leave --set and --mesh out")
    from inference.checkpoints import convert, load, provenance, resolve
    from inference.layerwise.parts import Parts
    from inference.layerwise.reader import Reader
    from inference.prune import export, refit, selection, shapes
    from inference.prune.importance import Importance

    resolved = resolve.resolve(common.model_name())
    config = resolved.config
    if config.formats:
        raise InputError(
            f"{common.model_name()} is quantized: name the model that it was made of, and quantize "
            "what pruning leaves of that"
        )
    shapes.check(config, widths)
    budget, method = _budget(config), _method()
    if budget is None and "layers" not in widths and not _NATIVE.value:  # before an hour of scores
        shapes.check_transformers(config, widths, range(config.num_layers))
    start = time.monotonic()
    checkpoint = common.open_checkpoint(resolved)
    checkpoint.check_no_classifier()
    contents = checkpoint.contents()
    provenance.stages(contents.read_files())  # a damaged list is rejected before scores are made
    windows = _windows(checkpoint)
    record = {
        "parent": provenance.weights_digest(checkpoint),
        "data": hashlib.sha256(windows.tobytes()).hexdigest(),
        "samples": list(windows.shape),
        "method": dataclasses.asdict(method),
        "contiguous": _CONTIGUOUS.value,
    }
    parts = Parts(output.with_name(output.name + _PARTS), record)
    importance = Importance(Reader(contents, config), method, parts)
    with common.bars() as progress:
        importance.run(windows, progress)
    candidates: list[Candidate] = []
    if budget is not None:
        candidates = _candidates(checkpoint, importance, budget, widths, windows, parts)
        widths, layers = candidates[0].widths, candidates[0].layers
    else:
        count = widths.get("layers", config.num_layers)
        layers = selection.layers(importance, count, _CONTIGUOUS.value)
    if not _NATIVE.value:
        shapes.check_transformers(config, widths, layers)
    stays = selection.select(importance, widths, layers)
    refitted: Refitted = {}
    if _REFIT.value:
        with common.bars() as progress:
            refitted = refit.run(Reader(contents, config), stays, windows, parts, progress)
    record["refit"] = _REFIT.value
    pruned = export.checkpoint(checkpoint, widths, stays, record, refitted)
    stored = load.stored_dtype(pruned.config, pruned.contents().source, pruned.contents().name_map)
    with common.bars() as progress:
        convert.convert(
            pruned, output, "orbax" if _NATIVE.value else "hf",
            "bfloat16" if stored == "bfloat16" else "float32", progress=progress,
        )  # fmt: skip
    parts.remove()
    published = new_directory.published(output)
    before, after = map(shapes.num_parameters, (config, pruned.config))
    result: dict[str, Any] = {
        "output": published,
        "widths": dict(widths),
        "layers": list(layers),
        "parameters_before": before,
        "parameters": after,
        "seconds": time.monotonic() - start,
        "candidates": [dataclasses.asdict(candidate) for candidate in candidates],
    }
    if common.JSON.value:
        common.print_json(result, Config(pruned.config))
        return
    for line in _table(candidates):
        print(line)
    print(
        f"{published}: {before / 1e6:.1f} -> {after / 1e6:.1f} M parameters without embeddings "
        f"({after / before:.1%}) by {_named(widths)} in {result['seconds']:.1f} s"
    )


def _widths() -> dict[str, int]:
    widths: dict[str, int] = {}
    for text in _WIDTHS.value:
        name, _, number = text.partition("=")
        if not number.strip().isdecimal() or len(number) > 9:
            raise InputError(f"--widths={text}: must be an axis and a number, such as layers=24")
        if (name := name.strip()) in widths:
            raise InputError(f"--widths={text}: {name} is given twice; give it once")
        widths[name] = int(number)
    return widths


def _check_budget(widths: Mapping[str, int]) -> None:
    budget_flags.check()
    if not (widths or budget_flags.is_present()):
        raise InputError(
            "--widths, --target_params or --target_latency_ms says how small: give one"
        )
    if seed_flag.SEED.present and not _RANDOM.value:
        raise InputError("--seed goes with --random: nothing else is drawn")


def _budget(config: "ModelConfig") -> "Budget | None":
    if not budget_flags.is_present():
        return None
    from inference.planner.calibration import lookup

    chip = chip_flag.HARDWARE.value if chip_flag.HARDWARE.present else "cpu"
    budget = budget_flags.read(lookup.get(chip, config))
    budget.check(config)
    return budget


def _method() -> "Method":
    from inference.prune.importance import Method
    from inference.prune.watch import AGGREGATES, Aggregate

    names = _AGGREGATE.value.split(",")
    if len(names) != 2 or not set(names) <= set(AGGREGATES):
        raise InputError(
            f"--aggregate={_AGGREGATE.value}: must be two of {' and '.join(AGGREGATES)}, such as "
            "l2,mean"
        )
    seed = (seed_flag.SEED.value or 0) if _RANDOM.value else None
    return Method(Aggregate(*names), _DEPTH.value, _EXPERTS_BY.value == "visits", seed)


def _windows(checkpoint: "Checkpoint") -> Any:
    count = samples_flag.SAMPLES.value if samples_flag.SAMPLES.present else _SAMPLES
    size = min(_SAMPLE_TOKENS.value, checkpoint.config.max_context)
    if count < 1 or size < 2:
        raise InputError(
            f"--samples={count} --sample_tokens={size}: must be at least 1 sample of 2 tokens"
        )
    return prune_samples.windows(checkpoint, _TEXT.value, count, size)


def _candidates(
    checkpoint: "Checkpoint",
    importance: "Importance",
    budget: "Budget",
    widths: Mapping[str, int],
    windows: Any,
    parts: Any,
) -> "list[Candidate]":
    from inference.prune import search, shapes

    config = checkpoint.config

    def can_be(candidate: Mapping[str, int], layers: tuple[int, ...]) -> bool:
        return _NATIVE.value or shapes.refusal(config, candidate, layers) is None

    matches = search.candidates(importance, config, budget, widths, _CONTIGUOUS.value, can_be)
    with common.bars() as progress:
        return search.evaluated(checkpoint, importance, matches, windows, parts, progress)


def _named(widths: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={size}" for name, size in widths.items())


def _table(candidates: "Sequence[Candidate]") -> list[str]:
    """Shapes by their losses; a star marks those that no other shape beats in loss and speed."""
    if not candidates:
        return []
    lines = [f"  {'loss, nats':>10}  {'step, ms':>9}  {'M params':>8}  shape"]
    for candidate in candidates:
        star = "*" if candidate.is_best else " "
        lines.append(
            f"{star} {candidate.loss:10.4f}  {1e3 * candidate.step_s:9.3f}  "
            f"{candidate.parameters / 1e6:8.1f}  {_named(candidate.widths)}"
        )
    return lines


if __name__ == "__main__":
    common.run(main, UNREAD)
