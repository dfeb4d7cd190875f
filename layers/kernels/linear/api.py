"""The implementations of products with weights, and which one a configuration gets."""

from collections.abc import Callable
from typing import TypeGuard, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from configs.engine import Config
from configs.errors import InputError
from configs.kinds.params import Declared, ParamInfo, device_format
from configs.precision import FORMATS, ROW_FORMATS
from layers import params as parameters
from layers import quantized
from layers.backends import backends
from layers.kernels.cpu import library
from layers.kernels.device import target_device
from layers.kernels.linear import exchange, low_bit, packed
from layers.kernels.linear.low_bit import Quantized
from layers.kernels.linear.packed import Packed
from layers.params import Params
from sharding import mesh as meshes
from sharding import rules
from sharding.rules import Values

Array = np.ndarray | jax.Array
Leaf = jax.Array | Packed | Quantized


def choose(config: Config) -> str:
    """The implementation that `engine.kernels.linear` names; None: 'ffi_cpu' where it can run.
    Raises InputError if a named one cannot.
    """
    device, name = target_device(), config.engine.kernels.linear
    reason = None
    if not backends.of(device).has_native_kernels:
        reason = f"runs on CPUs, not on {device.platform}"
    elif not library.is_loaded():
        reason = "needs the native library, which is not there"
    if name == "ffi_cpu" and reason is not None:
        raise InputError(f"engine.kernels.linear=ffi_cpu {reason}; 'reference' runs anywhere")
    return name or ("reference" if reason else "ffi_cpu")


def placement(
    config: Config, mesh: jax.sharding.Mesh | None = None
) -> Callable[[str, ParamInfo, Values], Leaf]:
    """What makes a leaf of a parameter's values (or blocks), as the chosen implementation reads it:
    (path, info, values) -> leaf, over the chips of a mesh; where these belong to several processes,
    each reads its own chips' parts of the values only. That raises InputError for blocks of a
    format that the chosen implementation has no products for.
    """
    word = backends.of(target_device()).word

    def convert(info: ParamInfo, values: Values) -> Leaf:
        if _is_quantized(info, config):
            blocks = np.asarray(values).reshape(*info.shape[:-1], -1)
            return low_bit.of_blocks(blocks, info.format, info.shape[-1], config.model.dtype, word)
        if info.format in packed.BLOCKS:
            return packed.pack_rows(values, info.format, info.shape)
        if (format := device_format(info, target_device().platform)) != info.format:
            values = cast("Array", values).astype(format)
        packs = config.engine.kernels.linear == "ffi_cpu" and info.is_multiplied
        return packed.pack(cast("Array", values)) if packs else jax.device_put(values)

    if mesh is None:
        return lambda path, info, values: convert(info, _in_rows(info, values))
    infos = parameters.flatten(config.chip_model.parameters())
    specs_by_path = _specs_by_path(config)

    def place(path: str, info: ParamInfo, values: Values) -> Leaf:
        if not mesh.is_multi_process:
            values = np.asarray(_whole(info, values))

        def part(group: int, chip: int) -> Leaf:
            chip_values = rules.part(config.model, path, info, values, config.mesh, group, chip)
            return convert(infos[path], _in_rows(infos[path], chip_values))

        return meshes.put(mesh, specs_by_path[path], part)

    return place


def _in_rows(info: ParamInfo, values: Values) -> Values:
    """A parameter on one chip: an array, but of blocks on disk what gives slices of their rows."""
    if isinstance(values, np.ndarray | jax.Array) or not FORMATS[info.format].is_quantized:
        values = _whole(info, values)
    if not FORMATS[info.format].is_quantized or not isinstance(values, np.ndarray):
        return values
    return values.reshape(-1, values.shape[-1])


def _whole(info: ParamInfo, values: Values) -> Array:
    """All of a parameter: an array, or blocks to which numbers are rounded."""
    if not isinstance(values, jax.Array):
        values = np.asarray(values)
    if not FORMATS[info.format].is_quantized or values.dtype == np.uint8:
        return values
    return quantized.quantize(info.format, np.asarray(values))


def specs(config: Config) -> Params:
    """Partition specs of what `placement` makes of the model's parameters on a mesh."""
    return parameters.unflatten(config.model.parameters(), _specs_by_path(config))


