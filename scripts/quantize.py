"""Weights of few bits: python -m scripts.quantize --method=gptq --bits=4 --output=DIR."""

from scripts import interrupts  # noqa: F401

# isort: split
import collections
import dataclasses
import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import flags

from configs.engine import Config
from configs.errors import InputError
from configs.recipes import few_bits
from inference.checkpoints import new_directory
from inference.files import staging, user_files
from scripts import common
from scripts.flags import output_flag
from scripts.modes import quantize_training, train_heads

if TYPE_CHECKING:
    from inference.checkpoints.checkpoint import Checkpoint

_OUTPUT = output_flag.OUTPUT
_METHOD = flags.DEFINE_string(
    "method", "rtn",
    "rtn (each number to the nearest), percentile (groups are clipped), smoothquant, awq (factors "
    "move between matrices), gptq (columns make up for those before), llm_int8 (outliers apart), "
    "qat (trained, --set training.steps=300, then rounded).",
)  # fmt: skip
_BITS = flags.DEFINE_integer("bits", 4, "Of an integer: 8, 4 or 3.")
_GROUP = flags.DEFINE_integer(
    "group", None,
    "Numbers of a row that share a scale: 128, 64 or 32; default: of each matrix the most that its "
    "rows are whole groups of.",
)  # fmt: skip
_ASYMMETRIC = flags.DEFINE_bool("asymmetric", False, "Groups have zero points.")
_FORMAT = flags.DEFINE_string(
    "format", None, "Instead of --bits, --group and --asymmetric: fp8, w8a8, w8a8_fp8, mxfp4, ..."
)
_ROTATE = flags.DEFINE_bool("rotate", False, "The residual stream is turned before (QuaRot).")
_CALIBRATE = flags.DEFINE_string(
    "calibrate", None,
    "Text file that the model reads meanwhile, or 'own': what it writes by itself (the default of "
    "methods that need one; of qat it is the standard library's sources).",
)  # fmt: skip
_TOKENS = flags.DEFINE_integer(
    "tokens", 16384, "Tokens of text that the model reads; qat reads all of a text."
)
_SKIP = flags.DEFINE_list(
    "skip", [], "Parameters that stay, by path or a part of it: embed,head,layers/0,mixer/out."
)
for _module in (common, output_flag):
    flags.adopt_module_key_flags(_module)

UNREAD = common.UNREAD_BY_TRAINERS
_OWN = "own"
_PARTS = ".quantizing"  # how the name of the folder beside the output ends
_WINDOW = 512  # tokens that are read together
_MAX_BYTES = 64 << 20  # of a text


def main(_: Sequence[str]) -> None:
    if not _OUTPUT.value:
        raise InputError("--output=DIR names the directory to write")
    output = new_directory.target(_OUTPUT.value)
    common.check_unread("quantize", UNREAD)
    from inference.checkpoints import load, provenance, resolve
    from inference.layerwise.parts import Parts
    from inference.quantize import export, plan, rotation, walk
    from layers import params

    method = plan.method(_METHOD.value)
    resolved = resolve.resolve(common.model_name())
    model, is_trained = resolved.config, _METHOD.value == plan.QAT
    if model.formats:
        kinds = sorted({name for _, kinds_of_leaf in model.formats for name in kinds_of_leaf})
        raise InputError(
            f"{common.model_name()} is quantized already, in {', '.join(kinds)}: name the model "
            "that it was made of"
        )
    if common.settings_asked() and not is_trained:
        raise InputError("quantizing changes nothing else of a model: leave --set and --mesh out")
    if is_trained and _ROTATE.value:
        raise InputError("--method=qat trains a model as it is: leave --rotate out")
    plain = rotation.untied(model) if _ROTATE.value else model
    name = _format()
    quantization = plan.Plan(
        _METHOD.value, few_bits.formats(plain, name, _SKIP.value), _ROTATE.value
    )
    start = time.monotonic()
    checkpoint = common.open_checkpoint(resolved)
    checkpoint.check_no_classifier()
    contents = checkpoint.contents()
    provenance.stages(contents.read_files())  # a damaged list is rejected before any work
    stored = load.stored_dtype(model, contents.source, contents.name_map)
    model = dataclasses.replace(model, dtype="bfloat16" if stored == "bfloat16" else "float32")
    windows = _windows(checkpoint, is_trained, method.reads_text)
    record = {
        "method": quantization.method,
        "rotates": quantization.rotates,
        "formats": dict(quantization.formats),
        "parent": provenance.weights_digest(checkpoint),
        "data": None if windows is None else hashlib.sha256(windows.tobytes()).hexdigest(),
    }
    steps = None
    if is_trained:
        assert windows is not None
        contents, record, steps = quantize_training.trained(
            checkpoint, dict(quantization.formats), windows.reshape(-1), record, output
        )
        windows = None
    parts = Parts(output.with_name(output.name + _PARTS), record)
    rounded = walk.Walk(contents, model, quantization, parts)
    with common.bars() as progress:
        rounded.run(windows, progress)
    errors = _errors(rounded, parts)
    with common.bars() as progress:
        export.write(checkpoint, rounded, parts, record, output, progress)
    parts.remove()
    if steps is not None:
        staging.discard(steps)
    published = new_directory.published(output)
    result: dict[str, Any] = {
        "output": published,
        "method": quantization.method,
        "format": name,
        "bytes_before": params.num_bytes(model.parameters()),
        "bytes": params.num_bytes(rounded.config.parameters()),
        "seconds": time.monotonic() - start,
        "errors": errors,
    }
    if common.JSON.value:
        common.print_json(result, Config(rounded.config))
        return
    for kind, error in errors.items():
        print(f"{kind}: results are off by {error:.2%}")
    print(
        f"{published}: {result['bytes_before'] / 1e6:.1f} -> {result['bytes'] / 1e6:.1f} MB of "
        f"weights by {quantization.method} to {name} in {result['seconds']:.1f} s"
    )


