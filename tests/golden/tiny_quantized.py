"""Tiny checkpoints in the formats of others, and the logits that transformers computes of them.

`quantized/CASE/` is a directory as such a model is published, and `expected.npz` beside it holds
for prompts 0 and 1 `tokens_0` i32[T] and `logits_0` f32[T, V] at every position, and as
`weight/NAME` the first module's weight as it is dequantized, f32[F, D].

`compressed-tensors` packs and loads its own (the package, `loguru` and `accelerate` belong to the
environment), transformers dequantizes `fp8`. AWQ's and GPTQ's packages compute on GPUs alone: their
checkpoints are packed here a number at a time, as the formats are described, and transformers
computes with the numbers that went in. Scales are float32 where the package computes with them in
their own type, so that nothing is rounded on the way.
"""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tiny_families import Case

_VOCAB, _PROMPTS, _STD = 37, (75, 29), 0.2
_FIRST = "model.layers.0.self_attn.q_proj"
_FIELDS = {
    "vocab_size": _VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
_PLAIN = {"symmetric": True, "dynamic": False, "observer": "minmax"}
_TOKEN = {"num_bits": 8, "symmetric": True, "dynamic": True, "strategy": "token"}
# Of compressed-tensors: format, weights, activations.
_COMPRESSED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "ct-int4-g32": (
        "pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": 32}, None,
    ),
    "ct-int4-g64-asym": (
        "pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False}, None,
    ),
    "ct-int3-channel": ("pack-quantized", {"num_bits": 3, "strategy": "channel"}, None),
    "ct-int8-packed": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, None),
    "ct-w8a8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, _TOKEN),
    "ct-fp8-channel": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, None,
    ),
    "ct-w8a8-fp8-tensor": (
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"},
        _TOKEN | {"type": "float"},
    ),
}  # fmt: skip
# Of GPTQ: bits, group, symmetric, in an order of its own, `checkpoint_format`.
_GPTQ = {
    "gptq-int4-g32": (4, 32, True, False, "gptq"),
    "gptq-int4-g64-asym-v2": (4, 64, False, False, "gptq_v2"),
    "gptq-int3-g32-asym": (3, 32, False, False, "gptq"),
    "gptq-int4-order": (4, 32, False, True, "gptq"),
    "gptq-int8-rows": (8, -1, True, False, "gptq"),
}


def write(root: pathlib.Path, chosen: Callable[[Case], bool] | None = None) -> None:
    """Writes all cases under `root`, whatever families are chosen: they are of Llama's alone."""
    for seed, name in enumerate(_COMPRESSED):
        _write(root, name, seed, _compressed_tensors)
    for seed, name in enumerate(_GPTQ):
        _write(root, name, seed, _gptq)
    _write(root, "awq-g32", 0, _awq)
    _write(root, "fp8-blocks", 0, _fp8)


@torch.no_grad()
def _write(root: pathlib.Path, name: str, seed: int, quantize: Callable) -> None:
    """`quantize(name, weights)` gives tensors, the configuration and, where transformers cannot
    load these, the numbers that they stand for.
    """
    generator = np.random.default_rng(seed)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_FIELDS))
    for parameter in model.parameters():
        mean = 1.0 if parameter.ndim == 1 else 0.0
        values = mean + _STD * generator.standard_normal(parameter.shape)
        parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    state = {key: value.clone() for key, value in model.state_dict().items()}
    linear = [key for key in state if key.endswith("_proj.weight")]
    tensors, described, numbers = quantize(name, {key: state[key] for key in linear}, generator)
    directory = root / "quantized" / name
    directory.mkdir(parents=True, exist_ok=True)
    rest = {key: value for key, value in state.items() if key not in linear}
    whole = {key: value.contiguous() for key, value in (rest | tensors).items()}
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict() | {
        "architectures": ["LlamaForCausalLM"], "dtype": "float32",
        "quantization_config": described,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    expected: dict[str, Any] = {}
    if numbers is None:
        model, numbers = _loaded(directory, described)
    else:
        model.load_state_dict(rest | numbers)
    for i, length in enumerate(_PROMPTS):
        tokens = generator.integers(0, _VOCAB, length)
        logits = model.eval()(torch.from_numpy(tokens)[None]).logits[0]
        expected |= {f"tokens_{i}": tokens.astype(np.int32), f"logits_{i}": logits.numpy()}
    expected[f"weight/{_FIRST}"] = numbers[f"{_FIRST}.weight"].float().numpy()
    np.savez_compressed(directory / "expected.npz", **expected)
    error = (numbers[f"{_FIRST}.weight"] - state[f"{_FIRST}.weight"]).abs().max().item()
    print(f"quantized/{name}: deviation {logits.std():.2f}, weights moved by up to {error:.3f}")


def _loaded(directory: pathlib.Path, described: dict[str, Any]):
    """The model as transformers loads it, and its weights."""
    options = {}
    if described["quant_method"] == "fp8":
        options = {"quantization_config": transformers.FineGrainedFP8Config(dequantize=True)}
    elif described["quant_method"] == "compressed-tensors":
        own = transformers.CompressedTensorsConfig(**described | {"dequantize": True})
        options = {"quantization_config": own}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", **options
    )
    return model, dict(model.state_dict())


def _span(weight: torch.Tensor, group: int) -> torch.Tensor:
    """[F, G, elements of a group]."""
    return weight.reshape(len(weight), -1, group)


