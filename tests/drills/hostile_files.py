"""Hostile checkpoints, tokenizers, `.gguf` files and flags: what the apps that read them say."""

import copy
import dataclasses
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.drills import app_forks
from tests.drills.harness import TINY

_ERROR = (1, 2)
_EITHER = (0, *_ERROR)
_NEW = ("--max_new_tokens=1", "--set=engine.max_seqs=1")


@dataclasses.dataclass(frozen=True)
class Case:
    """One start of an app: its flags, and the statuses that it may end with."""

    name: str
    command: tuple[str, ...]
    expected: tuple[int, ...] = _ERROR


def cases(folder: Path) -> list[Case]:
    """All of them; the files that they name are written below a folder."""
    return [*_of_directories(folder), *_of_gguf(folder), *_of_flags(folder)]


def run(cases: Sequence[Case], folder: Path) -> dict[str, str]:
    """What is wrong with what they gave, by name."""
    faults = {}
    results = app_forks.run([case.command for case in cases], folder)
    for case, (status, out, err) in zip(cases, results, strict=True):
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        if status is None:
            faults[case.name] = "did not end"
        elif status not in case.expected:
            faults[case.name] = f"status {status}: {err[-200:]!r}"
        elif "Traceback" in err or "panicked" in err:
            faults[case.name] = f"a trace: {err[-200:]!r}"
        elif status and (len(lines) != 1 or out):
            faults[case.name] = f"{len(lines)} lines of error: {err[-200:]!r}"
    return faults


def _generate(model: Path | str, *flags: str) -> tuple[str, ...]:
    return ("generate", f"--model={model}", "--prompt=A token", *_NEW, *flags)


# --- directories of Hugging Face ------------------------------------------------------------------

