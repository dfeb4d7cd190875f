"""`quantization_config` as NVIDIA's ModelOpt and AMD's Quark write it: by the name of an algorithm,
of all modules or of each, and by the type of the weights.
"""

import fnmatch
from collections.abc import Callable, Mapping
from pathlib import Path

from configs.errors import InputError, shown
from inference.checkpoints import mapped
from inference.checkpoints.hf.quantized.schemes import Find, Scheme, names
from inference.families.shared.config_keys import Keys

FILE = "hf_quant_config.json"  # which has the same, or it alone
METHODS = "modelopt", "modelopt_fp4", "modelopt_mixed"

_NVFP4 = Scheme("scaled", 4, 16, is_float=True, has_tensor_scale=True, activations="group")
_SCHEMES: Mapping[str, Scheme] = {
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": Scheme("scaled", 4, 16, is_float=True, has_tensor_scale=True),
    "W4A8_NVFP4_FP8": _NVFP4,
    "FP8": Scheme("plain", 8, is_float=True, shares_rows=None, activations="tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("plain", 8, is_float=True, activations="token"),
    "MXFP8": Scheme("scaled", 8, 32, is_float=True, has_powers=True, activations="group"),
    "W4A16_MXFP4": Scheme("scaled", 4, 32, is_float=True, has_powers=True),
}
_MIXED = "MIXED_PRECISION"

# Quark's algorithms that change nothing but the numbers that are stored: scales that smooth are
# multiplied into weights and norms.
_MERGED = ("awq", "gptq", "gptaq", "qronos", "autoround", "smooth", "autosmoothquant")
# And those that rotate, with their defaults: of R1 to R4 (SpinQuant, arXiv 2405.16406) the first,
# if it is online, and the fourth rotate activations; the second is merged into weights, and the
# third rotates queries and keys, whose products stay the same.
_ROTATING: Mapping[str, Mapping[str, object]] = {"rotation": {}, "quarot": {"r4": True}}
_ONLINE = "online_r1_rotation", "r4"


def described(stated: object, directory: Path) -> object:
    """What a directory says of its weights, in `config.json` or in `hf_quant_config.json`.

    Args:
        stated: the former's `quantization_config`; None: it has none.

    Raises:
        InputError: both say it, and differently.
    """
    path = directory / FILE
    if not path.exists():
        return stated
    keys = Keys(mapped.read_json(path)).nested("quantization")
    if keys is None:
        raise InputError(
            f"{path}: weights quantized like this are not served: quantization is missing"
        )
    other = keys.raw
    if stated is None:
        return {"quant_method": "modelopt"} | other
    in_config = stated if isinstance(stated, dict) else {}
    for key in ("quant_algo", "group_size"):
        first, second = in_config.get(key), other.get(key)
        if None not in (first, second) and first != second:
            raise InputError(
                f"quantization_config: {key}={shown(first)}: {path} says {shown(second)}; weights "
                "are described twice, so both must agree"
            )
    return {key: value for key, value in other.items() if key == "quantized_layers"} | in_config


def modelopt(keys: Keys) -> Find:
    """The schemes of modules by `quant_algo`."""
    group_size = keys.raw.get("group_size")
    layers: dict[str, Scheme | None] = {}
    default, algorithm = None, keys.raw.get("quant_algo")
    if algorithm == _MIXED:
        stated = keys.nested("quantized_layers")
        if stated is None:
            raise InputError(f"{keys.label}quant_algo='{_MIXED}' needs quantized_layers")
        for name in stated.raw:
            layer = stated.nested(name)
            assert layer is not None
            layers[name] = _scheme(layer, layer.raw.get("group_size"))
    else:
        default = _scheme(keys, group_size)
    is_skipped = _matcher(names(keys, "ignore") + names(keys, "exclude_modules"))

    def find(module: str, is_table: bool) -> Scheme | None:
        parents = _parents(module)
        if is_table or any(map(is_skipped, parents)):
            return None
        return next((layers[name] for name in parents if name in layers), default)

    return find


def _scheme(keys: Keys, group_size: object) -> Scheme | None:
    algorithm = keys.raw.get("quant_algo")
    if algorithm == "UNQUANTIZED":
        return None
    if not isinstance(algorithm, str) or algorithm not in _SCHEMES:
        raise InputError(
            f"{keys.label}quant_algo={shown(algorithm)} is not served; valid: "
            f"{', '.join((*_SCHEMES, _MIXED))}"
        )
    scheme = _SCHEMES[algorithm]
    if scheme.group is not None and group_size not in (None, scheme.group):
        raise InputError(
            f"{keys.label}group_size={shown(group_size)}: {algorithm} has {scheme.group}"
        )
    return scheme


def quark(keys: Keys) -> Find:
    """The scheme of all modules but those that are excluded: MXFP4."""
    stated = keys.nested("global_quant_config")
    weight = None if stated is None else stated.nested("weight")
    if weight is None:
        raise InputError(f"{keys.label}global_quant_config: weight is missing")
    keys.require_neutral(layer_type_quant_config=(None, {}), layer_quant_config=(None, {}))
    _require_merged(keys)
    weight.require_neutral(
        dtype=("fp4", "mx_fp4"), group_size=(32,), scale_format=("e8m0", None),
        qscheme=("per_group", None), ch_axis=(-1, None),
    )  # fmt: skip
    scheme = Scheme("scaled", 4, 32, is_float=True, has_powers=True, activations="group")
    is_skipped = _matcher(names(keys, "exclude"))

    def find(module: str, is_table: bool) -> Scheme | None:
        is_out = is_table or any(map(is_skipped, _parents(module)))
        return None if is_out else scheme

    return find


def _require_merged(keys: Keys) -> None:
    """Raises an `InputError` for an algorithm that has more to do than what is stored says."""
    stated, label = keys.raw.get("algo_config"), f"{keys.label}algo_config: "
    for raw in stated if isinstance(stated, list) else [stated] if stated else []:
        if not isinstance(raw, dict):
            raise InputError(f"{label}an algorithm must be an object, not {shown(raw)}")
        valid = (*_MERGED, *_ROTATING)
        name = Keys(raw, label).choice("name", dict(zip(valid, valid, strict=True)), "")
        if name not in _ROTATING:
            continue
        algorithm = Keys(raw, f"{label}{name}: ").with_defaults(_ROTATING[name])
        for key in _ONLINE:
            if algorithm.raw.get(key) not in (False, None):
                raise InputError(
                    f"{algorithm.label}{key}={shown(algorithm.raw[key])}: activations that are "
                    "rotated at run time are not served; valid: False, with rotations that are "
                    "merged into weights"
                )
        if online := algorithm.nested("online_config"):
            online.require_neutral(online_rotation_layers=(None, []))


def _parents(module: str) -> list[str]:
    """A module's name and those of the modules that it is a part of, itself first."""
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]


def _matcher(patterns: tuple[str, ...]) -> Callable[[str], bool]:
    """Returns whether a name is like one of these: thousands are names of experts, no patterns."""
    wild = [pattern for pattern in patterns if set("*?[") & set(pattern)]
    exact = frozenset(patterns).difference(wild)
    return lambda name: name in exact or any(fnmatch.fnmatchcase(name, pattern) for pattern in wild)
