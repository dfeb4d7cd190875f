"""The readers of `quantization_config`, by the method that it names."""

from collections.abc import Callable, Mapping

from configs.errors import InputError, shown
from inference.checkpoints.hf.quantized import modelopt, schemes
from inference.checkpoints.hf.quantized.schemes import METHODS, Find, Quantization
from inference.families.shared.config_keys import Keys

_READERS: Mapping[str, Callable[[Keys], Find]] = {
    "compressed-tensors": schemes.compressed_tensors,
    "awq": schemes.awq,
    "gptq": schemes.gptq,
    "fp8": schemes.fp8,
    "modelopt": modelopt.modelopt,
    "quark": modelopt.quark,
}


def read(value: object) -> Quantization:
    """What a `quantization_config` says; raises an `InputError` that names an unsound key."""
    keys = Keys({"quantization_config": value}).nested("quantization_config")
    assert keys is not None
    method = keys.raw.get("quant_method")
    method = "modelopt" if method in modelopt.METHODS else method
    if not isinstance(method, str) or method not in _READERS:
        raise InputError(
            f"quantization_config: quant_method={shown(method)} is not served; valid: "
            f"{', '.join(METHODS)}, and mxfp4 of gpt-oss; or use the unquantized repository"
        )
    return Quantization(method, _READERS[method](keys))