_CONFIGS: dict[str, Any] = {  # None: as an empty file; text as it is; a dict is merged
    "empty": "",
    "no JSON": "{",
    "a list": "[]",
    "null": "null",
    "NaN": '{"hidden_size": NaN}',
    "lists 10,000 deep": "[" * 10_000 + "]" * 10_000,
    "of bytes": "\0\1\2",
    "of an unknown family": {"model_type": "nope", "architectures": ["Nope"]},
    "of a family that is a list": {"model_type": ["llama"]},
    "with code of its own": {"model_type": "x", "auto_map": {"AutoModel": "evil.Model"}},
    "of width 0": {"hidden_size": 0},
    "of width -1": {"hidden_size": -1},
    "of width 2^40": {"hidden_size": 2**40},
    "of width 32.5": {"hidden_size": 32.5},
    "of width '32'": {"hidden_size": "32"},
    "of 3 heads": {"num_attention_heads": 3, "head_dim": None},
    "of more cached heads than heads": {"num_key_value_heads": 8},
    "of 0 heads": {"num_attention_heads": 0},
    "of 10^6 layers": {"num_hidden_layers": 10**6},
    "of no layers": {"num_hidden_layers": 0},
    "of another vocabulary": {"vocab_size": 321},
    "of a vocabulary of 2^40": {"vocab_size": 2**40},
    "of a context of 2^50": {"max_position_embeddings": 2**50},
    "of a negative context": {"max_position_embeddings": -1},
    "of a theta of 0": {"rope_parameters": {"rope_type": "default", "rope_theta": 0}},
    "of a theta of text": {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
    "of an unknown rope": {"rope_parameters": {"rope_type": "spiral"}},
    "of a rope that is a list": {"rope_parameters": []},
    "of an eps of -1": {"rms_norm_eps": -1},
    "of an eps of text": {"rms_norm_eps": "small"},
    "of an unknown activation": {"hidden_act": "evil"},
    "of a negative end": {"eos_token_id": -1},
    "of an end beyond the vocabulary": {"eos_token_id": 10**6},
    "quantized by an unknown method": {"quantization_config": {"quant_method": "magic"}},
    "quantized by a list": {"quantization_config": [1]},
}  # fmt: skip
# What is wrong is not read where something else says the same.
_OPEN = "of a family that is a list", "of a negative end", "of an end beyond the vocabulary"
_HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "of 7 bytes": lambda data: data[:7],
    "of a header of 2^63": lambda data: struct.pack("<Q", 2**63) + data[8:],
    "of a header of 100 MB": lambda data: struct.pack("<Q", 100 << 20) + data[8:],
    "of a header of 0": lambda data: struct.pack("<Q", 0) + data[8:],
    "of a header that is no JSON": lambda data: data[:8] + b"x" + data[9:],
    "with bytes behind it": lambda data: data + b"more",
    "without its last byte": lambda data: data[:-1],
    "a Git-LFS pointer": lambda data: (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 1\n"
    ),
    "a pickle": lambda data: b"\x80\x04\x95" + bytes(100),
    "zeros": lambda data: bytes(len(data)),
}
_TENSORS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "of an unknown type": lambda entry: entry | {"dtype": "X9"},
    "of another type": lambda entry: entry | {"dtype": "F32"},
    "of another shape": lambda entry: entry | {"shape": [1, *entry["shape"]]},
    "of a negative size": lambda entry: entry | {"shape": [-1, -32]},
    "of a size that overflows": lambda entry: entry | {"shape": [2**32, 2**33]},
    "of offsets backwards": lambda entry: entry | {"data_offsets": entry["data_offsets"][::-1]},
    "of negative offsets": lambda entry: entry | {"data_offsets": [-64, 0]},
    "past the end": lambda entry: entry | {"data_offsets": [2**40, 2**40 + 64]},
    "that overlaps another": lambda entry: entry | {"data_offsets": [0, 64]},
    "without offsets": lambda entry: {"dtype": "BF16", "shape": [32]},
    "that is a list": lambda entry: [],
}
_TOKENIZERS: dict[str, Any] = {
    "empty": "",
    "null": "null",
    "a list": "[]",
    "without a model": {"model": None},
    "of an unknown model": {"model": {"type": "Magic"}},
    "with merges of no tokens": {"model.merges": [["zz", "qq"]]},
    "with a merge of one": {"model.merges": ["a"]},
    "with a token of id 2^32 - 1": {"model.vocab.zz": 2**32 - 1},
    "with a token of id -1": {"model.vocab.zz": -1},
    "with a token of a text id": {"model.vocab.zz": "1"},
    "with an id twice": {"model.vocab.zz": 5},
    "with a pattern that is none": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated",
                          "invert": False}
    },
    "with a table of characters that is none": {
        "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    },
    "with an unknown normalizer": {"normalizer": {"type": "Magic"}},
    "with a template of an unknown token": {
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {
            "id": "<nope>", "type_id": 0}}], "pair": [], "special_tokens": {}}
    },
    "with an added token of id -5": {"added_tokens": [{"id": -5, "content": "x"}]},
}  # fmt: skip
_TEMPLATES = {
    "of a syntax error": "{% if %}",
    "that raises": "{{ raise_exception('no') }}",
    "that reaches for classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "that imports": "{% include '/etc/passwd' %}",
    "that does not end": "{% for i in range(10**12) %}x{% endfor %}",
    "that doubles": "{% set ns = namespace(x='a') %}{% for i in range(64) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "that calls itself": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "of an unknown filter": "{{ messages | evil }}",
    "that writes nothing": "",
}
_GENERATION = {
    "empty": "", "a list": "[]", "of an end beyond": '{"eos_token_id": 99999999}',
    "of an end of text": '{"eos_token_id": "x"}', "of a temperature NaN": '{"temperature": NaN}',
}  # fmt: skip


def _copy(folder: Path, name: str) -> Path:
    target = folder / name
    target.mkdir(parents=True)
    for path in TINY.iterdir():
        if path.suffix != ".npz":
            shutil.copy(path, target)
    return target


