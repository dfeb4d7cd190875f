"""Converts a checkpoint: python -m scripts.convert --model=smollm2-135m --output=DIR."""

from scripts import interrupts  # noqa: F401

# isort: split
import contextlib
import time
from collections.abc import Sequence

from absl import flags

from configs.errors import InputError
from configs.recipes import smaller_caches
from inference.checkpoints import new_directory
from inference.text.tokenizer import MissingTokenizer
from scripts import common
from scripts.flags import adapter_flags, deployment_flags, output_flag

_OUTPUT = output_flag.OUTPUT
_TO = flags.DEFINE_enum(
    "to", "orbax", ["orbax", "hf", "gguf"], "Format: our native one, transformers' or llama.cpp's."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, ["float32", "bfloat16", "q8_0", "q5_0", "q4_0", "q4_1"],
    "Type of the weights, in blocks with --to=gguf only; default: as they are stored.",
)  # fmt: skip
_MAX_SHARD_GB = flags.DEFINE_float("max_shard_gb", 5.0, "Largest safetensors file of --to=hf.")
_KV_HEADS = flags.DEFINE_integer(
    "kv_heads", None, "Key/value heads of each layer, means of those that there are."
)
_KV_SHARE = flags.DEFINE_integer(
    "kv_share", None, "Layers that share one cache, whose projections are the mean of theirs."
)
_PACK_HEAD = flags.DEFINE_bool(
    "pack_head", False, "Keep the few bits of a head in --to=hf, where vLLM on a CPU reads none."
)
for _module in (common, adapter_flags, output_flag):
    flags.adopt_module_key_flags(_module)


def main(_: Sequence[str]) -> None:
    if not _OUTPUT.value:
        raise InputError("--output=DIR is needed: the directory to write, or the .gguf file")
    if not 1e-4 <= _MAX_SHARD_GB.value <= 1e6:  # NaN is neither
        raise InputError(f"--max_shard_gb is from 0.0001 to 1000000, not {_MAX_SHARD_GB.value}")
    target, is_file = new_directory.target(_OUTPUT.value), _TO.value == "gguf"
    if is_file != (target.suffix == ".gguf"):
        raise InputError(f"--output={target}: names that end in .gguf are those of --to=gguf")
    if not is_file and _DTYPE.value not in (None, "float32", "bfloat16"):
        raise InputError(f"--dtype={_DTYPE.value} goes with --to=gguf; valid: float32, bfloat16")
    from inference.checkpoints import convert  # brings JAX
    from inference.checkpoints.gguf.export import gguf_export

    resolved, config = common.named_config({})
    if deployment_flags.MESH.value:
        raise InputError("a conversion lies on no chips: leave --mesh out")
    if config.model != resolved.config or deployment_flags.WEIGHTS.value is not None:
        raise InputError("a conversion changes no field of the model; --dtype chooses the type")
    smaller = config.model
    if _KV_HEADS.value is not None:
        smaller = smaller_caches.with_kv_heads(smaller, _KV_HEADS.value)
    if _KV_SHARE.value is not None:
        smaller = smaller_caches.shared_by(smaller, _KV_SHARE.value)
    if is_file and smaller != config.model:
        raise InputError(
            "--kv_heads and --kv_share go with --to=orbax or hf: convert what they made"
        )
    if _PACK_HEAD.value and _TO.value != "hf":
        raise InputError(f"--pack_head goes with --to=hf: --to={_TO.value} keeps every format")
    start = time.monotonic()
    checkpoint = common.open_checkpoint(resolved)
    with contextlib.suppress(MissingTokenizer):
        checkpoint.load_tokenizer()  # one that cannot be read is no use
    if (adapter := adapter_flags.read(config.model)) is not None:
        from inference.adapters import merged

        checkpoint = merged.checkpoint(checkpoint, adapter)
    with common.bars() as progress:
        if is_file:
            gguf_export.write(checkpoint, target, _DTYPE.value, progress)
        else:
            convert.convert(
                checkpoint, target, _TO.value, _DTYPE.value, int(_MAX_SHARD_GB.value * 1e9),
                progress, smaller, _PACK_HEAD.value,
            )  # fmt: skip
    seconds = time.monotonic() - start
    files = [target, *target.rglob("*")]
    size = sum(path.stat().st_size for path in files if path.is_file())
    name = new_directory.published(target)
    if common.JSON.value:
        result = {"output": name, "format": _TO.value, "bytes": size, "seconds": seconds}
        common.print_json(result, config)
    else:
        print(f"{name}: {size / 1e6:.1f} MB in {seconds:.1f} s, verified")


if __name__ == "__main__":
    common.run(main)
