"""Who computes attention over pages."""

from configs.engine import Config
from configs.errors import InputError
from layers.kernels import tuning
from layers.kernels.attention import reference
from layers.kernels.attention.contract import Demand, Implementation
from layers.kernels.device import target_device


def implementation(name: str) -> Implementation:
    """The implementation of a name of `configs.engine.ATTENTIONS`."""
    if name == "pallas_gpu":
        from layers.kernels.attention import gpu  # Mosaic takes its time to load

        return Implementation(gpu.limit, reference.layout, reference.write, gpu.attend_pages)
    if name == "pallas_tpu":
        from layers.kernels.attention import tpu

        return Implementation(
            tpu.limit, reference.layout, reference.write, tpu.attend_pages, tpu.append_and_attend
        )
    if name == "jax_tpu":
        from layers.kernels.attention import jax_tpu

        return Implementation(jax_tpu.limit, jax_tpu.layout, jax_tpu.write, jax_tpu.attend_pages)
    assert name == "reference", name
    return Implementation(
        reference.limit, reference.layout, reference.write, reference.attend_pages
    )


def choose(config: Config) -> str:
    """What `engine.attention` names, if it can run on the device that is traced for; where it names
    nothing, the first that can and that a committed measurement puts before the reference there.

    Raises:
        InputError: the named implementation cannot do what the model and the engine ask for.
    """
    model, engine, device = config.model, config.engine, target_device()
    demand = Demand(
        model.num_heads, model.num_kv_heads, model.head_width, config.device_page_tokens,
        model.dtype, engine.deterministic, any(spec.window for spec in model.cache_specs),
        max(engine.max_seqs, *engine.prefill_tiles) * config.page_columns,
    )  # fmt: skip
    name = engine.attention
    if name is None:
        winners = tuning.winners("attention", device.kind)
        can = (name for name in winners if implementation(name).limit(demand, device) is None)
        return next(can, "reference")
    if (reason := implementation(name).limit(demand, device)) is not None:
        raise InputError(
            f"engine.attention={name} {reason}; 'reference' computes any attention anywhere"
        )
    return name
