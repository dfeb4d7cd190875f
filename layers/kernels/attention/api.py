"""The implementations of attention over pages, and which one a configuration gets."""

from typing import NamedTuple

from configs.cache import CacheSpec
from configs.engine import Config
from configs.errors import InputError
from configs.kinds.kind import Mixer
from layers import page_rows
from layers.backends import backends
from layers.kernels import tuning
from layers.kernels.attention import ffi_cpu, reference
from layers.kernels.attention.contract import Demand, Implementation, Layout
from layers.kernels.device import target_device


def implementation(name: str) -> Implementation:
    """The implementation of a name of `configs.settings.kernels.ATTENTIONS`."""
    if name == "pallas_gpu":
        from layers.kernels.attention import (  # Mosaic is slow to load
            gpu,
            gpu_bounds,
            gpu_index,
            gpu_stretches,
        )

        return Implementation(
            gpu.limit, gpu.layout, gpu.write, gpu.attend_pages,
            page_bounds=gpu_bounds.page_bounds, index_scores=gpu_index.index_scores,
            attend_stretches=gpu_stretches.attend_stretches, attend_part=gpu.attend_part,
            pads_bytes=True,
        )  # fmt: skip
    if name == "pallas_tpu":
        from layers.kernels.attention import tpu

        return Implementation(
            tpu.limit, page_rows.in_lanes, page_rows.write, tpu.attend_pages,
            tpu.append_and_attend, attend_part=tpu.attend_part,
            append_and_attend_part=tpu.append_and_attend_part,
            pads_bytes=True,
        )  # fmt: skip
    if name == "jax_tpu":
        from layers.kernels.attention import jax_tpu

        return Implementation(jax_tpu.limit, jax_tpu.layout, jax_tpu.write, jax_tpu.attend_pages)
    if name == "ffi_cpu":
        return Implementation(
            ffi_cpu.limit, page_rows.token_major, page_rows.write, ffi_cpu.attend_pages,
            page_bounds=ffi_cpu.page_bounds, index_scores=ffi_cpu.index_scores,
            attend_part=ffi_cpu.attend_part,
        )  # fmt: skip
    assert name == "reference", name
    return Implementation(
        reference.limit, page_rows.token_major, page_rows.write, reference.attend_pages,
        attend_part=reference.attend_part,
    )  # fmt: skip


def layout(name: str, row_multiple: int) -> Layout:
    """How pages lie, `row_multiple` being the engine's (`engine.cache.row_multiple`)."""
    if name == "reference" and row_multiple > 1:  # on a TPU
        return page_rows.in_lanes
    return implementation(name).layout


class Choice(NamedTuple):
    """The chosen implementation of attention.

    Attributes:
        passed_over: those that are preferred on the device and cannot run, and why.
    """

    name: str
    passed_over: dict[str, str]


def choose(config: Config) -> Choice:
    """Chooses the implementation that `engine.kernels.attention` names. None is the first able to
    run of those that a committed measurement on such a device ranks above the reference, or without
    a measurement of the back end's; else the reference. Raises InputError if the named one cannot
    do what the model and the engine require.
    """
    model, device, requested = config.chip_model, target_device(), config.engine.kernels.attention
    read = {
        (layer.mixer, model.stored_by(index)): None
        for index, layer in enumerate(model.layers)
        if layer.mixer.query_heads
    }
    demands = [demand(config, mixer, stored) for mixer, stored in read]

    def limit(name: str) -> str | None:
        candidate = implementation(name)
        if config.mesh.context > 1 and candidate.attend_part is None:
            return (
                "reads all tokens of a sequence, not the part that mesh.context="
                f"{config.mesh.context} leaves on a chip"
            )
        reasons = (
            candidate.limit(demand, device)
            for demand in demands
            if demand.stride == 1 or candidate.attend_stretches is not None
        )
        return next((reason for reason in reasons if reason is not None), None)

    if requested is not None:
        if (reason := limit(requested)) is not None:
            raise InputError(
                f"engine.kernels.attention={requested} {reason}; 'reference' computes any "
                "attention anywhere"
            )
        return Choice(requested, {})
    winners = tuning.winners("attention", device)
    if winners is None:
        winners = backends.of(device).attention
    passed_over: dict[str, str] = {}
    for name in winners:
        if (reason := limit(name)) is None:
            return Choice(name, passed_over)
        passed_over[name] = reason
    return Choice("reference", passed_over)


def demand(config: Config, mixer: Mixer, stored: CacheSpec) -> Demand:
    """What a mixer that reads the cache `stored` requires of an implementation."""
    engine = config.engine
    return Demand(
        mixer.query_heads, stored.page_format(config.model.cache_dtype), config.device_page_tokens,
        engine.deterministic, stored.window is not None,
        max(engine.max_seqs, *engine.shapes.prefill_chunks) * config.page_columns,
        engine.drafts.has_tree, stored.first_tokens > 0, mixer.chooses,
        engine.requests.prompt_budgets, stored.index_width, stored.stride, config.model.dtype,
    )  # fmt: skip
