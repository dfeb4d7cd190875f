"""What experts and latent attention cost a step on this machine's CPU, beside the planner's word.

    python -m scripts.reports.mixtures

writes docs/mixtures.md, or --output. Random weights; steps that only decode, all requests together.
The planner's constants come from steps of the first model (`inference/benchmark/first_start.py`);
the other models calibrate nothing. With --mixture=DIR and --dense=DIR, trained by the two commands
that the page names, it compares these. A picture beside the page shows steps and visits.
"""

import datetime
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from absl import app, flags

from configs.engine import Config, EngineConfig
from configs.hardware.spec import HardwareSpec
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward, Mixer
from configs.kinds.latent import Latent
from configs.model import LayerSpec, ModelConfig
from inference.benchmark import first_start, steps
from inference.benchmark.steps import DecodeStep
from inference.engine import Engine
from inference.files import local_machine
from inference.planner import cost, weights
from inference.planner.cost import Precision
from layers import decoder, params
from scripts.reports.plots import figures

_OUTPUT = flags.DEFINE_string("output", "docs/mixtures.md", "the page")
_MIXTURE = flags.DEFINE_string("mixture", None, "the small mixture, trained")
_DENSE = flags.DEFINE_string("dense", None, "the dense model of its active size, trained")

_EXPERTS, _ROWS, _CONTEXT = (8, 16, 32, 64), (1, 8, 32), 128
_LAYERS = 12  # 0.6 GB of eight experts a layer, beyond caches
_LONG, _BATCH, _REPEATS = 4096, 8, 5
_HELD_OUT, _WINDOW = 64, 256  # windows of the help topics, and their tokens
_COMMANDS = (
    "python -m scripts.train --task=mixture --output=mixture",
    "python -m scripts.train --task=lm --output=dense --set model.width=128 \\",
    "    --set model.num_layers=4 --set model.pattern.mixer.num_heads=2 \\",
    "    --set model.pattern.mixer.num_kv_heads=1 --set model.pattern.ffn.width=256 \\",
    "    --set training.steps=1300 --set training.batch=8 --set training.warmup_steps=100",
)
_COLORS = ("#332288", "#88CCEE", "#44AA99", "#DDCC77")  # of Paul Tol's muted scheme


def _model(name: str, mixer: Mixer, ffn: FeedForward, num_layers: int) -> ModelConfig:
    return ModelConfig(
        name, "mixtral", 8192, 1024, num_layers, 8192, (LayerSpec(mixer, ffn),), dtype="bfloat16"
    )


def _mixture(num_experts: int) -> ModelConfig:
    ffn = Experts(num_experts, top_k=2, width=1024)
    return _model(f"{num_experts} experts", Attention(16, 8, 64), ffn, _LAYERS)


def _measured(
    model: ModelConfig, values: Any, rows: int, context: int, hardware: HardwareSpec
) -> DecodeStep:
    config = steps.sizes(Config(model, EngineConfig()), rows, context)
    return steps.decode(Engine(config, values), context, hardware, _REPEATS)


