"""What experts and latent attention cost a step on this machine's CPU, measured and predicted.

    python -m scripts.reports.mixtures

measures, and writes the tables of docs/mixtures.md and its picture, or --output. Random weights;
steps that only decode, all requests together. The planner's constants come from steps of the first
model (`inference/benchmark/first_start.py`); the other models calibrate nothing. With --mixture=DIR
and --dense=DIR, trained by the two commands that the page names, it compares these.
"""

import argparse
import datetime
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from configs.engine import Config, EngineConfig
from configs.hardware.spec import HardwareSpec
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward, Mixer
from configs.kinds.latent import Latent
from configs.model import LayerSpec, ModelConfig
from inference.benchmark import steps
from inference.benchmark.steps import DecodeStep
from inference.engine import Engine
from inference.files import local_machine
from inference.planner import cost, weights
from layers import decoder, params
from scripts.reports import machine
from scripts.reports.pages.markdown import fill, table
from scripts.reports.pages.results import COLORS, require_matplotlib
from scripts.reports.plots import figures
from scripts.reports.plots.figures import Axes

_EXPERTS, _REQUESTS, _CONTEXT = (8, 16, 32, 64), (1, 8, 32), 128
_LAYERS = 12  # 0.6 GB of eight experts a layer, beyond caches
_LONG, _BATCH, _REPEATS = 4096, 8, 5
_HELD_OUT, _WINDOW = 64, 256  # windows of the help topics, and their tokens
PAGE = Path("docs/mixtures.md")

Steps = dict[tuple[int, int], DecodeStep]  # by experts and requests


def main() -> None:
    """Measures, and writes the blocks of the page and its picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=PAGE, help="the page")
    parser.add_argument("--mixture", help="the small mixture, trained")
    parser.add_argument("--dense", help="the dense model of its active size, trained")
    paths = parser.parse_args()
    require_matplotlib()
    hardware = machine.calibrated(_mixture(_EXPERTS[0]))
    measured = f"Measured {datetime.date.today()}, {local_machine.name()}."
    expert_steps, share_LE = _expert_steps(hardware), None
    blocks = {
        "experts": [measured, *_experts_table(expert_steps)],
        "latent attention": [measured, *_latents_table(hardware)],
    }
    if paths.mixture and paths.dense:
        trained_table, share_LE = _compare_trained(paths.mixture, paths.dense)
        blocks["trained"] = [measured, *trained_table]
    paths.output.with_suffix(".png").write_bytes(_picture(expert_steps, share_LE))
    paths.output.write_text(fill(PAGE.read_text("utf-8"), blocks), "utf-8")


def _model(name: str, mixer: Mixer, ffn: FeedForward, num_layers: int) -> ModelConfig:
    return ModelConfig(
        name, "mixtral", 8192, 1024, num_layers, 8192, (LayerSpec(mixer, ffn),), dtype="bfloat16"
    )


def _mixture(num_experts: int) -> ModelConfig:
    ffn = Experts(num_experts, top_k=2, width=1024)
    return _model(f"{num_experts} experts", Attention(16, 8, 64), ffn, _LAYERS)


def _measure(
    model: ModelConfig, values: params.Params, rows: int, context: int, hardware: HardwareSpec
) -> DecodeStep:
    config = steps.sizes(Config(model, EngineConfig()), rows, context)
    step = steps.decode(Engine(config, values), context, hardware, _REPEATS)
    print(model.name, rows, step, flush=True)
    return step


def _expert_steps(hardware: HardwareSpec) -> Steps:
    expert_steps = {}
    for num_experts in _EXPERTS:
        model = _mixture(num_experts)
        values = params.init(decoder.param_infos(model), seed=1)
        for count in _REQUESTS:
            step = _measure(model, values, count, _CONTEXT, hardware)
            expert_steps[num_experts, count] = step
    return expert_steps


def _experts_table(expert_steps: Steps) -> list[str]:
    rows = [
        (
            f"{num_experts}", f"{count}",
            f"{num_experts * (1 - (1 - 2 / num_experts) ** count):.1f}",
            f"{step.predicted_s * 1e3:.2f}", f"{step.measured_s * 1e3:.2f}", f"{step.ratio:.2f}",
            f"{step.measured_s / expert_steps[_EXPERTS[0], count].measured_s:.2f}",
        )
        for (num_experts, count), step in expert_steps.items()
    ]  # fmt: skip
    columns = (
        "experts", "requests", "visited, expected", "predicted, ms", "measured, ms",
        "predicted / measured", f"beside {_EXPERTS[0]} experts",
    )  # fmt: skip
    return table(columns, rows)


def _latents_table(hardware: HardwareSpec) -> list[str]:
    """Times latent attention and grouped queries of the same heads at a long context."""
    latent = Latent(16, rank=512, rope_width=64, nope_width=128, value_width=128)
    kinds = {"GQA, 8 KV heads of 128": Attention(16, 8, 128), "MLA, 512 + 64": latent}
    rows: list[tuple[str, ...]] = []
    timed: list[DecodeStep] = []
    for name, mixer in kinds.items():
        model = _model(name, mixer, Gated(2048), num_layers=4)
        values = params.init(decoder.param_infos(model), seed=1)
        step = _measure(model, values, _BATCH, _LONG, hardware)
        timed.append(step)
        token = cost.cache_bytes_per_token(model) / model.num_layers
        times = f"{step.predicted_s * 1e3:.1f}", f"{step.measured_s * 1e3:.1f}"
        rows.append((name, f"{token:,.0f}", *times, f"{step.ratio:.2f}"))
    gqa, mla = timed
    ratios = mla.predicted_s / gqa.predicted_s, mla.measured_s / gqa.measured_s
    rows.append(("MLA / GQA", "", *(f"{ratio:.2f}" for ratio in ratios), ""))
    columns = (
        "attention", "bytes a token and layer", "predicted, ms", "measured, ms",
        "predicted / measured",
    )  # fmt: skip
    return table(columns, rows)


def _compare_trained(mixture: str, dense: str) -> tuple[list[str], np.ndarray]:
    """Returns a table of both models, and the shares [L, E] of the mixture's visits."""
    mixture_row, visits_LE = _score("mixture, 2 of 8 experts", mixture)
    dense_row, _ = _score("dense", dense)
    assert visits_LE is not None, "the first one is a mixture"
    columns = ("model", "parameters", "active", "held-out text, nats a token")
    share_LE = visits_LE / visits_LE.sum(1, keepdims=True)
    return table(columns, [mixture_row, dense_row]), share_LE