def _format() -> str:
    if _METHOD.value == few_bits.LLM_INT8 or _FORMAT.value is not None:
        flag_text = f"--method={few_bits.LLM_INT8}" if _FORMAT.value is None else "--format"
        for flag in (_BITS, _GROUP, _ASYMMETRIC):
            if flag.present:
                raise InputError(f"{flag_text} says all that --{flag.name} does: leave it out")
        name = _FORMAT.value or few_bits.LLM_INT8
        if (name == few_bits.LLM_INT8) != (_METHOD.value == few_bits.LLM_INT8):
            raise InputError(
                f"--method={_METHOD.value} does not go with --format={name}: "
                f"--method={few_bits.LLM_INT8} makes that format, and no other method does"
            )
        return name
    return few_bits.integers(_BITS.value, _GROUP.value, _ASYMMETRIC.value)


def _windows(checkpoint: "Checkpoint", is_trained: bool, is_needed: bool) -> np.ndarray | None:
    """What the model reads, ids [windows, tokens]; of a training all tokens in a row."""
    source = _CALIBRATE.value
    if source is None and not is_needed and not is_trained:
        return None
    if is_trained and source != _OWN:
        if _TOKENS.present:
            raise InputError("--method=qat reads all of its text: leave --tokens out")
        return _training_text(checkpoint)
    window = min(_WINDOW, checkpoint.config.max_context)
    count = _TOKENS.value // window
    if count < 1:
        raise InputError(f"--tokens is at least {window}, a window, not {_TOKENS.value}")
    if source in (_OWN, None):
        from inference.training import own_samples

        first = own_samples.opening(checkpoint.load_tokenizer())
        tokens = own_samples.write(train_heads.generator(checkpoint), first, count, window)
        return tokens.reshape(count, window).astype(np.int32)
    from inference.benchmark.quality import perplexity

    tokenizer = checkpoint.load_tokenizer()
    ids = tokenizer.encode(user_files.read_text(str(source), _MAX_BYTES), add_special=False)
    all_windows = perplexity.windows(ids, perplexity.start(tokenizer), window)
    whole = [ids_of_window for ids_of_window in all_windows if len(ids_of_window) == window]
    if len(whole) < count:
        raise InputError(
            f"--calibrate={source}: {len(ids)} tokens are {len(whole)} windows of {window}, and "
            f"--tokens={_TOKENS.value} asks for {count}: give more text, or fewer --tokens"
        )
    places = np.linspace(0, len(whole) - 1, count).round().astype(int)
    return np.asarray([whole[place] for place in places], np.int32)


def _training_text(checkpoint: "Checkpoint") -> np.ndarray:
    """All ids of --calibrate, or of the running Python's standard library, as `train` reads it."""
    from inference.training import start, texts, token_file

    documents = texts.of_file(_CALIBRATE.value) if _CALIBRATE.value else texts.standard_library()
    vocabulary = start.vocabulary(checkpoint, (), checkpoint.config.vocab_size)
    with common.bars() as progress:
        return token_file.of_texts(documents, vocabulary, progress)[0]


def _errors(rounded: Any, parts: Any) -> dict[str, float]:
    errors = collections.defaultdict(list)
    for name in rounded.names:
        for path, error in parts.figures(name).items():
            errors[path].append(error)
    return {kind: float(np.mean(errors_of_kind)) for kind, errors_of_kind in errors.items()}


if __name__ == "__main__":
    common.run(main, UNREAD)
