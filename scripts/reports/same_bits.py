"""Forty runs of the command-line app, recorded with every bit, to compare a rewrite with.

    python -m scripts.reports.same_bits record TREE OUT.json
    python -m scripts.reports.same_bits compare A.json B.json

`record` runs `python -m scripts.generate ... --json` in TREE (any checkout), a process a run, with
the interpreter that runs this file. It keeps the names of all fields, and the results, floats as
`float.hex()`; of statistics, which are times, it keeps the names, and of `config`, which spells
settings, nothing. `compare` prints one line a difference and exits with status 1, or says that the
runs are equal. Recordings are comparable where one machine made them with the same packages. Tiny
checkpoints get a tokenizer, in a copy.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from configs.engine import EngineConfig
from configs.settings.section import paths
from inference.request import FORMER_NAMES

MODELS = {
    "smollm2": "smollm2-135m", "gemma3": "gemma3-270m", "llama": "llama-gqa-tied-rope3",
    "gemma2": "gemma2-gqa-tied", "phi3": "phi3-gqa-longrope-partial", "gpt2": "gpt2-mha-tied-bare",
    "olmo2": "olmo2-mqa-bias",
}  # fmt: skip
STORY = "Once upon a time the keeper of a small lighthouse counted all the ships "
RIDGE = "".join(f"{n}: chip {n * n} waits for memory left of its ridge. " for n in range(60))
REQUESTS: dict[str, list[Any]] = {  # texts are given as --prompt, objects as lines of --input
    "one": [STORY],
    "three": [STORY, "Why is the sky blue?", RIDGE[:400]],
    "long": [RIDGE[:1200], STORY, RIDGE[300:800], STORY + "and"],
    "prefix": [RIDGE[:800] + end for end in ("So", "Then", "But a reader asks", "1", "2")],
    "window": [RIDGE, RIDGE[:2000] + "And so", STORY],
    "talk": [
        {"messages": [{"role": r, "content": f"A <|im_end|> {r}?"} for r in roles], "id": n}
        for n, roles in enumerate((["user"], ["system", "user", "assistant", "user"]))
    ],
    "crowd": [  # the first answers are short: more of the others are begun than find room
        {"prompt": f"{n}. {STORY[:40]}", "max_new_tokens": 2 if n < 4 else 40, "ignore_eos": True,
         "temperature": 0.7 * (n % 2), "seed": n, "priority": n % 3} for n in range(12)
    ],
    "mixed": [
        {"prompt": STORY},
        {"prompt": STORY, "temperature": 0.9, "top_p": 0.9, "seed": 1},
        {"prompt": STORY[:50] + "?", "temperature": 1.2, "top_k": 12, "min_p": 0.02, "seed": 2},
        {"prompt": "Ships", "repetition_penalty": 1.3, "presence_penalty": 0.5,
         "frequency_penalty": 0.3},
        {"prompt": "A", "logit_bias": {"65": 3.5, "97": -4}, "banned_token_ids": [40, 41]},
        {"prompt": STORY[9:60], "temperature": 1, "n": 3, "seed": 3},
        {"prompt": "The keeper", "beam_width": 3, "n": 2, "length_penalty": 0.6},
        {"prompt": "Lamp", "allowed_token_ids": list(range(60, 75)), "stop_token_ids": [70],
         "min_tokens": 5},
        {"prompt": "Lamp", "temperature": 1, "best_of": 3, "n": 2, "seed": 4, "stop": ["e", "on"]},
    ],
}  # fmt: skip
FREQUENT, UNKNOWN = " etaoinshrdlcumwfgypbvk.,?01234", "~"
FORMER = {"chunk_tokens": "tile_tokens", "prefill_chunks": "prefill_tiles"}  # names in older trees
# Name, which begins with the model's; requests; flags, and settings without dashes.
RUNS = """\
smollm2-greedy one --logprobs=3
smollm2-greedy-float32 one --logprobs=3 model.dtype=float32
smollm2-three three
smollm2-no-overlap three engine.overlap=false
smollm2-deterministic three --deterministic --logprobs=3
smollm2-sampled one --temperature=0.8 --top_p=0.95 --seed=1 --logprobs=0
smollm2-filters three --temperature=1.1 --top_k=20 --min_p=0.05 --seed=2 model.dtype=float32
smollm2-penalties three --repetition_penalty=1.3 --presence_penalty=0.5 --frequency_penalty=0.4 \
    --temperature=0.7 --seed=3
