"""Measures the page on quantization, a part at a time, by the commands that a user has."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import absl
import numpy as np
from safetensors.numpy import load_file, save_file

from configs.kinds import params
from configs.precision import FORMATS
from configs.recipes import few_bits
from inference.checkpoints import resolve
from inference.checkpoints.native import manifest
from scripts.reports.pages.results import Results

SMALL = "small"
MODELS = SMALL, "smollm2-135m", "gemma3-270m"
TOKENS, WINDOW = 60_000, 512  # of the text that is scored
CALIBRATION = argparse.__file__  # a text that no model here is scored on
HELD_OUT = Path(
    absl.__file__
).parent  # code, as the small model knows it, that it was not trained on
REPEATS = 5
OUTLIER = 50.0  # how much larger one feature of the activations is made, that of the largest weight

# By row: what `scripts.quantize` is asked for.
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
# The weights that these were published with are in blocks of 4 bits and 32 numbers: eight bits
# prove nothing. SmolLM2's rows of 576 have no groups of 128.
SHIPPED = {
    "smollm2-135m": [kind for kind in KINDS if "g64, " in kind and "QAT" not in kind],
    "gemma3-270m": [kind for kind in KINDS if "g128, " in kind and "QAT" not in kind],
}
# Of a model with one feature much larger than others: eight bits of weights and activations.
OUTLIERS = {
    "w8a8, absmax": KINDS["w8a8"],
    "LLM.int8()": KINDS["LLM.int8()"],
    "w8a8, SmoothQuant": KINDS["w8a8, SmoothQuant"],
    "w8a8, rotation": [*_RTN, "--rotate", "--format=w8a8"],
}
# By row: what `--weights` says.
SPEEDS = "bfloat16", "int8", "w8a8", "fp8", "int4", "int4_asym", "int3", "mxfp4", "file"
ROWS = 1, 8, 32


def _run(script: str, *args: str) -> dict[str, Any]:
    """What a script prints as JSON."""
    command = [sys.executable, "-m", f"scripts.{script}", *args, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def named(model: str) -> str:
    """What `--model` takes for a row's model: the small one lies where training puts it."""
    if model != SMALL:
        return model
    from inference.files import cache_directory

    return str(cache_directory.path() / "trained" / SMALL)


# --- quality --------------------------------------------------------------------------------------


def quality(results: Results, rows: Collection[str], models: Collection[str] = MODELS) -> None:
    """Bytes, perplexity, and how far laws of the next token are from the full model's."""
    for model in models:
        if f"{model}: full" not in results.parts.get("quality", {}):
            results.put("quality", f"{model}: full", **_quality(named(model)))
        for kind in SHIPPED.get(model, KINDS):
            if kind in (rows or (kind,)):
                found = _quantized(named(model), KINDS[kind])
                results.put("quality", f"{model}: {kind}", **found)


def outlier(results: Results, rows: Collection[str]) -> None:
    """The small model with a feature that is fifty times as large, which changes no answer."""
    with tempfile.TemporaryDirectory() as folder:
        planted = str(_planted(Path(folder) / "planted"))
        if "full" not in results.parts.get("outlier", {}):
            results.put("outlier", "full", **_quality(planted))
        for kind, asked in OUTLIERS.items():
            if kind in (rows or (kind,)):
                results.put("outlier", kind, **_quantized(planted, asked))


def _planted(target: Path) -> Path:
    """The small model where norms make one feature larger, and what reads them makes it small."""
    _run("convert", f"--model={named(SMALL)}", "--to=hf", f"--output={target}")
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
    """With one feature of the last axis multiplied."""
    found = tensor.copy()
    found[..., feature] *= np.float32(factor)
    return found