def _compressed_tensors(name, weights, generator):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

    format, own, activations = _COMPRESSED[name]
    group = {"targets": ["Linear"], "weights": _PLAIN | own, "format": format}
    group |= {} if activations is None else {"input_activations": activations}
    config = QuantizationConfig(
        config_groups={"group_0": group}, format=format, ignore=["re:.*lm_head"],
        quantization_status="compressed",
    )  # fmt: skip
    scheme: QuantizationScheme = config.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(format)
    tensors = {}
    for key, weight in weights.items():
        low, high, levels = _levels(weight, own)
        if own.get("symmetric", True):
            scale, zero = torch.maximum(-low, high) / levels[1], torch.zeros_like(low)
        else:
            scale = (high - low) / (levels[1] - levels[0])
            zero = (levels[0] - low / scale).round().clamp(*levels)
        state = {"weight": weight, "weight_scale": scale}
        if not own.get("symmetric", True):
            state["weight_zero_point"] = zero.to(torch.int8)
        module = key.removesuffix(".weight")
        for part, value in compressor.compress(state, scheme).items():
            tensors[f"{module}.{part}"] = value
    return tensors, json.loads(config.model_dump_json()), None


def _levels(weight, own):
    """Least and largest number of each group, and the least and largest integer."""
    if own["strategy"] == "tensor":
        low, high = weight.min()[None], weight.max()[None]
    else:
        spans = _span(weight, own.get("group_size", weight.shape[1]))
        low, high = spans.amin(-1), spans.amax(-1)
    if own.get("type") == "float":
        return low, high, (-448.0, 448.0)
    half = 1 << (own["num_bits"] - 1)
    return low, high, (-half, half - 1)


def _rounded(weight: torch.Tensor, bits: int, group: int, symmetric: bool):
    """Integers from 0 on, and each group's scale (of float16's numbers) and zero point."""
    spans, top = _span(weight, group), (1 << bits) - 1
    if symmetric:
        scale = spans.abs().amax(-1) * 2 / top
        zero = torch.full_like(scale, 1 << (bits - 1))
    else:
        low, high = spans.amin(-1).clamp(max=0), spans.amax(-1).clamp(min=0)
        scale = (high - low) / top
        zero = (-low / scale).round()
    scale = scale.half().float()
    integers = ((spans / scale[..., None]).round() + zero[..., None]).clamp(0, top)
    numbers = (integers - zero[..., None]) * scale[..., None]
    return integers.reshape(weight.shape).int(), scale, zero.int(), numbers.reshape(weight.shape)


def _words(integers: np.ndarray, bits: int) -> np.ndarray:
    """Down the columns [N, F]: `bits` of each integer behind those of the one before it, in words
    of 32.
    """
    N, F = integers.shape
    found = np.zeros((N * bits // 32, F), np.uint32)
    for column in range(F):
        whole = sum(int(value) << bits * n for n, value in enumerate(integers[:, column]))
        for word in range(len(found)):
            found[word, column] = whole >> 32 * word & 0xFFFFFFFF
    return found.view(np.int32)


def _gptq(name, weights, generator):
    bits, group, symmetric, has_order, version = _GPTQ[name]
    tensors, numbers = {}, {}
    for key, weight in weights.items():
        module, width = key.removesuffix(".weight"), weight.shape[1]
        size = width if group == -1 else group
        order = torch.arange(width)
        if has_order:
            order = torch.from_numpy(generator.permutation(width))
        integers, scale, zero, own = _rounded(weight[:, order], bits, size, symmetric)
        places = torch.argsort(order)  # of each column among the ordered
        stored = (zero - int(version == "gptq")) % (1 << bits)
        numbers[key] = own[:, places]
        tensors |= {
            f"{module}.qweight": torch.from_numpy(_words(integers[:, places].T.numpy(), bits)),
            f"{module}.qzeros": torch.from_numpy(_words(stored.numpy(), bits).T),
            f"{module}.scales": scale.T.half(),
            f"{module}.g_idx": (places // size).int(),
        }
    config = {
        "quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric,
        "desc_act": has_order, "checkpoint_format": version, "lm_head": False,
    }  # fmt: skip
    return tensors, config, numbers


def _awq(name, weights, generator):
    """Eight columns a word, those of even numbers below those of odd ones."""
    tensors, numbers = {}, {}

    def packed(columns: torch.Tensor) -> torch.Tensor:
        found = np.zeros((len(columns), columns.shape[1] // 8), np.uint32)
        for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            found |= columns[:, column::8].numpy().astype(np.uint32) << np.uint32(4 * place)
        return torch.from_numpy(found.view(np.int32))

    for key, weight in weights.items():
        module = key.removesuffix(".weight")
        integers, scale, zero, numbers[key] = _rounded(weight, 4, 32, symmetric=False)
        tensors |= {
            f"{module}.qweight": packed(integers.T),
            f"{module}.qzeros": packed(zero.T),
            f"{module}.scales": scale.T.half(),
        }
    config = {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None,
    }  # fmt: skip
    return tensors, config, numbers


def _fp8(name, weights, generator):
    """DeepSeek-V3's: 32 x 64 numbers share a scale."""
    tensors, block = {}, (32, 64)
    for key, weight in weights.items():
        rows, columns = (size // own for size, own in zip(weight.shape, block, strict=True))
        cells = weight.reshape(rows, block[0], columns, block[1])
        scale = cells.abs().amax((1, 3)) / 448.0
        codes = (cells / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
        tensors |= {key: codes, f"{key.removesuffix('.weight')}.weight_scale_inv": scale}
    config = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": list(block),
    }  # fmt: skip
    return tensors, config, None