smollm2-mixed-deterministic mixed --deterministic model.dtype=float32
smollm2-beams three --beam_width=4 --n=3 --early_stopping
smollm2-four three --n=4 --temperature=1 --seed=5
smollm2-stop three --stop=. --stop=" of" --min_tokens=3
smollm2-chat three --chat --logprobs=3
smollm2-talk talk --temperature=0.7 --top_p=0.9 --seed=6
smollm2-chunked long engine.chunk_tokens=16 engine.prefill_chunks=(1,2) engine.prefill_budget=16
smollm2-unchunked long engine.chunked_prefill=false
smollm2-prefix prefix engine.max_seqs=3
smollm2-prefix-one-slot prefix engine.max_seqs=1
smollm2-no-prefix-cache prefix engine.prefix_cache=false
smollm2-preempted crowd engine.max_seqs=8 engine.preemption=recompute engine.cache_bytes=6700000
smollm2-swapped crowd engine.max_seqs=8 engine.preemption=swap engine.cache_bytes=6700000
gemma3-greedy one --logprobs=3
gemma3-greedy-float32 three --logprobs=3 model.dtype=float32
gemma3-window window
gemma3-window-one-slot window --deterministic engine.max_seqs=1
gemma3-window-chunked window --temperature=0.9 --seed=7 engine.chunk_tokens=32 model.dtype=float32
gemma3-swapped crowd engine.max_seqs=8 engine.preemption=swap engine.cache_bytes=14000000
llama-swapped crowd --deterministic engine.preemption=swap engine.cache_bytes=120000
llama-drafts mixed engine.num_drafts=2 engine.page_tokens=32
gemma2-chunked mixed --deterministic model.dtype=float32 engine.chunk_tokens=8 engine.page_tokens=8
phi3-static mixed engine.policy=static engine.overlap=false engine.max_seqs=4 model.dtype=float32
gpt2-naive one --logprobs=0 --naive --temperature=1 --seed=8
olmo2-preempted crowd engine.preemption=recompute engine.cache_bytes=40000 model.dtype=float32
"""
RUNS += "".join(f"{name}-mixed mixed\n" for name in MODELS)


def command(tree: Path, folder: Path, name: str, load: str, *words: str) -> list[str]:
    """Returns a run as a command, and writes what it reads to `folder`."""
    model, requests = MODELS[name.split("-")[0]], REQUESTS[load]
    if (golden := tree / "tests" / "golden" / model).is_dir():
        model = str(shutil.copytree(golden, folder / model))
        vocab_size = json.loads(Path(model, "config.json").read_text())["vocab_size"]
        Path(model, "tokenizer.json").write_text(json.dumps(tokenizer(vocab_size)))
        requests = [fitted(request, vocab_size) for request in requests]
    if "FORMER_NAMES" not in (tree / "inference" / "request.py").read_text():
        older_names = {name: older for older, name in FORMER_NAMES.items()}
        requests = [
            {older_names.get(name, name): value for name, value in request.items()}
            if isinstance(request, dict)
            else request
            for request in requests
        ]
        parts = [word.removeprefix("--").partition("=") for word in words]
        words = tuple(
            f"--{older_names[name]}{equals}{value}" if name in older_names else word
            for word, (name, equals, value) in zip(words, parts, strict=True)
        )
    flags = [f"--model={model}", "--json", "--max_new_tokens=20", "--logprobs=2"]
    (folder / "lines").write_text("\n".join(map(json.dumps, requests)))
    texts = [f"--prompt={text}" for text in requests if isinstance(text, str)]
    flags += texts or [f"--input={folder / 'lines'}"]
    settings = (tree / "configs" / "engine.py").read_text()
    for today, former in FORMER.items():
        words = tuple(word if today in settings else word.replace(today, former) for word in words)
    if (tree / "configs" / "settings").is_dir():  # older trees have no groups of settings
        places = {f"engine.{name}": path for name, path in paths(EngineConfig).items()}
        split = [word.partition("=") for word in words]
        words = tuple(places.get(name, name) + equals + value for name, equals, value in split)
    flags += [word if word.startswith("--") else f"--set={word}" for word in words]
    return [sys.executable, "-m", "scripts.generate", *flags]


def tokenizer(vocab_size: int) -> dict[str, Any]:
    """Returns a tokenizer of single characters: ASCII's, or where the vocabulary is too small for
    them the most frequent ones, and one token for all others.
    """
    characters = [chr(32 + n) for n in range(131)]
    if vocab_size < len(characters):
        characters = [*FREQUENT[: vocab_size - 1], UNKNOWN]
    vocab = {character: n for n, character in enumerate(characters)}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": UNKNOWN}
    return {"model": model, "decoder": {"type": "Fuse"}}


def fitted(request: Any, vocab_size: int) -> Any:
    """Returns a request with its token ids modulo the vocabulary."""
    if isinstance(request, str):
        return request
    ids: dict[str, Any] = {
        name: sorted({id % vocab_size for id in value})
        for name, value in request.items()
        if name.endswith("_ids")
    }
    if biases := request.get("logit_bias"):
        ids["logit_bias"] = {str(int(id) % vocab_size): bias for id, bias in biases.items()}
    return request | ids


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields (path, value) of all that is no list and no object, or is empty."""
    if not isinstance(value, dict | list) or not value:
        yield path, value
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from leaves(item, f"{path}.{key}")


def record(tree: Path, target: Path) -> None:
    """Runs all commands in a tree; one that fails ends the recording."""
    runs = {}
    for name, *words in map(shlex.split, RUNS.splitlines()):
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            line = command(tree, Path(folder), name, *words)
            done = subprocess.run(line, cwd=tree, capture_output=True, encoding="utf-8")
        if done.returncode:
            sys.exit(f"{name}: {done.stderr}")
        output = json.loads(done.stdout, parse_float=lambda text: float(text).hex())
        keys = {re.sub(r"\.\d+", ".*", path[1:]) for path, _ in leaves(output, "")}
        keys = {key for key in keys if not key.startswith("config.")}
        runs[name] = {"keys": sorted(keys), "results": output["results"]}
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
    target.write_text(json.dumps(runs, indent=1))


def compare(*recordings: Path) -> None:
    """Prints the differences of two recordings, and exits with status 1 if there are any."""
    runs = [json.loads(path.read_text()) for path in recordings]
    old, new = (dict(leaves(run, "")) for run in runs)
    differing = [path for path in old | new if old.get(path, ...) != new.get(path, ...)]
    for path in differing:
        print(f"{path[1:]}: {old.get(path, 'missing')!r} != {new.get(path, 'missing')!r}")
    if differing:
        sys.exit(1)
    print(f"{len(runs[0])} runs equal")


if __name__ == "__main__":
    action, first, second = sys.argv[1:]
    if action == "record":
        record(Path(first).resolve(), Path(second))
    else:
        compare(Path(first), Path(second))