def _table(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = [columns, ("---",) * len(columns), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _of_experts(hardware: HardwareSpec) -> dict[tuple[int, int], DecodeStep]:
    """Steps by (experts, requests)."""
    found = {}
    for num_experts in _EXPERTS:
        model = _mixture(num_experts)
        values = params.init(decoder.param_infos(model), seed=1)
        for count in _ROWS:
            step = _measured(model, values, count, _CONTEXT, hardware)
            found[num_experts, count] = step
            print(num_experts, count, step, flush=True)
    return found


def _experts_table(found: dict[tuple[int, int], DecodeStep]) -> list[str]:
    rows = [
        (
            str(num_experts), str(count),
            f"{num_experts * (1 - (1 - 2 / num_experts) ** count):.1f}",
            f"{step.predicted_s * 1e3:.2f}", f"{step.measured_s * 1e3:.2f}", f"{step.ratio:.2f}",
            f"{step.measured_s / found[_EXPERTS[0], count].measured_s:.2f}",
        )
        for (num_experts, count), step in found.items()
    ]  # fmt: skip
    columns = (
        "experts", "requests", "visited, expected", "predicted, ms", "measured, ms",
        "predicted / measured", f"beside {_EXPERTS[0]} experts",
    )  # fmt: skip
    return _table(columns, rows)


def _of_latents(hardware: HardwareSpec) -> list[str]:
    """Latent attention beside grouped queries of the same heads, at a long context."""
    latent = Latent(16, rank=512, rope_width=64, nope_width=128, value_width=128)
    kinds = {"GQA, 8 KV heads of 128": Attention(16, 8, 128), "MLA, 512 + 64": latent}
    rows, found = [], {}
    for name, mixer in kinds.items():
        model = _model(name, mixer, Gated(2048), num_layers=4)
        values = params.init(decoder.param_infos(model), seed=1)
        step = _measured(model, values, _BATCH, _LONG, hardware)
        found[name] = step
        token = cost.cache_bytes_per_token(model, Precision.of(model)) / model.num_layers
        rows.append((
            name, f"{token:,.0f}", f"{step.predicted_s * 1e3:.1f}", f"{step.measured_s * 1e3:.1f}",
            f"{step.ratio:.2f}",
        ))  # fmt: skip
        print(rows[-1], flush=True)
    gqa, mla = found.values()
    rows.append((
        "MLA / GQA", "", f"{mla.predicted_s / gqa.predicted_s:.2f}",
        f"{mla.measured_s / gqa.measured_s:.2f}", "",
    ))  # fmt: skip
    columns = (
        "attention", "bytes a token and layer", "predicted, ms", "measured, ms",
        "predicted / measured",
    )  # fmt: skip
    return _table(columns, rows)


def _trained(path: str) -> tuple[float, np.ndarray | None, int, int]:
    """(nats a token of the held-out text, visits [L, E], parameters, those that a token meets)."""
    engine = Engine.from_model(path, max_seqs=8, max_context=_WINDOW)
    assert engine.tokenizer is not None, "the trainer writes one"
    tokens = engine.tokenizer.encode("\n".join(topics[key] for key in sorted(topics)))
    windows = [tokens[n * _WINDOW : (n + 1) * _WINDOW] for n in range(_HELD_OUT)]
    logprobs = [each for score in engine.score(windows) for each in score.logprobs]
    model = engine.config.model
    visits = engine.model_runner.expert_visits() if model.mixtures else None
    numbers = weights.num_parameters(model), weights.num_active_parameters(model)
    return -float(np.mean(logprobs)), visits, *numbers


def _of_trained(mixture: str, dense: str) -> tuple[list[str], np.ndarray]:
    """How both models do, and the shares [L, E] of the mixture's visits."""
    rows, found = [], {}
    for name, path in (("mixture, 2 of 8 experts", mixture), ("dense", dense)):
        loss, visits, number, active = _trained(path)
        found[name] = visits
        rows.append((name, f"{number / 1e6:.2f} M", f"{active / 1e6:.2f} M", f"{loss:.3f}"))
    visits_LE = next(iter(found.values()))
    assert visits_LE is not None, "the first one is a mixture"
    share_LE = visits_LE / visits_LE.sum(1, keepdims=True)
    columns = ("model", "parameters", "active", "held-out text, nats a token")
    return _table(columns, rows), share_LE


def _picture(found: dict[tuple[int, int], DecodeStep], share_LE: np.ndarray | None) -> bytes:
    def draw(left: Any, right: Any) -> None:
        for count, color in zip(_ROWS, _COLORS, strict=False):
            each = [found[num_experts, count] for num_experts in _EXPERTS]
            left.plot(_EXPERTS, [step.measured_s * 1e3 for step in each], "o", color=color)
            left.plot(
                _EXPERTS, [step.predicted_s * 1e3 for step in each], color=color,
                label=f"{count} request{'s' * (count > 1)}",
            )  # fmt: skip
        left.set(xscale="log", xticks=_EXPERTS, xticklabels=map(str, _EXPERTS), ylim=(0, None))
        left.set(xlabel="experts", ylabel="step, ms (line: predicted, dots: measured)")
        left.minorticks_off()
        left.legend()
        if share_LE is None:
            right.set_axis_off()
            return
        for layer, (shares, color) in enumerate(zip(share_LE, _COLORS, strict=True)):
            places = np.arange(len(shares)) + (layer - 1.5) / 5
            right.bar(places, shares * 100, 0.2, color=color, label=f"layer {layer}")
        right.axhline(100 / share_LE.shape[1], color="gray", linewidth=0.7)
        right.set(xlabel="expert of the small mixture", ylabel="share of its layer's visits, %")
        right.legend()

    return figures.png("A step by experts, and who visits whom", draw)


def main(argv: list[str]) -> None:
    """Writes the page."""
    if len(argv) > 1:
        sys.exit(f"what is {argv[1]!r}? Everything is a flag")
    if importlib.util.find_spec("matplotlib") is None:
        sys.exit("the page has a picture: pip install '.[plots]'")
    hardware = first_start.of_model(_mixture(_EXPERTS[0]))
    machine = local_machine.name()
    found = _of_experts(hardware)
    page = Path(_OUTPUT.value)
    picture = page.with_suffix(".png")
    lines = [
        "# Experts and latent attention, measured",
        "",
        "    python -m scripts.reports.mixtures --mixture=mixture --dense=dense",
        "",
        f"Written by that command, {datetime.date.today()}, on {machine}. A step in which all",
        "requests decode: width 1,024, bfloat16, random weights, medians of "
        f"{_REPEATS} runs of {steps.IN_A_ROW} steps.",
        "",
        f"![Steps by experts, and shares of visits]({picture.name})",
        "",
        "## Experts",
        "",
        f"{_LAYERS} layers; a token visits two experts of width 1,024. A step reads the weights of",
        "those that its tokens are routed to (on this CPU), so one request is as fast with 64",
        "experts as with 8.",
        "",
        *_experts_table(found),
        "",
        "## Latent attention",
        "",
        f"4 layers, {_BATCH} requests of {_LONG:,} tokens, 16 heads; MLA is absorbed, so all heads",
        "read one latent vector and one rotary key a token.",
        "",
        *_of_latents(hardware),
    ]
    share_LE = None
    if _MIXTURE.value and _DENSE.value:
        table, share_LE = _of_trained(_MIXTURE.value, _DENSE.value)
        lines += [
            "",
            "## A mixture and a dense model of its active size",
            "",
            "Trained on the same tokens of the standard library's code, each once:",
            "",
            *(f"    {line}" for line in _COMMANDS),
            "",
            f"Scored are {_HELD_OUT} windows of {_WINDOW} tokens of Python's help topics; the",
            "picture shows whom they visit in the mixture.",
            "",
            *table,
        ]
    picture.write_bytes(_picture(found, share_LE))
    page.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    app.run(main)
