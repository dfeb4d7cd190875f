"""`bench --ladder`: naive, cached, static, dynamic, continuous, paged, prefix, chunked, overlap."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from configs.errors import InputError
from configs.model import ModelConfig
from configs.workload import LogNormal
from inference.benchmark import ablation, measure, requests
from inference.benchmark.ablation import Rung
from inference.benchmark.drive import GREEDY, Run
from inference.benchmark.requests import TimedRequest
from inference.planner import report
from inference.planner.calibration import calibrate
from inference.request import Sequence as Decoded
from scripts import common
from scripts.flags import file_flags, shared_flags, workload_flags
from scripts.reports import bench_plot, bench_text

_DEFAULTS: dict[str, Any] = dict(
    num_requests=64, prompt=LogNormal(150, 1.0), output=LogNormal(80, 1.0), prefix_tokens=200,
    prefix_share=0.5,
)  # fmt: skip
_OVERLOAD = 2  # arrivals, in capacities of the 'continuous' rung
_NUM_NAIVE = 4  # requests that run without a cache; their time is scaled by tokens
_PAGE_SIZES = (16, 64, 128)


def run(repeats: int, names: Sequence[str] | None, plot: str | None) -> None:
    """Climbs the rungs of these names, or all of them."""
    kind = "closed" if shared_flags.RATE.value is None else "poisson"
    workload = workload_flags.read(kind=kind, **_DEFAULTS)
    resolved, config = common.resolve_config({})
    model = config.model
    load = requests.generate(workload, model.vocab_size)
    rungs = {rung.name: rung for rung in ablation.rungs(model, config.engine, load)}
    for name in names or ():
        if name not in rungs:
            raise InputError(f"--ladder_rungs: no rung {name!r}; valid: {', '.join(rungs)}")
    checkpoint, _ = common.open_checkpoint(resolved)
    bench = _Bench(checkpoint, model, repeats)
    if workload.rate is None:
        (runs,) = bench.serve([rungs["continuous"]], load, "capacity")
        rate = _OVERLOAD * measure.figures(runs)["requests_s"]
        workload = dataclasses.replace(workload, kind="poisson", rate=rate)
        load = requests.generate(workload, model.vocab_size)
    chosen = [rung for rung in rungs.values() if names is None or rung.name in names]
    rows = _climb(bench, chosen, load)
    top = rungs["overlap"]
    waste = [_waste(bench, top, load, size) for size in _PAGE_SIZES if top in chosen]
    result = {
        "ladder": rows,
        "waste": waste,
        "workload": dataclasses.asdict(workload),
        "cache_bytes": rungs["overlap"].config(model).engine.cache_bytes,
        "compiles": bench.num_compiles,
        "predicted_by": report.predicted_by(bench.machine),
    }
    if common.JSON.value:
        common.print_json(result, rungs["overlap"].config(model))
    else:
        bench_text.show_waste(waste)
        bench_text.show_ladder_notes(result)
    if plot is not None:
        file_flags.write(plot, bench_plot.ladder(rows, model.name))


class _Bench:
    """Engines of one model, each for its own runs."""

    def __init__(self, checkpoint: Any, model: ModelConfig, repeats: int):
        from inference.runtime import compilation_cache
        from layers import decoder

        compilation_cache.enable()
        with common.bars() as progress:
            self.params = checkpoint.load_params(decoder.param_infos(model), progress)
        self.model = model
        self.machine = calibrate.this_machine(model.dtype)
        self.num_compiles = 0  # while requests were served
        self._repeats = repeats
        self._count = measure.count_compiles()

    def serve(
        self, rungs: Sequence[Rung], load: Sequence[TimedRequest], label: str
    ) -> list[list[Run]]:
        """The runs of each rung on a new engine, which is warm; several rungs run by turns."""
        from inference.engine import Engine

        engines = [Engine(rung.config(self.model), self.params) for rung in rungs]
        for engine in engines:
            common.warm_up(engine, f"{label}: compiling steps")
        runs: list[list[Run]] = [[] for _ in engines]
        before = self._count()
        with common.bars() as progress:
            for _ in range(self._repeats):
                for engine, own in zip(engines, runs, strict=True):
                    own += measure.measure(
                        engine, load, repeats=1,
                        on_progress=lambda done: progress(done, len(load), f"{label}: serving"),
                    )  # fmt: skip
        self.num_compiles += self._count() - before
        return runs


def _climb(
    bench: _Bench, rungs: Sequence[Rung], load: Sequence[TimedRequest]
) -> list[dict[str, Any]]:
    """A row a rung; printed as they come, beside JSON on stderr."""
    tokens: list[list[int]] = []  # of every request, on the rung before
    host_s = 0.0

    def predict(rung: Rung) -> dict[str, float]:
        if rung.engine is None:
            return _predict_naive(bench, load)
        run = measure.predict(rung.config(bench.model), load, bench.machine, host_s)
        return measure.figures([run])

    def serve(rungs: Sequence[Rung]) -> list[dict[str, float]]:
        nonlocal host_s, tokens
        *_, newest = rungs
        if newest.engine is None:
            return [_run_naive(bench, load)]
        found = []
        for runs in bench.serve(rungs, load, newest.name):
            found.append(measure.figures(runs))
            earlier, tokens = tokens, [served.token_ids for served in runs[-1].served]
            if earlier:
                pairs = zip(earlier, tokens, strict=True)
                found[-1]["equal_tokens"] = sum(a == b for a, b in pairs) / len(load)
        host_s = found[-1]["host_step_s"]  # what the next rung is expected to take
        return found

    rows, table = [], sys.stderr if common.JSON.value else sys.stdout
    print(bench_text.LADDER_HEAD, file=table, flush=True)
    for climbed in ablation.climb(rungs, predict, serve):
        rows.append(climbed.as_json())
        print(bench_text.ladder_row(rows[-1]), file=table, flush=True)
    return rows


def _predict_naive(bench: _Bench, load: Sequence[TimedRequest]) -> dict[str, float]:
    from inference.runtime import naive

    seconds = sum(
        report.naive_seconds(
            bench.model, bench.machine, len(each.prompt), each.num_new_tokens, naive.BLOCK
        )
        for each in load[:_NUM_NAIVE]
    )
    return _scaled(load, seconds)


def _run_naive(bench: _Bench, load: Sequence[TimedRequest]) -> dict[str, float]:
    """The first requests one after another, compilation left out."""
    from inference.runtime import naive

    seconds = 0.0
    with common.bars() as progress:
        for number, each in enumerate(load[:_NUM_NAIVE]):
            progress(number, _NUM_NAIVE, "naive: serving")
            params = dataclasses.replace(GREEDY, max_new_tokens=each.num_new_tokens)
            sequence = Decoded(number, params, list(each.prompt), len(each.prompt))
            seconds += sum(naive.decode(bench.params, bench.model, sequence))
    return _scaled(load, seconds)


def _scaled(load: Sequence[TimedRequest], seconds: float) -> dict[str, float]:
    """Figures of the whole load, from the seconds of its first requests."""
    some = sum(each.num_new_tokens for each in load[:_NUM_NAIVE])
    every = sum(each.num_new_tokens for each in load)
    return {
        "output_tok_s": some / seconds,
        "seconds": seconds * every / some,
        "scaled_from_requests": min(_NUM_NAIVE, len(load)),
    }


def _waste(
    bench: _Bench, top: Rung, load: Sequence[TimedRequest], page_tokens: int
) -> dict[str, float]:
    """Room without a token on the highest rung, for a size of page."""
    rung = top.with_engine(page_tokens=page_tokens)
    expected = measure.predict(rung.config(bench.model), load, bench.machine)
    (runs,) = bench.serve([rung], load, f"pages of {page_tokens}")
    measured = measure.figures(runs)
    return {
        "page_tokens": page_tokens,
        "kv_waste": measured["kv_waste"],
        "predicted_kv_waste": measure.figures([expected])["kv_waste"],
        "half_page": ablation.half_page_waste(load, page_tokens),
    }