def _quantized(model: str, asked: Collection[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        output = str(Path(folder) / "quantized")
        reads = not {"--method=rtn", "--method=qat"} & {
            *asked
        }  # training reads a library's sources
        text = [f"--calibrate={CALIBRATION}"] if reads else []
        done = _run("quantize", f"--model={model}", *asked, *text, f"--output={output}")
        return _quality(output, model) | {"seconds": done["seconds"]}


def _quality(model: str, against: str | None = None) -> dict[str, Any]:
    """In float32, so that nothing but weights (and what their format rounds) is rounded; by XLA's
    products, which round activations only where a format says so. The others are scored as they
    are served.
    """
    asked = [f"--model={model}", f"--max_tokens={TOKENS}", f"--window={WINDOW}"]
    if against is not None:
        asked.append(f"--against={against}")
    asked.append("--set=model.dtype=float32")
    if {model, against} & set(SHIPPED):
        return _figures(_run("evaluate", *asked))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as text:
        text.write("\n".join(path.read_text() for path in sorted(HELD_OUT.rglob("*.py"))))
        text.flush()
        asked += ["--set=engine.kernels.linear=reference", f"--text={text.name}"]
        return _figures(_run("evaluate", *asked))


def _figures(found: dict[str, Any]) -> dict[str, Any]:
    wanted = "perplexity", "tokens", "kl", "agreement", "weight_bytes"
    return {name: found[name] for name in wanted if name in found}


# --- memory ---------------------------------------------------------------------------------------


def memory(results: Results, rows: Collection[str], models: Collection[str] = MODELS[1:]) -> None:
    """Resident bytes while weights of either format are loaded and used, medians of three, beside
    those of the matrices that differ; and the peak of a calibration.
    """
    for model in models:
        with tempfile.TemporaryDirectory() as folder:
            native = str(Path(folder) / "native")
            _run("convert", f"--model={model}", f"--output={native}")
            pairs = [[_resident(native, each) for each in ("bfloat16", "int4")] for _ in range(3)]
        found = {
            f"{when}": statistics.median(full[when] - own[when] for full, own in pairs)
            for when in ("loading", "running")
        }
        with tempfile.TemporaryDirectory() as folder:
            asked = [f"--model={model}", *KINDS["int4 g64, GPTQ"], f"--calibrate={CALIBRATION}"]
            command = [sys.executable, "-m", "scripts.quantize", *asked, f"--output={folder}/new"]
            with subprocess.Popen(command) as process:
                _, status, used = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
        found["calibration"] = used.ru_maxrss * 1024
        results.put("memory", model, **found, **_covered(model))


def _covered(model: str) -> dict[str, float]:
    """Bytes in bfloat16 of the matrices that have four bits, and what tables, of eight, save."""
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
    found: dict[str, int] = json.loads(done.stdout)
    return found


# --- speed ----------------------------------------------------------------------------------------


def speed(results: Results, rows: Collection[str], models: Collection[str] = MODELS[1:]) -> None:
    """Decode steps of the engine that a user gets, each beside bfloat16's of the same minutes."""
    for model in models:
        for format in SPEEDS:
            if format not in (rows or (format,)) or format == "bfloat16":
                continue
            pairs = [[_steps(model, each) for each in ("bfloat16", format)] for _ in range(3)]
            found: dict[str, Any] = {}
            for nth, count in enumerate(ROWS):
                ratios = [base[nth]["measured_s"] / own[nth]["measured_s"]
                          for base, own in pairs]  # fmt: skip
                own = pairs[-1][1][nth]
                found[f"{count}"] = {
                    "measured_s": statistics.median(each[1][nth]["measured_s"] for each in pairs),
                    "predicted_s": statistics.median(each[1][nth]["predicted_s"] for each in pairs),
                    "predicted": statistics.median(
                        each[0][nth]["predicted_s"] / each[1][nth]["predicted_s"] for each in pairs
                    ),
                    "times": statistics.median(ratios),
                    "step_bytes": own["step_bytes"],
                }
            results.put("speed", f"{model}: {format}", rows=found)


def _steps(model: str, format: str) -> list[dict[str, Any]]:
    points = ",".join(f"{count}x256" for count in ROWS)
    found = _run(
        "bench", f"--model={model}", f"--weights={format}", f"--decode={points}",
        f"--repeats={REPEATS}",
    )  # fmt: skip
    steps: list[dict[str, Any]] = found["decode_steps"]
    return steps


def in_order(parts: dict[str, dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows that are measured today, in the order of their declaration."""
    declared: dict[str, Sequence[str]] = {
        "quality": [f"{model}: {kind}" for model in MODELS for kind in ("full", *KINDS)],
        "outlier": ["full", *OUTLIERS],
        "memory": MODELS[1:],
        "speed": [f"{model}: {format}" for model in MODELS[1:] for format in SPEEDS],
    }
    for part, names in declared.items():
        if found := {name: parts[part][name] for name in names if name in parts.get(part, {})}:
            yield part, found
