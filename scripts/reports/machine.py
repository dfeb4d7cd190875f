"""The machine at hand, calibrated for the models of a report."""

import jax

from configs.engine import Config, EngineConfig
from configs.hardware.spec import HardwareSpec
from configs.model import ModelConfig
from inference.benchmark import first_start
from inference.engine import Engine
from layers import decoder, params


def calibrated(model: ModelConfig) -> HardwareSpec:
    """The machine calibrated anew for a model, with random weights, by a warm engine of its own.

    Raises:
        ValueError: there is nothing to calibrate: see `first_start.calibration`.
    """
    values = params.init(decoder.param_infos(model), seed=1)
    engine = Engine(Config(model, EngineConfig(max_seqs=32, max_context=1024)), values)
    engine.warm_up()
    hardware = first_start.calibration(engine, anew=True)
    if hardware is None:
        raise ValueError(f"{model.name} has no steps to time on a {jax.default_backend()}")
    return hardware
