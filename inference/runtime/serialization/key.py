"""What a compiled program depends on, so that a file of one is used where it is right, only."""

import dataclasses
import functools
import hashlib
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh, NamedSharding

from configs.engine import Config, EngineConfig
from configs.settings import section
from inference.files import local_machine

_COMPILERS = {
    "cpu": (),
    "gpu": ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt"),
    "tpu": ("libtpu",),
}
# Of JAX's options those that change what is traced, then those that it hands to the compiler.
_OPTIONS = (
    "jax_default_matmul_precision", "jax_enable_x64", "jax_numpy_dtype_promotion",
    "jax_allow_f16_reductions", "jax_pallas_use_mosaic_gpu", "jax_optimization_level",
    "jax_exec_time_optimization_effort", "jax_memory_fitting_level", "jax_memory_fitting_effort",
    "jax_compiler_enable_remat_pass", "jax_use_shardy_partitioner", "jax_xla_profile_version",
    "jax_disable_most_optimizations",
)  # fmt: skip
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_ROOT = Path(__file__).resolve().parents[3]
_SOURCES = (
    *("configs", "sharding", "layers"),
    *(f"inference/{room}" for room in ("runtime", "sampling", "scheduling", "speculation")),
)
_SUFFIXES = (".py", ".json", ".txt", ".cc", ".h")  # .txt: `layers/kernels/autotune.py`

Key = dict[str, str]  # what is compared -> its value, or a digest of it


def of_engine(
    config: Config, attention: str, devices: Sequence[jax.Device], mesh: Mesh | None
) -> Key:
    """The parts that all programs of an engine share; `config` is resolved for these devices."""
    declared = section.declared(EngineConfig)
    settings = section.values(config.engine).items()
    engine = {name: value for name, value in settings if not declared[name].host_only}
    processor = "" if devices[0].platform != "cpu" else _this_processor()
    chips = f"{len(devices)} x {devices[0].platform} {devices[0].device_kind} {processor}"
    return {
        "model": digest(repr(dataclasses.replace(config.model, name=""))),
        "draft": "" if config.draft is None else digest(repr(config.draft)),
        "engine": repr(engine | {"attention": attention}),
        "mesh": "" if mesh is None else str(dict(mesh.shape)),
        "devices": chips.strip(),
        "places of devices": _places(devices),
        "packages": _packages(devices[0].platform),
        "compiler flags": repr([_flags(os.environ.get(name, "")) for name in _FLAGS]),
        "options of jax": repr([jax.config.values.get(name) for name in _OPTIONS]),
        "code of this version": sources(),
    }


def of_program(engine: Key, name: str, arguments: Sequence[object]) -> Key:
    """The key of one program, from `of_engine`'s; shapes end with cache, slots and batch."""
    *weights, cache, slots, batch = map(_described, arguments)
    shapes = {
        "batch's shapes": batch, "weights' shapes": repr(weights), "cache's shapes": cache,
        "slots' shapes": slots,
    }  # fmt: skip
    return engine | {"program": name} | {part: digest(shape) for part, shape in shapes.items()}


def digest(text: str | bytes) -> str:
    """Sixteen hexadecimal digits."""
    data = text.encode() if isinstance(text, str) else text
    return hashlib.sha256(data).hexdigest()[:16]


def _described(tree: object) -> str:
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    lines = [str(structure)]
    for path, leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        spec = sharding.spec if isinstance(sharding, NamedSharding) else ""
        lines.append(f"{jax.tree_util.keystr(path)} {leaf.dtype}{leaf.shape} {spec}")
    return "\n".join(lines)


def _places(devices: Sequence[jax.Device]) -> str:
    """Which chips of a TPU are whose neighbours."""
    if devices[0].platform != "tpu" or len(devices) == 1:
        return ""
    return digest(repr([(tuple(device.coords), device.core_on_chip) for device in devices]))


@functools.cache
def _packages(platform: str) -> str:
    """Versions of what compiles; on NVIDIA's chips of the libraries that programs call, too."""
    names = ["jax", "jaxlib", *_COMPILERS.get(platform, ())]
    if platform == "gpu":
        installed = {
            str(package.metadata["Name"]) for package in importlib.metadata.distributions()
        }
        names += sorted(name for name in installed if name.startswith("nvidia-"))
    return ", ".join(filter(None, map(_version, names)))


def _flags(text: str) -> list[str]:
    """A variable's flags, or those of the file that it names; files count by contents, dumps do
    not.
    """
    if not text.lstrip().startswith("-") and os.path.isfile(text.strip()):
        text = Path(text.strip()).read_text(encoding="utf-8", errors="replace")
    return [_with_contents(flag) for flag in text.split() if "_dump_" not in flag.partition("=")[0]]


def _with_contents(flag: str) -> str:
    path = flag.partition("=")[2]
    return f"{flag} {digest(Path(path).read_bytes())}" if os.path.isfile(path) else flag


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def sources() -> str:
    """A digest of the code that programs are traced from."""
    hasher = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.suffix in _SUFFIXES:
                data = path.read_bytes()
                hasher.update(f"{path.relative_to(_ROOT)} {len(data)}\n".encode() + data)
    return hasher.hexdigest()[:16]


@functools.cache
def _this_processor() -> str:
    """Instruction sets, and how many threads XLA divides work among."""
    names, lines = ("flags", "Features", "model name", "CPU part"), local_machine.cpu_info()
    features = sorted({line for line in lines if line.split("\t")[0].strip(" :") in names})
    described = digest(" ".join([platform.machine(), platform.processor(), *features]))
    return f"{local_machine.num_cores()} cores {described}"
