"""The hardware that predictions are for: a chip of the catalogue, or the machine at hand."""

import dataclasses
import logging
from collections.abc import Iterable

from configs.hardware import catalog
from configs.hardware.spec import HardwareSpec
from configs.model import ModelConfig
from inference.planner import cost
from inference.planner.calibration import store

DTYPES = ("float32", "bfloat16")
SCATTER = 1.15  # of the bandwidth that an undisturbed machine reads, over the least of it


def get(name: str, model: ModelConfig | None = None) -> HardwareSpec:
    """The chip of that name; 'cpu' is this machine, as it is calibrated (for a model) or with its
    rates alone, which are measured when first asked for and kept.

    Raises:
        InputError: no such chip.
    """
    if name != catalog.THIS_MACHINE:
        return catalog.get(name)
    hardware = (None if model is None else store.calibration(model)) or store.read()
    if hardware is None:
        from inference.planner.calibration import measure  # loads numpy, and jax when it measures

        hardware = measure.this_machine(*DTYPES)
        store.write(hardware)
    return hardware


def this_machine(
    *dtypes: str, model: ModelConfig | None = None, implementations: str | None = None
) -> HardwareSpec:
    """The machine at hand as it is calibrated (for a model, with these implementations),
    or else with its rates in these types alone, measured now; where JAX computes on an accelerator,
    that one. Rates with a model's weights of few bits are measured too; if its steps were never
    timed in its formats, the constants are those of its steps without.

    A calibrated machine is as slow as it reads now: other tenants slow all of it down.
    """
    import jax

    from inference.planner.calibration import measure

    if jax.default_backend() != "cpu":
        from inference.planner.calibration import on_device

        return on_device.this_device(*dtypes)
    hardware = None if model is None else store.calibration(model, implementations)
    few = () if model is None else cost.weight_formats(model)
    if hardware is None and model is not None and model.formats and implementations is None:
        hardware = store.calibration(dataclasses.replace(model, formats=()))
    if hardware is None or not set(dtypes) <= set(hardware.rates):
        hardware = measure.this_machine(*dtypes)
    else:
        hardware = at_bandwidth(hardware, measure.read_bandwidth())
    return dataclasses.replace(hardware, rates={**measure.few_bits_rates(few), **hardware.rates})


def this_machine_or_none(
    *dtypes: str, model: ModelConfig | None = None, implementations: str | None = None
) -> HardwareSpec | None:
    """`this_machine`; None where the device has too little memory left to be measured."""
    import jax

    try:
        return this_machine(*dtypes, model=model, implementations=implementations)
    except jax.errors.JaxRuntimeError as failure:
        logging.getLogger(__name__).warning("the device cannot be measured: %s", failure)
        return None


def cached(model: ModelConfig, implementations: str) -> HardwareSpec | None:
    """The machine at hand as far as that takes no measuring: as it is calibrated for a model with
    these implementations, or else with its rates alone, as if no step had been timed; an
    accelerator's are measured once a process, and before its memory is taken. None: nothing is
    known.
    """
    import jax

    if jax.default_backend() != "cpu":
        return this_machine_or_none(model.dtype)
    return store.calibration(model, implementations) or store.read()


def rates_now(formats: Iterable[str]) -> tuple[float, float]:
    """Bytes a second that the device at hand reads, and FLOPs a second of its fastest product with
    weights in one of these formats; measured now.
    """
    import jax

    from inference.planner.calibration import measure

    if jax.default_backend() == "cpu":
        return measure.read_bandwidth(), measure.best_matmul_rate(formats)
    from inference.planner.calibration import on_device

    return on_device.copy_bandwidth(), max(map(on_device.matmul_rate, formats))


def at_bandwidth(hardware: HardwareSpec, read_bandwidth: float) -> HardwareSpec:
    """The same machine where everything is as much slower as it reads, beyond what readings scatter
    by. Where it reads faster, nothing is faster: such moments pass, and steps do not show them
    (`docs/log.md`).
    """
    speed = min(1.0, SCATTER * read_bandwidth / hardware.read_bandwidth)
    rates = {name: rate * speed for name, rate in hardware.rates.items()}
    overhead_s = hardware.overhead_s / speed
    return dataclasses.replace(
        hardware, read_bandwidth=hardware.read_bandwidth * speed, rates=rates, overhead_s=overhead_s
    )
