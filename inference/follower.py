"""What the engine of another host than host 0 does: what host 0's does, step by step."""

import contextlib
import hashlib
from typing import NoReturn

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.settings import section
from inference import alike
from inference.checkpoints.checkpoint import Checkpoint
from inference.engine import Engine
from inference.request import SamplingParams
from inference.runtime.model_runner import for_this_device
from sharding import hosts


def follow(engine: Engine) -> NoReturn:
    """Does what host 0 sends; the process ends with it (`hosts`). Raises a `RuntimeError` if hosts
    are out of step, InputError for an adapter that is not the same here.
    """
    # Host 0 has refused what is refused here: it goes on, with the same requests.
    refused = contextlib.suppress(InputError)
    while True:
        order, arguments = hosts.current().next_order()
        match order:
            case "add_request":
                tokens, params, output = arguments
                with refused:
                    engine.add_request(tokens, SamplingParams(**params), output)
            case "fork":
                id, params = arguments
                with refused:
                    engine.fork(id, SamplingParams(**params))
            case "abort":
                engine.abort(*arguments)
            case "retain":
                engine.retain(*arguments)
            case "step":
                engine.step(*arguments)
            case "load_adapter":
                _load_adapter(engine, *arguments)
            case "unload_adapter":
                engine.adapters.unload(*arguments)
            case "rebuild":
                engine.rebuild()
            case "warm_up":
                engine.warm_up(seals=arguments[0])


def _load_adapter(engine: Engine, name: str, path: str, digest: str) -> None:
    adapter = engine.adapters.read(path)
    if adapter.digest != digest:
        raise InputError(
            f"{path}: is another adapter than on host 0; give all hosts the same files"
        )
    engine.adapters.add(name, adapter)


def prepared(config: Config) -> Config:
    """A configuration as several hosts can run it: pages are computed again rather than offloaded;
    raises InputError if it asks for what one host alone can do.
    """
    if hosts.current().count == 1:
        return config
    if config.engine.cache.preemption == "swap":
        raise InputError("engine.cache.preemption=swap: goes with one host; leave it out")
    return config.with_engine(preemption="recompute")


def check_alike(config: Config, checkpoint: Checkpoint | None) -> None:
    """Raises an `InputError` on all hosts unless all run the same, before weights are read."""
    if hosts.current().count == 1:
        return
    config, attention = for_this_device(config)
    facts = alike.of_model(config, checkpoint)
    facts["implementation of attention"] = attention
    for name, value in section.values(config.engine).items():
        facts[section.paths(EngineConfig)[name]] = repr(value)
    facts["mesh"] = str(config.mesh)
    if checkpoint is not None:
        facts["end tokens"] = str(checkpoint.eos_ids)
        facts["tokenizer and other files"] = _texts(checkpoint)
    hosts.current().compare(facts)


def _texts(checkpoint: Checkpoint) -> str:
    """A digest of the small files beside the weights: tokenizer, templates, generation defaults."""
    digest = hashlib.sha256()
    for name, data in sorted(checkpoint.contents().read_files().items()):
        digest.update(f"{name} {len(data)}\n".encode() + data)
    return digest.hexdigest()[:16]