def _score(name: str, path: str) -> tuple[tuple[str, ...], np.ndarray | None]:
    """Returns a model's row: parameters, and nats a token of the held-out text; and visits [L, E]
    of a mixture's experts.
    """
    engine = Engine.from_model(path, max_seqs=8, max_context=_WINDOW)
    assert engine.tokenizer is not None, "the trainer writes one"
    tokens = engine.tokenizer.encode("\n".join(topics[key] for key in sorted(topics)))
    windows = [tokens[n * _WINDOW : (n + 1) * _WINDOW] for n in range(_HELD_OUT)]
    logprobs = [logprob for score in engine.score(windows) for logprob in score.logprobs]
    model = engine.config.model
    visits_LE = engine.model_runner.expert_visits() if model.mixtures else None
    counts = weights.num_parameters(model), weights.num_active_parameters(model)
    sizes = (f"{count / 1e6:.2f} M" for count in counts)
    return (name, *sizes, f"{-float(np.mean(logprobs)):.3f}"), visits_LE


def _picture(expert_steps: Steps, share_LE: np.ndarray | None) -> bytes:
    def draw(times: Axes, shares: Axes) -> None:
        for count, color in zip(_REQUESTS, COLORS, strict=False):
            timed = [expert_steps[num_experts, count] for num_experts in _EXPERTS]
            times.plot(_EXPERTS, [step.measured_s * 1e3 for step in timed], "o", color=color)
            predicted = [step.predicted_s * 1e3 for step in timed]
            label = f"{count} request{'s' * (count > 1)}"
            times.plot(_EXPERTS, predicted, color=color, label=label)
        times.set(xscale="log", xticks=_EXPERTS, xticklabels=map(str, _EXPERTS), ylim=(0, None))
        times.set(xlabel="experts", ylabel="step, ms (line: predicted, dots: measured)")
        times.minorticks_off()
        times.legend()
        if share_LE is None:
            shares.set_axis_off()
            return
        for layer, (share_E, color) in enumerate(zip(share_LE, COLORS, strict=True)):
            places = np.arange(len(share_E)) + (layer - 1.5) / 5
            shares.bar(places, share_E * 100, 0.2, color=color, label=f"layer {layer}")
        shares.axhline(100 / share_LE.shape[1], color="gray", linewidth=0.7)
        shares.set(xlabel="expert of the small mixture", ylabel="share of its layer's visits, %")
        shares.legend()

    return figures.png("A step by experts, and shares of experts", draw)


if __name__ == "__main__":
    main()
