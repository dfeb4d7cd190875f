"""What experts and latent attention cost a step on this machine's CPU, beside the planner's word.

    PYTHONPATH=. python docs/make_mixtures.py

writes docs/mixtures.md, or --output. Random weights; steps that only decode, all requests together.
The planner's constants come from steps of the first model (`inference/benchmark/first_start.py`);
the other models calibrate nothing. Of the small mixture that `python -m scripts.train
--task=mixture` has made, or --trained=DIR, it counts who visits whom.
"""

import datetime
import sys
from pathlib import Path

from absl import app, flags

from configs.engine import Config, EngineConfig
from configs.hardware.spec import HardwareSpec
from configs.kinds.attention import Attention
from configs.kinds.experts import Experts
from configs.kinds.feed_forward import Gated
from configs.kinds.kind import FeedForward, Mixer
from configs.kinds.latent import Latent
from configs.model import LayerSpec, ModelConfig
from configs.recipes import small
from inference.benchmark import first_start, steps
from inference.benchmark.steps import DecodeStep
from inference.engine import Engine
from inference.files import cache_directory
from inference.planner import cost
from inference.planner.calibration import store
from inference.planner.cost import Precision
from inference.request import SamplingParams
from layers import decoder, params

_OUTPUT = flags.DEFINE_string("output", "docs/mixtures.md", "the page")
_TRAINED = flags.DEFINE_string("trained", None, "the small mixture, if it lies elsewhere")

_EXPERTS, _ROWS, _CONTEXT = (8, 16, 32, 64), (1, 8, 32), 128
_LONG, _BATCH, _REPEATS = 4096, 8, 5
_TEXTS = ("def main(argv):", "class Reader:", "import os", "for line in lines:", "# The", "return")


def _model(name: str, mixer: Mixer, ffn: FeedForward, num_layers: int = 4) -> ModelConfig:
    return ModelConfig(
        name, "mixtral", 8192, 1024, num_layers, 8192, (LayerSpec(mixer, ffn),), dtype="bfloat16"
    )


def _engine(model: ModelConfig, rows: int, context: int) -> Engine:
    config = steps.sizes(Config(model, EngineConfig()), rows, context)
    return Engine(config, params.init(decoder.param_infos(model), seed=1))


def _measured(model: ModelConfig, rows: int, context: int, hardware: HardwareSpec) -> DecodeStep:
    return steps.decode(_engine(model, rows, context), context, hardware, _REPEATS)


def _calibrated(model: ModelConfig) -> HardwareSpec:
    engine = Engine(
        Config(model, EngineConfig(max_seqs=32, max_context=1024)),
        params.init(decoder.param_infos(model), seed=1),
    )
    engine.warm_up()
    found = first_start.calibration(engine, anew=True)
    assert found is not None, "the model is large enough to be timed"
    return found


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = [columns, ("---",) * len(columns), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _of_experts(hardware: HardwareSpec) -> list[str]:
    """Steps by experts and requests."""
    rows, first = [], {}
    for num_experts in _EXPERTS:
        model = _model(
            f"{num_experts} experts", Attention(16, 8, 64), Experts(num_experts, 2, 1024)
        )
        for count in _ROWS:
            found = _measured(model, count, _CONTEXT, hardware)
            expected = num_experts * (1 - (1 - 2 / num_experts) ** count)
            first.setdefault(count, found.measured_s)
            rows.append((
                str(num_experts), str(count), f"{expected:.1f}", f"{found.predicted_s * 1e3:.2f}",
                f"{found.measured_s * 1e3:.2f}", f"{found.ratio:.2f}",
                f"{found.measured_s / first[count]:.2f}",
            ))  # fmt: skip
            print(rows[-1], flush=True)
    columns = (
        "experts", "requests", "visited, expected", "predicted, ms", "measured, ms",
        "predicted / measured", "beside 8 experts",
    )  # fmt: skip
    return _table(columns, rows)


def _of_latents(hardware: HardwareSpec) -> list[str]:
    """Latent attention beside grouped queries of the same heads, at a long context."""
    latent = Latent(16, rank=512, rope_width=64, nope_width=128, value_width=128)
    kinds = {"GQA, 8 KV heads of 128": Attention(16, 8, 128), "MLA, 512 + 64": latent}
    rows, found = [], {}
    for name, mixer in kinds.items():
        model = _model(name, mixer, Gated(2048))
        step = _measured(model, _BATCH, _LONG, hardware)
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


def _of_trained(path: Path) -> list[str]:
    """How often each expert of the small mixture is visited, of what it writes itself."""
    engine = Engine.from_model(str(path), max_seqs=8, max_context=256)
    engine.generate(list(_TEXTS), SamplingParams(max_new_tokens=128, temperature=0.8, seed=1))
    visits_LE = engine.model_runner.expert_visits()
    share_LE = visits_LE / visits_LE.sum(1, keepdims=True)
    rows = [
        (str(layer), *(f"{share:.1%}" for share in shares)) for layer, shares in enumerate(share_LE)
    ]
    return _table(("layer", *map(str, range(visits_LE.shape[1]))), rows)


def main(argv: list[str]) -> None:
    """Writes the page."""
    if len(argv) > 1:
        sys.exit(f"what is {argv[1]!r}? Everything is a flag")
    first = _model("8 experts", Attention(16, 8, 64), Experts(8, 2, 1024))
    hardware = _calibrated(first)
    machine = f"{store.num_cores()} cores of {store.processor()}"
    page = [
        "# Experts and latent attention, measured",
        "",
        "    PYTHONPATH=. python docs/make_mixtures.py",
        "",
        f"Written by that command, {datetime.date.today()}, on {machine}. A step in which all",
        "requests decode: 4 layers of width 1,024, bfloat16, random weights, medians of "
        f"{_REPEATS} runs of {steps.IN_A_ROW} steps.",
        "",
        "## Experts",
        "",
        "A token visits two experts of width 1,024. A step reads the weights of those that any of",
        "its tokens visits, so one request is as fast with 64 experts as with 8.",
        "",
        *_of_experts(hardware),
        "",
        "## Latent attention",
        "",
        f"{_BATCH} requests of {_LONG:,} tokens, 16 heads; MLA is absorbed, so all heads read one",
        "latent vector and one rotary key a token.",
        "",
        *_of_latents(hardware),
    ]
    trained = Path(_TRAINED.value or cache_directory.trained(small.RECIPES["mixture"].model.name))
    if trained.is_dir():
        page += [
            "",
            "## Who visits whom",
            "",
            "Shares of the visits of the small mixture (`python -m scripts.train --task=mixture`),",
            "in what it writes itself; an even share is 12.5 %.",
            "",
            *_of_trained(trained),
        ]
    Path(_OUTPUT.value).write_text("\n".join(page) + "\n")


if __name__ == "__main__":
    app.run(main)
