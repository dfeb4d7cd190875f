"""`bench --interference` and `bench --host_cost`."""

import dataclasses
from typing import TYPE_CHECKING

from configs.engine import Config
from configs.prefill import TOGETHER
from inference.benchmark import host_cost as costs
from inference.benchmark import measure
from inference.benchmark.drive import Run
from inference.benchmark.interference import APART, TOGETHER_WAYS, UNCHUNKED, Interference
from inference.benchmark.requests import TimedRequest
from inference.planner import slo
from inference.planner.calibration import lookup
from inference.planner.deployment import Deployment
from scripts import common
from scripts.reports import bench_text

if TYPE_CHECKING:
    from inference.engine import Engine

_HOST_RUNNING = (64, 256)


def interference(num_running: int, long_tokens: int, repeats: int) -> None:
    probe = Interference(num_running, long_tokens)
    resolved, config = common.resolve_config({})
    common.check_one_chip(dataclasses.replace(config, prefill=TOGETHER), "--interference")
    model = config.model
    ways = [*TOGETHER_WAYS, *([APART] if config.prefill.chips else [])]
    configs = {
        way: Config(
            model, probe.engine(model, config.engine, way),
            prefill=config.prefill if way == APART else TOGETHER,
        )
        for way in ways
    }  # fmt: skip
    checkpoint = common.open_checkpoint(resolved)
    engines: dict[str, Engine] = {}

    def serve(way: str, requests: list[TimedRequest]) -> list[Run]:
        if way not in engines:
            engines.clear()  # one cache at a time
            engines[way] = common.load_engine(checkpoint, configs[way])
            common.warm_up(engines[way])
        return measure.measure(engines[way], requests, repeats)

    machine = lookup.this_machine(model.dtype, model=model)

    def expect(way: str, requests: list[TimedRequest]) -> list[Run]:
        return [measure.predict(configs[way], requests, machine)]

    predicted = probe.measure(model.vocab_size, expect)
    if APART in ways:
        transfer_s = slo.transfer_s(Deployment(model, machine), long_tokens)
        predicted[APART] = probe.predicted_apart(
            model.vocab_size, lambda requests: expect(UNCHUNKED, requests)[0], transfer_s
        )
    figures = probe.measure(model.vocab_size, serve, ways)
    if common.JSON.value:
        sizes = {"running": num_running, "long_tokens": long_tokens, "predicted": predicted}
        sizes["tile_tokens"] = config.engine.shapes.chunk_tokens
        common.print_json({"interference": sizes | figures}, configs[ways[-1]])
    else:
        bench_text.show_interference(figures, predicted)


def host_cost() -> None:
    _, config = common.resolve_config({})
    common.check_one_chip(config, "--host_cost")
    rows = [
        dataclasses.asdict(costs.measure(config.model, num_running))
        for num_running in _HOST_RUNNING
    ]
    if common.JSON.value:
        common.print_json({"host_cost": rows}, config)
    else:
        bench_text.show_host_cost(rows)