def _specs_by_path(config: Config) -> dict[str, object]:
    """Of each array of each leaf, which has the leaf's axes, whatever it packs along them."""
    chip_leaves = parameters.flatten(abstract(config, config.chip_model.parameters()), _is_made)

    def specs_of(path: str, info: ParamInfo) -> object:
        spec, leaf = rules.spec(path, info), chip_leaves[path]
        return leaf.specs(spec) if _is_made(leaf) else spec

    declared = parameters.flatten(config.model.parameters())
    return {path: specs_of(path, info) for path, info in declared.items()}


def abstract(config: Config, infos: Declared, mesh: jax.sharding.Mesh | None = None) -> Params:
    """Shapes and dtypes of `placement`'s leaves for a declaration, over the chips of a mesh."""
    if mesh is not None:
        chip_leaves = abstract(config, config.chip_model.parameters())
        return meshes.spread(mesh, chip_leaves, specs(config))

    word = backends.of(target_device()).word

    def leaf(info: ParamInfo) -> Leaf | jax.ShapeDtypeStruct:
        if _is_quantized(info, config):
            return low_bit.abstract(info.shape, info.format, config.model.dtype, word)
        is_block = info.format in packed.BLOCKS
        if is_block or (config.engine.kernels.linear == "ffi_cpu" and info.is_multiplied):
            return packed.abstract(info.shape, info.format)
        return jax.ShapeDtypeStruct(info.shape, device_format(info, target_device().platform))

    return jax.tree.map(leaf, infos, is_leaf=parameters.is_info)


def random_params(config: Config, infos: Declared) -> Params:
    """Draws parameters; on one chip a `Quantized` as such, since rounding takes minutes."""
    config, word = config.with_engine(linear=choose(config)), backends.of(target_device()).word

    def draw(info: ParamInfo, key: jax.Array) -> Leaf:
        if config.num_chips == 1 and _is_quantized(info, config):
            return low_bit.random(key, info.shape, info.format, config.model.dtype, word)
        return parameters.init_leaf(info, key)

    return parameters.init(infos, draw=draw)


def pack_params(
    config: Config,
    params: Params,
    infos: Declared,
    mesh: jax.sharding.Mesh | None = None,
    were_read: bool = False,
) -> Params:
    """Packs parameters for the chosen implementation over the chips of a mesh; packed ones stay,
    and on a mesh those that `were_read` by `placement`. Raises InputError if they are packed for
    other products, or for one chip and there is a mesh.
    """
    place, declared = _placement_of_arrays(config, mesh), parameters.flatten(infos)
    leaves, _ = jax.tree.flatten(params, is_leaf=_is_made)

    def place_leaf(path: str, leaf: Leaf) -> Leaf:
        _check_goes(config, path, leaf)
        array = leaf.data if _is_made(leaf) else leaf
        if _is_made(leaf) if mesh is None else were_read and _lies_on(mesh, array):
            return leaf
        return place(path, declared[path], _plain(path, leaf))

    pairs = zip(declared, leaves, strict=True)
    return parameters.unflatten(infos, {path: place_leaf(path, leaf) for path, leaf in pairs})


def copy_params(config: Config, params: Params, mesh: jax.sharding.Mesh | None = None) -> Params:
    """Copies parameters from any devices for the chosen implementation, one by one, since the
    caller may donate his: from mesh to mesh by devices, else through the host. Raises InputError if
    they are not the declared ones, or packed for other chips or products.
    """
    infos, place = config.model.parameters(), _placement_of_arrays(config, mesh, copies=True)
    leaves, declared = parameters.flatten(params, _is_made), parameters.flatten(infos)
    _check_same(declared, leaves)
    for path, leaf in leaves.items():
        _check_goes(config, path, leaf)
        if mesh is not None:
            _plain(path, leaf)

    def copied(path: str, leaf: Leaf) -> Leaf:
        if _is_made(leaf):
            return jax.tree.map(lambda array: jax.device_put(np.array(array)), leaf)
        return place(path, declared[path], cast("Array", leaf))

    return parameters.unflatten(infos, {path: copied(path, leaves[path]) for path in declared})


