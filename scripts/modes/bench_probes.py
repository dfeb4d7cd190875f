"""`bench --interference` and `bench --host_cost`."""

import dataclasses
from typing import Any

from configs.engine import Config
from inference.benchmark import host_cost as costs
from inference.benchmark import measure
from inference.benchmark.drive import Run
from inference.benchmark.interference import Interference
from inference.benchmark.requests import TimedRequest
from inference.planner.calibration import lookup
from scripts import common
from scripts.reports import bench_text

_HOST_RUNNING = (64, 256)


def interference(num_running: int, long_tokens: int, repeats: int) -> None:
    """Time between tokens while a long prompt is prefilled."""
    probe = Interference(num_running, long_tokens)
    resolved, config = common.resolve_config({})
    common.check_one_chip(config, "--interference")
    model = config.model
    configs = [
        Config(model, probe.engine(model, config.engine, is_chunked))
        for is_chunked in (False, True)
    ]
    checkpoint = common.open_checkpoint(resolved)
    engines: dict[bool, Any] = {}

    def serve(is_chunked: bool, requests: list[TimedRequest]) -> list[Run]:
        if is_chunked not in engines:
            engines.clear()  # one cache at a time
            engines[is_chunked] = common.load_engine(checkpoint, configs[is_chunked])
            common.warm_up(engines[is_chunked])
        return measure.measure(engines[is_chunked], requests, repeats)

    machine = lookup.this_machine(model.dtype, model=model)

    def expect(is_chunked: bool, requests: list[TimedRequest]) -> list[Run]:
        return [measure.predict(configs[is_chunked], requests, machine)]

    predicted = probe.measure(model.vocab_size, expect)
    found = probe.measure(model.vocab_size, serve)
    if common.JSON.value:
        sizes = {"running": num_running, "long_tokens": long_tokens, "predicted": predicted}
        sizes["tile_tokens"] = config.engine.chunk_tokens
        common.print_json({"interference": sizes | found}, configs[True])
    else:
        bench_text.show_interference(found, predicted)


def host_cost() -> None:
    """The host's part of a step, of sequences that decode."""
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