def _changed(value: Any, changes: Any) -> str:
    """A file's new text: changes of a dict are merged, at paths with dots."""
    if isinstance(changes, str):
        return changes
    value = copy.deepcopy(value)
    for path, change in changes.items():
        *outer, last = path.split(".")
        inner = value
        for key in outer:
            inner = inner[key]
        inner[last] = change
    return json.dumps(value)


def _of_directories(folder: Path) -> Iterator[Case]:
    numbers = iter(range(10_000))

    def with_file(kind: str, name: str, file: str, data: str | bytes, *flags: str) -> Case:
        target = _copy(folder, f"d{next(numbers)}")
        (target / file).write_bytes(data if isinstance(data, bytes) else data.encode())
        is_open = kind in ("generation_config", "template", "tokenizer") or name in _OPEN
        return Case(f"{kind} {name}", _generate(target, *flags), _EITHER if is_open else _ERROR)

    for file, table in (("config.json", _CONFIGS), ("tokenizer.json", _TOKENIZERS)):
        value = json.loads((TINY / file).read_text("utf-8"))
        for name, changes in table.items():
            yield with_file(file.removesuffix(".json"), name, file, _changed(value, changes))
    for name, text in _GENERATION.items():
        yield with_file("generation_config", name, "generation_config.json", text)
    settings = json.loads((TINY / "tokenizer_config.json").read_text("utf-8"))
    for name, template in _TEMPLATES.items():
        text = json.dumps(settings | {"chat_template": template})
        yield with_file("template", name, "tokenizer_config.json", text, "--chat")
    data = (TINY / "model.safetensors").read_bytes()
    for name, change in _HEADERS.items():
        yield with_file("weights", name, "model.safetensors", change(data))
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    first = next(tensor for tensor in header if tensor != "__metadata__")
    for name, alter in _TENSORS.items():
        text = json.dumps(header | {first: alter(header[first])}).encode()
        changed = struct.pack("<Q", len(text)) + text + data[8 + size :]
        yield with_file("a tensor", name, "model.safetensors", changed)
    for name, map in (
        ("of a missing shard", {first: "gone.safetensors"}),
        ("that climbs out", {first: "../../../etc/passwd"}),
        ("of an absolute path", {first: "/etc/passwd"}),
        ("with a NUL", {first: "a\0b"}), ("of a list", [1]), ("of numbers", {first: 3}),
    ):  # fmt: skip
        target = _copy(folder, f"d{next(numbers)}")
        (target / "model.safetensors").unlink()
        index = target / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": map}))
        yield Case(f"index {name}", _generate(target))
    for name, change in (
        ("weights are a FIFO", lambda target: (target.unlink(), os.mkfifo(target))),
        ("weights are /dev/zero", lambda target: _linked(target, "/dev/zero")),
        ("weights are a directory", lambda target: (target.unlink(), target.mkdir())),
        ("weights link to themselves", lambda target: _linked(target, target.name)),
        ("weights are a pickle alone", lambda target: target.rename(
            target.with_name("pytorch_model.bin"))),
        ("weights are gone", lambda target: target.unlink()),
    ):  # fmt: skip
        target = _copy(folder, f"d{next(numbers)}")
        change(target / "model.safetensors")
        yield Case(name, _generate(target))
    for file in ("config.json", "tokenizer.json"):
        for kind, device in (("/dev/zero", "/dev/zero"), ("itself", file)):
            target = _copy(folder, f"d{next(numbers)}")
            _linked(target / file, device)
            yield Case(f"{file} links to {kind}", _generate(target))