def export_params(config: Config, params: Params, mesh: jax.sharding.Mesh | None = None) -> Params:
    """New arrays of parameters that `placement` made, as the model declares them, over the chips of
    a mesh with the shardings of `rules.layout`, without the host. Raises InputError if one of them
    has few bits.
    """
    infos = config.model.parameters()
    declared, leaves = parameters.flatten(infos), parameters.flatten(params, _is_made)
    for path, info in declared.items():
        if FORMATS[info.format].is_quantized or info.format == "int32":
            raise InputError(
                f"{path} is stored in {info.format}: an engine exports parameters in float32 and "
                "bfloat16 only (leave engine.weights and model.formats out)"
            )

    def exported(path: str, info: ParamInfo, leaf: Leaf) -> jax.Array:
        if isinstance(leaf, Packed):
            leaf = exchange.unpacked(leaf, rules.spec(path, info), mesh)
        assert isinstance(leaf, jax.Array)
        if mesh is None:
            return jnp.array(leaf, info.format, copy=True)
        return exchange.from_chips(config, path, info, leaf, mesh)

    arrays = {path: exported(path, info, leaves[path]) for path, info in declared.items()}
    return parameters.unflatten(infos, arrays)


def _placement_of_arrays(
    config: Config, mesh: jax.sharding.Mesh | None, copies: bool = False
) -> Callable[[str, ParamInfo, Array], Leaf]:
    """`placement` of arrays as the model declares them, which it `copies`; those that lie on a mesh
    go to another by devices, where products are plain. Numbers of features are cut on the host.
    """
    place, is_plain = placement(config, mesh), set[str]()
    if mesh is not None:
        specs = _specs_by_path(config).items()
        is_plain = {path for path, spec in specs if isinstance(spec, PartitionSpec)}

    def place_array(path: str, info: ParamInfo, array: Array) -> Leaf:
        is_on_mesh = isinstance(getattr(array, "sharding", None), NamedSharding)
        if mesh is not None and is_on_mesh and path in is_plain and info.format != "int32":
            return exchange.to_chips(config, path, info, cast("jax.Array", array), mesh)
        return place(path, info, np.array(array) if copies else array)

    return place_array


def _plain(path: str, leaf: Leaf) -> Array:
    """A leaf as parameters are declared, for a mesh; raises InputError if it is made already."""
    if _is_made(leaf):
        raise InputError(f"{path} is packed for one chip: a mesh takes plain parameters")
    return cast("Array", leaf)


def _check_same(declared: dict[str, ParamInfo], leaves: dict[str, Leaf]) -> None:
    """Compares names, shapes and formats; raises InputError with the first that differs."""
    platform = target_device().platform
    for path in [*declared, *leaves]:
        info, leaf, expected, actual = declared.get(path), leaves.get(path), "absent", "absent"
        if leaf is not None:
            actual = f"{_format(leaf)} {[*_shape(leaf)]}"
        if info is not None:
            expected = f"{info.format} {[*info.shape]}"
            formats = [info.format, device_format(info, platform)]
            if FORMATS[info.format].is_quantized:
                formats += ["float32", "bfloat16"]  # which can be rounded
            if actual in [f"{format} {[*info.shape]}" for format in formats]:
                continue
        raise InputError(f"not parameters of this model: {path} is {actual}, not {expected}")


def _is_quantized(info: ParamInfo, config: Config) -> bool:
    """Whether a parameter becomes a `Quantized`; raises InputError if no product has its format."""
    if info.format not in packed.BLOCKS or config.engine.kernels.linear == "ffi_cpu":
        return False
    if info.format not in ROW_FORMATS:
        raise InputError(
            f"engine.kernels.linear={config.engine.kernels.linear} multiplies no weights in "
            f"{info.format}; valid: {', '.join(ROW_FORMATS)}"
        )
    return True


def _is_made(leaf: object) -> TypeGuard[Packed | Quantized]:
    """Whether `placement` made a leaf of what a checkpoint has."""
    return isinstance(leaf, Packed | Quantized)


def _check_goes(config: Config, path: str, leaf: object) -> None:
    is_native, is_packed = config.engine.kernels.linear == "ffi_cpu", isinstance(leaf, Packed)
    if _is_made(leaf) and is_packed != is_native:
        kind, linear = ("packed parameters", "ffi_cpu") if is_packed else (
            "arrays of few bits", "reference"
        )  # fmt: skip
        raise InputError(f"{path}: {kind} go with engine.kernels.linear={linear} only")


def _shape(leaf: object) -> tuple[int, ...]:
    return tuple(getattr(leaf, "shape", ()))


def _format(leaf: object) -> str:
    return leaf.format if _is_made(leaf) else str(getattr(leaf, "dtype", type(leaf).__name__))


def _lies_on(mesh: jax.sharding.Mesh, leaf: object) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and sharding.mesh == mesh
