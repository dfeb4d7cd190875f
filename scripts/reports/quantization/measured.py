"""Measures the page on quantization, a part at a time, by the commands that a user has."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import absl
import numpy as np
from safetensors.numpy import load_file, save_file

from configs.kinds import params
from configs.precision import FORMATS
from configs.recipes import few_bits
from inference.checkpoints import manifest, resolve
from inference.files import cache_directory
from scripts.reports.pages.results import Results, Row

SMALL = "small"
PUBLISHED = "smollm2-135m", "gemma3-270m"
TOKENS, WINDOW = 60_000, 512  # of the text that is scored
CALIBRATION = argparse.__file__  # a text that no model here is scored on
# Code, which the small model was trained on; not this.
HELD_OUT = Path(absl.__file__).parent
REPEATS, PAIRS = 5, 3
OUTLIER = 50.0  # how much larger one feature of the activations is made, that of the largest weight

# By row: flags of `scripts.quantize`.
_RTN = ["--method=rtn"]
KINDS = {
    "int8": [*_RTN, "--format=int8"],
    "w8a8": [*_RTN, "--format=w8a8"],
    "w8a8, SmoothQuant": ["--method=smoothquant", "--format=w8a8"],
    "LLM.int8()": ["--method=llm_int8"],
    "fp8": [*_RTN, "--format=fp8"],
    "w8a8_fp8": [*_RTN, "--format=w8a8_fp8"],
    "mxfp4": [*_RTN, "--format=mxfp4"],
    **{
        f"int{bits} g{group}, {label}": [f"--method={method}", f"--bits={bits}", f"--group={group}"]
        for group in (64, 128)
        for bits in (4, 3)
        for label, method in (("rtn", "rtn"), ("AWQ", "awq"), ("GPTQ", "gptq"), ("QAT", "qat"))
    },
    "int4 g64 asymmetric, rtn": [*_RTN, "--bits=4", "--group=64", "--asymmetric"],
    "int4 g64, rotation and GPTQ": ["--method=gptq", "--rotate", "--bits=4", "--group=64"],
}
# The published weights are in blocks of 4 bits and 32 numbers: eight bits prove nothing. SmolLM2's
# rows of 576 have no groups of 128.
_GROUPS = {"smollm2-135m": "g64, ", "gemma3-270m": "g128, "}
# Of a model with one feature much larger than others: eight bits of weights and activations.
OUTLIERS = {
    "w8a8, absmax": KINDS["w8a8"],
    "LLM.int8()": KINDS["LLM.int8()"],
    "w8a8, SmoothQuant": KINDS["w8a8, SmoothQuant"],
    "w8a8, rotation": [*_RTN, "--rotate", "--format=w8a8"],
}
FORMAT_FLAGS = "int8", "w8a8", "fp8", "int4", "int4_asym", "int3", "mxfp4", "file"  # of --weights
BATCHES = 1, 8, 32

QUALITY_ROWS = [f"{SMALL}: {kind}" for kind in ("full", *KINDS)] + [
    f"{model}: {kind}"
    for model in PUBLISHED
    for kind in ("full", *KINDS)
    if kind == "full" or (_GROUPS[model] in kind and "QAT" not in kind)
]
OUTLIER_ROWS = "full", *OUTLIERS
SPEED_ROWS = [f"{model}: {format}" for model in PUBLISHED for format in FORMAT_FLAGS]


def _run(script: str, *args: str) -> Row:
    """Returns the JSON object that a script prints."""
    command = [sys.executable, "-m", f"scripts.{script}", *args, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    output: Row = json.loads(done.stdout)
    return output


def _path(model: str) -> str:
    """Returns a row's model as `--model` takes it: the small one lies where training puts it."""
    return model if model != SMALL else str(cache_directory.trained(SMALL))


# --- quality --------------------------------------------------------------------------------------


def quality(results: Results, rows: Sequence[str]) -> None:
    """Measures bytes, perplexity, and the divergence from the full model."""
    models = dict.fromkeys(row.partition(": ")[0] for row in rows)
    missing = [f"{m}: full" for m in models if f"{m}: full" not in results.parts.get("quality", {})]
    for row in dict.fromkeys([*missing, *rows]):
        model, _, kind = row.partition(": ")
        path = _path(model)
        figures = _quality(path) if kind == "full" else _quantized(path, KINDS[kind])
        results.put("quality", row, **figures)


def outlier(results: Results, rows: Sequence[str]) -> None:
    """Measures the small model with one feature fifty times as large, which changes no answer."""
    with tempfile.TemporaryDirectory() as folder:
        planted = str(_plant(Path(folder) / "planted"))
        missing = [] if "full" in results.parts.get("outlier", {}) else ["full"]
        for kind in dict.fromkeys([*missing, *rows]):
            figures = _quality(planted) if kind == "full" else _quantized(planted, OUTLIERS[kind])
            results.put("outlier", kind, **figures)


def _plant(target: Path) -> Path:
    """Writes the small model with norms that make one feature larger, and matrices that undo it."""
    _run("convert", f"--model={_path(SMALL)}", "--to=hf", f"--output={target}")
    (target / manifest.NAME).unlink()  # whose digests are of the model as it was
    path = target / "model.safetensors"
    tensors = load_file(path)
    readers = {
        "input_layernorm": [f"self_attn.{part}_proj" for part in "qkv"],
        "post_attention_layernorm": ["mlp.gate_proj", "mlp.up_proj"],
    }
    for name in [name for name in tensors if name.split(".")[-2] in readers]:
        layer, norm, _ = name.rsplit(".", 2)
        feature = int(np.abs(tensors[name]).argmax())
        tensors[name] = _scaled(tensors[name], feature, OUTLIER)
        for reader in readers[norm]:
            matrix = f"{layer}.{reader}.weight"
            tensors[matrix] = _scaled(tensors[matrix], feature, 1 / OUTLIER)
    save_file(tensors, path, {"format": "pt"})
    return target


