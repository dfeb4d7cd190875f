"""Devices that are not there, as the compilers of their makers describe them: programs are traced
and compiled for them, and never run.
"""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from configs.errors import InputError
from configs.hardware.targets import Target

# Which description compiles for a GPU: an H100's differs from the H200's in its memory alone.
_DESCRIPTIONS = {"h100": "h200.txtpb", "h200": "h200.txtpb"}

# libtpu asks no metadata server which slice this is, and lets other processes load it too.
_TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def prepare(target: Target) -> None:
    """Sets what the compiler of an absent target reads from its environment, before JAX looks for
    devices; no accelerator that is there is touched. Raises InputError without that compiler.
    """
    if target.is_here:
        return
    modules = {"gpu": ("jax_cuda13_plugin", "jax_cuda12_plugin"), "tpu": ("libtpu",)}
    if not any(importlib.util.find_spec(module) for module in modules[target.platform]):
        raise InputError(
            f"--target={target.name} needs a compiler that is not installed: "
            f"pip install '.[{target.platform}]'"
        )
    jax.config.update("jax_platforms", "cpu")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    for name, value in _TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@functools.cache
def devices(target: Target) -> tuple[jax.Device, ...]:
    """All devices of a target, in the compiler's order; of this machine, all that JAX has. Raises
    InputError if the compiler knows no such topology.
    """
    if target.is_here:
        return tuple(jax.devices("cpu"))
    prepare(target)
    options: dict[str, object] = {}
    if target.platform == "gpu":
        path = Path(__file__).with_name(_DESCRIPTIONS[target.chip])
        description = path.read_text(encoding="utf-8")
        options = {"target_config": description, "topology": target.topology}
    elif target.num_chips == 1:  # a host has four unless told so
        options = {"chips_per_host_bounds": (1, 1, 1)}
    platform, name = {"gpu": ("cuda", ""), "tpu": ("tpu", target.topology)}[target.platform]
    try:
        chips = topologies.get_topology_desc(name, platform, **options).devices
    except (NotImplementedError, RuntimeError) as error:  # JAX's own are RuntimeErrors
        reason = str(error).partition("\n")[0]
        raise InputError(f"--target={target.name} cannot be compiled for: {reason}") from error
    return tuple(chips)


@contextlib.contextmanager
def traced_for(device: jax.Device) -> Iterator[None]:
    """Context in which programs are traced as if the device were JAX's default
    (`layers.kernels.device.target_device`).
    """
    platform = "cuda" if device.platform == "gpu" else device.platform
    cores = getattr(device, "core_count", None) or 1
    described = AbstractDevice(device.device_kind, cores, platform)
    axes = (AxisType.Auto,)
    with jax.sharding.use_abstract_mesh(
        AbstractMesh((1,), ("x",), axis_types=axes, abstract_device=described)
    ):
        yield
