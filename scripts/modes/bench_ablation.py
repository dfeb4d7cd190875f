"""`bench --ablation`: one technique after another, predicted and measured."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from configs.engine import Config
from configs.model import ModelConfig
from configs.workload import LogNormal
from inference.benchmark import ablation, measure, requests
from inference.benchmark.ablation import Ablation
from inference.benchmark.drive import GREEDY, Run
from inference.benchmark.requests import TimedRequest
from inference.planner import report
from inference.planner.calibration import lookup
from inference.scheduling.sequence import Sequence as Decoded
from scripts import common
from scripts.flags import file_flags, shared_flags, workload_flags
from scripts.reports import bench_text
from scripts.reports.plots import bench_plot

if TYPE_CHECKING:
    from inference.checkpoints.checkpoint import Checkpoint

_DEFAULTS: dict[str, Any] = dict(
    num_requests=64, prompt=LogNormal(150, 1.0), output=LogNormal(80, 1.0), prefix_tokens=200,
    prefix_share=0.5,
)  # fmt: skip
_OVERLOAD = 2  # arrivals, in capacities of 'continuous'
_NUM_NAIVE = 4  # requests that run without a cache; their time is scaled by tokens
_PAGE_SIZES = (16, 64, 128)


def run(repeats: int, only: flags.FlagHolder[list[str] | None], plot: str | None) -> None:
    kind = "closed" if shared_flags.RATE.value is None else "poisson"
    workload = workload_flags.read(kind=kind, **_DEFAULTS)
    resolved, config = common.resolve_config({})
    common.check_one_chip(config, "--ablation")
    model = config.model
    load = requests.generate(workload, model.vocab_size, model.max_context)
    rungs = {rung.name: rung for rung in ablation.ablations(model, config.engine, load)}
    chosen = [rungs[name] for name in shared_flags.chosen(only, rungs)]
    checkpoint = common.open_checkpoint(resolved)
    bench = _Bench(checkpoint, model, repeats)
    if workload.rate is None:
        (runs,) = bench.serve([rungs["continuous"].config(model)], load, "capacity")
        rate = _OVERLOAD * measure.figures(runs)["requests_s"]
        workload = dataclasses.replace(workload, kind="poisson", rate=rate)
        load = requests.generate(workload, model.vocab_size, model.max_context)
    rows = _run(bench, chosen, load)
    last = rungs["overlap"]
    waste = [_waste(bench, last, load, size) for size in _PAGE_SIZES if last in chosen]
    result = {
        "ladder": rows,
        "waste": waste,
        "workload": dataclasses.asdict(workload),
        "cache_bytes": last.config(model).engine.cache.cache_bytes,
        "compiles": bench.num_compiles,
        "predicted_by": report.predicted_by(bench.machine),
    }
    if common.JSON.value:
        common.print_json(result, last.config(model))
    else:
        bench_text.show_waste(waste)
        bench_text.show_ablation_notes(result)
    if plot is not None:
        file_flags.write(plot, bench_plot.ablation(rows, model.name))


class _Bench:
    def __init__(self, checkpoint: "Checkpoint", model: ModelConfig, repeats: int):
        from inference.runtime import compilation_cache
        from layers import decoder

        compilation_cache.enable()
        with common.bars() as progress:
            self.params = checkpoint.load_params(decoder.param_infos(model), progress)
        self.model = model
        self.machine = lookup.this_machine(model.dtype, model=model)
        self.num_compiles = 0  # while requests were served
        self._repeats = repeats
        self._count = measure.count_compiles()

    def serve(
        self, configs: Sequence[Config], load: Sequence[TimedRequest], label: str
    ) -> list[list[Run]]:
        """The runs of each configuration on a new engine, which is warm; several run by turns."""
        from inference.engine import Engine

        engines = [Engine(config, self.params) for config in configs]
        for engine in engines:
            common.warm_up(engine, f"{label}: compiling steps")
        runs: list[list[Run]] = [[] for _ in engines]
        before = self._count()
        with common.bars() as progress:
            for _ in range(self._repeats):
                for engine, engine_runs in zip(engines, runs, strict=True):
                    engine_runs += measure.measure(
                        engine, load, repeats=1,
                        on_progress=lambda done: progress(done, len(load), f"{label}: serving"),
                    )  # fmt: skip
        self.num_compiles += self._count() - before
        return runs


def _run(
    bench: _Bench, chosen: Sequence[Ablation], load: Sequence[TimedRequest]
) -> list[dict[str, object]]:
    """A row an ablation; printed as they come, beside JSON on stderr."""
    tokens: list[list[int]] = []  # of every request, as the ablation before gave them
    host_s = 0.0

    def predict(rung: Ablation) -> dict[str, float]:
        if rung.engine is None:
            return _predict_naive(bench, load)
        run = measure.predict(rung.config(bench.model), load, bench.machine, host_s)
        return measure.figures([run])

    def serve(turns: Sequence[Ablation]) -> list[dict[str, float]]:
        nonlocal host_s, tokens
        *_, newest = turns
        if newest.engine is None:
            return [_run_naive(bench, load)]
        figures = []
        configs = [rung.config(bench.model) for rung in turns]
        for runs in bench.serve(configs, load, newest.name):
            figures.append(measure.figures(runs))
            earlier, tokens = tokens, [request.token_ids for request in runs[-1].requests]
            if earlier:
                pairs = zip(earlier, tokens, strict=True)
                figures[-1]["equal_tokens"] = sum(a == b for a, b in pairs) / len(load)
        host_s = figures[-1]["host_step_s"]  # what the next one is expected to take
        return figures

    rows, table = [], sys.stderr if common.JSON.value else sys.stdout
    print(bench_text.ABLATION_HEAD, file=table, flush=True)
    for result in ablation.run(chosen, predict, serve):
        rows.append(result.as_json())
        print(bench_text.ablation_row(rows[-1]), file=table, flush=True)
    return rows


def _predict_naive(bench: _Bench, load: Sequence[TimedRequest]) -> dict[str, float]:
    from inference.runtime import naive

    seconds = sum(
        report.naive_seconds(
            bench.model, bench.machine, len(request.prompt), request.num_new_tokens, naive.BLOCK
        )
        for request in load[:_NUM_NAIVE]
    )
    return _scaled(load, seconds)


def _run_naive(bench: _Bench, load: Sequence[TimedRequest]) -> dict[str, float]:
    from inference.runtime import naive

    seconds = 0.0
    with common.bars() as progress:
        for number, request in enumerate(load[:_NUM_NAIVE]):
            progress(number, _NUM_NAIVE, "naive: serving")
            params = dataclasses.replace(GREEDY, max_new_tokens=request.num_new_tokens)
            sequence = Decoded(number, params, list(request.prompt), len(request.prompt))
            seconds += sum(naive.decode(bench.params, bench.model, sequence))
    return _scaled(load, seconds)


def _scaled(load: Sequence[TimedRequest], seconds: float) -> dict[str, float]:
    """Figures of the whole load, from the seconds of its first requests."""
    some = sum(request.num_new_tokens for request in load[:_NUM_NAIVE])
    every = sum(request.num_new_tokens for request in load)
    return {
        "output_tok_s": some / seconds,
        "seconds": seconds * every / some,
        "scaled_from_requests": min(_NUM_NAIVE, len(load)),
    }


def _waste(
    bench: _Bench, last: Ablation, load: Sequence[TimedRequest], page_tokens: int
) -> dict[str, float]:
    """Room without a token in the last ablation, for a size of page."""
    assert last.engine is not None
    config = Config(bench.model, last.engine.replace(page_tokens=page_tokens))
    expected = measure.predict(config, load, bench.machine)
    (runs,) = bench.serve([config], load, f"pages of {page_tokens}")
    return {
        "page_tokens": page_tokens,
        "kv_waste": measure.figures(runs)["kv_waste"],
        "predicted_kv_waste": measure.figures([expected])["kv_waste"],
        "half_page": ablation.half_page_waste(load, page_tokens),
    }