def _scaled(tensor: np.ndarray, feature: int, factor: float) -> np.ndarray:
    """Multiplies one feature of the last axis."""
    scaled = tensor.copy()
    scaled[..., feature] *= np.float32(factor)
    return scaled


def _quantized(model: str, flags: Sequence[str]) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "quantized")
        # Rounding reads no text, and training reads a library's sources.
        reads_text = "--method=rtn" not in flags and "--method=qat" not in flags
        text = [f"--calibrate={CALIBRATION}"] if reads_text else []
        done = _run("quantize", f"--model={model}", *flags, *text, f"--output={output}")
        return _quality(output, model) | {"seconds": done["seconds"]}


def _quality(model: str, against: str | None = None) -> Row:
    """Scores a model in float32, so that weights alone are rounded, and what their format rounds.
    The small model runs by XLA's products, which round activations only where a format says so; the
    others are scored as they are served.
    """
    flags = [f"--model={model}", f"--max_tokens={TOKENS}", f"--window={WINDOW}"]
    if against is not None:
        flags.append(f"--against={against}")
    flags.append("--set=model.dtype=float32")
    if {model, against} & set(PUBLISHED):
        return _figures(_run("evaluate", *flags))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
        text.write("\n".join(path.read_text() for path in sorted(HELD_OUT.rglob("*.py"))))
        text.flush()
        flags += ["--set=engine.kernels.linear=reference", f"--text={text.name}"]
        return _figures(_run("evaluate", *flags))


def _figures(evaluation: Row) -> Row:
    keys = "perplexity", "tokens", "kl", "agreement", "weight_bytes"
    return {key: evaluation[key] for key in keys if key in evaluation}


# --- memory ---------------------------------------------------------------------------------------


def memory(results: Results, rows: Sequence[str]) -> None:
    """Measures resident bytes while weights of either format are loaded and used, medians of pairs;
    bytes of the matrices that differ; and the peak of a calibration.
    """
    for model in rows:
        with tempfile.TemporaryDirectory() as folder:
            native = str(Path(folder) / "native")
            _run("convert", f"--model={model}", f"--output={native}")
            pairs = [(_resident(native, "bfloat16"), _resident(native, "int4"))
                     for _ in range(PAIRS)]  # fmt: skip
        saved = {
            moment: statistics.median(full[moment] - narrow[moment] for full, narrow in pairs)
            for moment in ("loading", "running")
        }
        with tempfile.TemporaryDirectory() as folder:
            flags = [f"--model={model}", *KINDS["int4 g64, GPTQ"], f"--calibrate={CALIBRATION}"]
            command = [sys.executable, "-m", "scripts.quantize", *flags, f"--output={folder}/new"]
            with subprocess.Popen(command) as process:
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
        peak = usage.ru_maxrss * 1024
        results.put("memory", model, calibration=peak, **saved, **_covered(model))


def _covered(model: str) -> dict[str, float]:
    """Counts bytes in bfloat16 of the matrices that have four bits, and those that tables save."""
    config = resolve.resolve(model).config
    formats = few_bits.formats(config, "int4")
    declared = {"/".join(path): info for path, info in params.leaves(config.parameters())}
    tables = {path for path in formats if formats[path] == "int8"}
    tables_saved = sum(
        2 * declared[path].elements
        - FORMATS["int8"].bytes_for(declared[path].elements, declared[path].shape[-1])
        for path in tables
    )
    matrices = sum(2 * declared[path].elements for path in formats if path not in tables)
    whole = 2 * sum(info.elements for info in declared.values())
    return {"matrices": matrices, "tables_saved": tables_saved, "model": whole}


def _resident(model: str, weights: str) -> dict[str, int]:
    command = [sys.executable, "-m", "scripts.reports.quantization.resident", model, weights]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    peaks: dict[str, int] = json.loads(done.stdout)
    return peaks


# --- speed ----------------------------------------------------------------------------------------


def speed(results: Results, rows: Sequence[str]) -> None:
    """Times decode steps of the engine that a user gets, next to bfloat16's of the same minutes."""
    for row in rows:
        model, _, format = row.partition(": ")
        pairs = [(_steps(model, "bfloat16"), _steps(model, format)) for _ in range(PAIRS)]
        figures: Row = {}
        for nth, count in enumerate(BATCHES):
            full, narrow = ([steps[nth] for steps in side] for side in zip(*pairs, strict=True))
            figures[f"{count}"] = {
                "measured_s": _median(narrow, "measured_s"),
                "predicted_s": _median(narrow, "predicted_s"),
                "predicted": _median_ratio(narrow, full, "predicted_s"),
                "times": _median_ratio(narrow, full, "measured_s"),
                "step_bytes": narrow[-1]["step_bytes"],
            }
        results.put("speed", row, rows=figures)


def _median(steps: Iterable[Row], key: str) -> float:
    return statistics.median(step[key] for step in steps)


def _median_ratio(steps: Iterable[Row], baselines: Iterable[Row], key: str) -> float:
    pairs = zip(baselines, steps, strict=True)
    return statistics.median(baseline[key] / step[key] for baseline, step in pairs)


def _steps(model: str, format: str) -> list[Row]:
    points = ",".join(f"{count}x256" for count in BATCHES)
    output = _run(
        "bench", f"--model={model}", f"--weights={format}", f"--decode={points}",
        f"--repeats={REPEATS}",
    )  # fmt: skip
    steps: list[Row] = output["decode_steps"]
    return steps
