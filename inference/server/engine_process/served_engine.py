"""An `Engine` as the loop serves it."""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from configs.hardware.spec import HardwareSpec
from inference.engine import Engine
from inference.files import mirror
from inference.new_weights import NewWeights
from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.runtime.adapter_weights import AdapterWeights
from inference.scheduling.step_schedule import Counters
from inference.server.engine_process import pages
from inference.server.engine_process.plan_facts import plan_facts
from inference.server.engine_process.step_figures import StepFigures
from inference.server.frames import Heartbeat, Loaded, TextFacts
from inference.server.version import version
from sharding import hosts

_PAUSE_S = 1e-3


class ServedEngine:
    """An `Engine` behind the methods of `Served`."""

    def __init__(
        self,
        engine: Engine,
        name: str,
        warm_up: Callable[[], object],
        hardware: HardwareSpec | None = None,
        pooling: str = "last",
        source: str = "",
    ):
        """`name`: of the model; `hardware`: of this machine, if known; `pooling`: of embeddings, if
        the engine makes them; `source`: what `--model` names, of which weights are read again.
        """
        self._engine = engine
        self._warm_up = warm_up
        self._name = name
        self._pooling = pooling
        self._source = source
        self._num_generated = 0
        self._hardware = hardware
        self._steps = StepFigures(engine.config, hardware)

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def slack_s(self) -> float:
        return self._engine.slack_s()

    @property
    def is_compiling(self) -> bool:
        return self._engine.is_compiling

    def facts(self) -> Loaded:
        config, tokenizer = self._engine.config, self._engine.tokenizer
        return Loaded(
            model=self._name,
            fingerprint=_fingerprint(asdict(config)),
            max_context=config.max_context,
            max_seqs=config.engine.max_seqs,
            max_top_logprobs=config.engine.requests.top_logprobs,
            accepts_seeds=config.engine.drafts.acceptance == "coupled",
            accepts_grammars=config.engine.requests.grammars and tokenizer is not None,
            vocab_size=config.model.vocab_size,
            text=None if tokenizer is None else TextFacts.of(tokenizer),
            num_groups=config.mesh.num_groups,
            pooling=self._pooling if config.engine.requests.embeddings else None,
            embedding_width=config.model.width,
            classifier=self._engine.classifier,
            plan=plan_facts(config, self._hardware),
            cache=pages.described(config),
            adapters=self._engine.adapters.names,
        )

    def warm_up(self) -> None:
        self._warm_up()
        self._steps.prepare(self._engine.model_runner.executables.shapes)

    def prepare(self, params: SamplingParams) -> None:
        self._engine.input_processor.prepare(params)

    def add(self, tokens: Sequence[int], params: SamplingParams, output: Sequence[int]) -> int:
        return self._engine.add_request(tokens, params, output)

    def abort(self, id: int) -> None:
        self._engine.abort(id)

    def retain(self, tokens: Sequence[int], cache_salt: str | None, adapter: str | None) -> None:
        self._engine.retain(tokens, cache_salt, adapter)

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    def read_weights(self, path: str | None) -> NewWeights:
        return self._engine.read_weights(self._source if path is None else path)

    def update_weights(self, new: NewWeights, version: int | None, keeps_pages: bool) -> None:
        self._engine.update_params(new, keeps_pages, version=version)

    def read_adapter(self, path: str) -> AdapterWeights:
        hosts.current().check_alone("loading adapters while requests are served")
        return self._engine.adapters.read(mirror.whole(path))

    def add_adapter(self, name: str, adapter: AdapterWeights) -> None:
        self._engine.adapters.add(name, adapter)

    def unload_adapter(self, name: str) -> None:
        self._engine.adapters.unload(name)

    def sleep(self, keeps_weights: bool) -> None:
        self._engine.sleep(keeps_weights)

    def wake(self, new: NewWeights | None, version: int | None) -> None:
        self._engine.wake(new, version)

    def step(self) -> list[RequestOutput]:
        counters = self._engine.scheduler.counters
        num_steps = counters.num_steps
        outputs = self._engine.step(is_open=True)
        if not outputs and counters.num_steps == num_steps:  # it may wait for a fuller batch
            time.sleep(_PAUSE_S)
        self._num_generated += sum(len(output.token_ids) for output in outputs)
        return outputs

    def heartbeat(self) -> Heartbeat:
        scheduler = self._engine.scheduler
        counters, waiting = scheduler.counters, list(scheduler.waiting)
        new = [
            sequence.history.arrival_s for sequence in waiting if sequence.history.started_s is None
        ]
        page_use = pages.page_use(scheduler.shards, self._engine.config)
        self._steps.read(self._engine.records)
        prefill = self._engine.prefill_figures
        return Heartbeat(
            num_running=len(scheduler.running),
            num_waiting=len(waiting),
            cache_used=page_use.used,
            num_deferred=sum(sequence.leader is not None for sequence in waiting),
            oldest_waiting_s=time.perf_counter() - min(new) if new else 0.0,
            page_waste=page_use.waste,
            page_sharing=page_use.sharing,
            read_bandwidth=self._steps.read_bandwidth,
            iteration_tokens=list(self._steps.iteration_tokens),
            accepted_per_position=_accepted(counters, self._engine.config.engine.drafts.levels),
            prefill_processes=prefill.num_connected,
            prefill_bandwidth=prefill.planned_bandwidth,
            counters={
                "steps": counters.num_steps,
                "prompt_tokens": counters.num_prompt_tokens,
                "cached_tokens": counters.num_cached_tokens,
                "generated_tokens": self._num_generated,
                "preemptions": counters.num_preemptions,
                "drafts": counters.num_drafts,
                "accepted_drafts": counters.num_accepted,
                "draft_rounds": counters.verified.total(),
                "late_compiles": self._engine.model_runner.num_late_compiles,
                "compile_seconds": self._engine.compile_s,
                "prefill_received_bytes": prefill.received_bytes,
                "prefill_received_seconds": prefill.received_s,
                **self._steps.counters,
            },
        )


def _accepted(counters: Counters, levels: int) -> list[int]:
    """How often the first, second, ... draft was accepted."""
    return [
        sum(count for (_, accepted), count in counters.verified.items() if accepted > n)
        for n in range(levels)
    ]


def _fingerprint(config: object) -> str:
    """A hash of the program's version and the configuration."""
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    return f"ridgeline-{version()}-{digest.hexdigest()[:12]}"