def _linked(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


# --- .gguf files ----------------------------------------------------------------------------------


def _of_gguf(folder: Path) -> Iterator[Case]:
    good = folder / "good.gguf"
    ((status, _, err),) = app_forks.run(
        [("convert", f"--model={TINY}", "--to=gguf", f"--output={good}")], folder
    )
    if status:
        raise RuntimeError(f"the file to damage was not written: {err}")
    data = good.read_bytes()

    def patched(at: int, form: str, value: int) -> bytes:
        return data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]

    key = data.index(b"general.architecture")
    tokens = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens")
    tensor = data.index(b"token_embd.weight") + len("token_embd.weight")
    family = key + len("general.architecture") + 12
    block = data.index(b"llama.block_count") + len("llama.block_count") + 4
    for name, changed in (
        ("of another magic", b"GGUX" + data[4:]), ("byte-swapped", data[:4][::-1] + data[4:]),
        ("empty", b""), ("of 4 bytes", data[:4]), ("of zeros", bytes(1000)),
        ("of version 0", patched(4, "<I", 0)), ("of version 99", patched(4, "<I", 99)),
        ("of a swapped version", patched(4, ">I", 3)),
        ("of 2^62 tensors", patched(8, "<Q", 2**62)), ("of no tensors", patched(8, "<Q", 0)),
        ("of 2^62 keys", patched(16, "<Q", 2**62)), ("of no keys", patched(16, "<Q", 0)),
        ("of a key of 2^62 bytes", patched(key - 8, "<Q", 2**62)),
        ("of a value of an unknown type", patched(key + 20, "<I", 99)),
        ("of an array of an unknown type", patched(tokens + 4, "<I", 99)),
        ("of an array of arrays", patched(tokens + 4, "<I", 9)),
        ("of 2^62 tokens", patched(tokens + 8, "<Q", 2**62)),
        ("of 10^8 tokens", patched(tokens + 8, "<Q", 10**8)),
        ("of 3 tokens", patched(tokens + 8, "<Q", 3)),
        ("of a tensor of no dimensions", patched(tensor, "<I", 0)),
        ("of a tensor of 2^31 dimensions", patched(tensor, "<I", 2**31)),
        ("of dimensions that overflow", patched(tensor + 4, "<Q", 2**62)),
        ("of an unknown type of numbers", patched(tensor + 20, "<I", 999)),
        ("of a tensor past the end", patched(tensor + 24, "<Q", 2**50)),
        ("of a tensor at an odd place", patched(tensor + 24, "<Q", 1)),
        ("of another family", data[:family] + b"magic" + data[family + 5 :]),
        ("of a million layers", patched(block, "<I", 10**6)),
        ("of no layers", patched(block, "<I", 0)),
        *((f"cut off at {tenth}0 %", data[: len(data) * tenth // 10]) for tenth in range(1, 10)),
        ("without its last bytes", data[:-64]),
    ):  # fmt: skip
        path = folder / f"{abs(hash(name))}.gguf"
        path.write_bytes(changed)
        yield Case(f"gguf {name}", _generate(path))
    for name, make in (("FIFO", os.mkfifo), ("directory", os.mkdir)):
        path = folder / f"{name}.gguf"
        make(path)
        yield Case(f"gguf that is a {name}", _generate(path))


# --- flags ----------------------------------------------------------------------------------------


def _of_flags(folder: Path) -> Iterator[Case]:
    binary, big = folder / "binary.txt", folder / "big.json"
    binary.write_bytes(bytes(range(256)))
    big.write_text("[" * 100_000)
    for flags in (
        ("--model=",), ("--model=a\nb",), ("--model=../nothing",), ("--model=/dev/zero",),
        ("--model=/dev/null",), ("--model=" + "a" * 5000,), ("--model={{x}}",), ("--model=a\x7fb",),
        ("--max_new_tokens=-1",), ("--max_new_tokens=x",),
        ("--max_new_tokens=1.5",), ("--temperature=-1",), ("--temperature=nan",),
        ("--temperature=inf",), ("--top_p=0",), ("--top_p=2",), ("--top_k=-5",),
        ("--seed=99999999999999999999999",), ("--mesh=model=0",), ("--mesh=model=1000",),
        ("--mesh=nope=2",), ("--mesh=model",), ("--set=nope=1",), ("--set=engine.nope=1",),
        ("--set=engine.max_seqs=0",), ("--set=engine.max_seqs=-1",), ("--set=engine.max_seqs=x",),
        ("--set=engine.max_seqs=__import__('os')",), ("--set=",), ("--set=model.width=7",),
        ("--set=engine.num_pages=1",), ("--set=engine.max_context=0",), ("--weights=int2",),
        ("--cache=int2",), ("--speculate=nope",), ("--config=nope",), ("--config=/etc/passwd",),
        ("--config=configs/../../x.py",), ("--executables=/nowhere",), ("--input=/nowhere",),
        ("--input=/dev/zero",), (f"--input={binary}",), (f"--input={folder}",),
        (f"--json_schema={big}",), (f"--json_schema={binary}",), ("--json_schema=/dev/zero",),
        ("--output=/nowhere/x.jsonl",), ("--hosts=0",), ("--nope=1",), ("extra",),
        ("--logprobs=-1",), ("--logprobs=10000",), ("--naive", "--stop=a"), ("--stop=",),
    ):  # fmt: skip
        model = () if flags[0].startswith("--model") else (f"--model={TINY}",)
        prompt = () if flags[0].startswith("--input") else ("--prompt=A",)
        yield Case(f"generate {flags[0][:40]!r}", ("generate", *model, *prompt, *_NEW, *flags))
    keys = folder / "keys"
    keys.write_text("short\n")
    for flags in (
        ("--port=-1",), ("--port=70000",), ("--port=x",), ("--host=999.1.1.1",),
        ("--host=0.0.0.0",), (f"--api_key_file={folder}",), (f"--api_key_file={keys}",),
        ("--api_key_file=/dev/null",), ("--api_key_file=/nowhere",), ("--api_key_file=/dev/zero",),
        ("--request_timeout=-1",), ("--request_timeout=nan",), ("--max_queue_s=-1",),
        ("--max_num_seqs=0",), ("--max_model_len=-1",), ("--max_logprobs=21",),
        ("--pooling=nope",), ("--tool_call_parser=nope",), ("--otlp_endpoint=ftp://x",),
    ):  # fmt: skip
        yield Case(f"serve {flags[0]!r}", ("serve", f"--model={TINY}", *flags))
    for flags in (
        ("--hardware=nope",), ("--batch=0",), ("--batch=x",), ("--batch=-1,2",), ("--mesh=x",),
        ("--chips=0",), ("--slo=ttft",), ("--slo=ttft=x",), ("--rate=-1",), ("--context=0",),
        ("--html=/nowhere/x.html",), ("--model=nope",),
    ):  # fmt: skip
        yield Case(f"plan {flags[0]!r}", ("plan", *flags))
    for app, flags in (
        ("convert", ("--to=nope",)), ("convert", ("--to=gguf", "--dtype=q9", "--output=x.gguf")),
        ("convert", (f"--output={folder}",)), ("convert", ("--output=/nowhere/x/y",)),
        ("convert", ("--max_shard_gb=nan", "--output=x")), ("convert", ()),
        ("quantize", ("--bits=5", "--output=x")), ("quantize", ("--group=7", "--output=x")),
        ("quantize", ("--method=magic", "--output=x")), ("quantize", ("--format=x", "--output=x")),
        ("quantize", ("--tokens=0", "--method=gptq", "--output=x")), ("quantize", ()),
        ("batch", ("--input=/dev/zero", f"--output={folder}/b.jsonl")), ("batch", ()),
        ("batch", ("--input=/nowhere", f"--output={folder}/b.jsonl")),
        ("batch", (f"--input={binary}", f"--output={binary}")),
        ("evaluate", ("--text=/nowhere",)), ("evaluate", ("--text=/dev/zero",)),
        ("evaluate", (f"--text={folder}",)), ("evaluate", ("--window=0",)),
    ):  # fmt: skip
        yield Case(f"{app} {' '.join(flags)[:50]!r}", (app, f"--model={TINY}", *flags))
    for flags in (("--task=nope",), ("--text=/dev/zero",), ("--text=/nowhere",),
                  ("--set=training.steps=-1",), ("--set=training.nope=1",)):  # fmt: skip
        yield Case(f"train {flags[0]!r}", ("train", f"--output={folder}/t", *flags))
