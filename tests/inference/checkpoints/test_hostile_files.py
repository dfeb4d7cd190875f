"""Malformed checkpoints: one line that names the file, within a second and 64 MB.

What only the header's scan sees is in test_gguf_scan; here whole checkpoints are opened as a script
would, with time and memory measured.
"""

import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.errors import InputError
from inference.checkpoints import convert, manifest, resolve
from layers import decoder
from tests.inference.checkpoints import test_gguf_scan as scan
from tests.inference.checkpoints.test_gguf_scan import ARRAY, STRING, U32, U64, entry, tensor, text

TINY = Path(__file__).parents[2] / "golden" / "llama-tokenizer"
MAX_SECONDS, MAX_BYTES = 1.0, 64 << 20
STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


def resident(field: str) -> int:
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def reset_peak() -> bool:
    try:
        CLEAR.write_text("5")
    except OSError:
        return False
    return True


def open_as_scripts_do(path: Path) -> None:
    resolved = resolve.resolve(str(path))
    checkpoint = resolved.open(None)
    checkpoint.load_tokenizer().encode("The cat <|im_start|> sat \u00e9\u00e9")
    checkpoint.load_params(decoder.param_infos(resolved.config), None)


@pytest.fixture(autouse=True)
def warm(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))
    open_as_scripts_do(TINY)  # whatever is imported or allocated once


def refusal(path: Path) -> str:
    measures_memory = reset_peak()
    before = resident("VmRSS") if measures_memory else 0
    start = time.process_time()
    with pytest.raises(InputError) as caught:
        open_as_scripts_do(path)
    seconds = time.process_time() - start
    grown = resident("VmHWM") - before if measures_memory else 0
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    assert seconds <= MAX_SECONDS, f"{seconds:.2f} s"
    assert grown <= MAX_BYTES, f"{grown >> 20} MB"
    return message


# --- safetensors, index, configuration, tokenizer -------------------------------------------------


def _json(name: str, **changes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | changes))

    return damage


def _bytes(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(data) and None


def _header(change: Callable[[dict], None], data: bytes | None = None) -> Callable[[Path], None]:
    """Rewrites the header of the weights, lengths kept true."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        before = path.read_bytes()
        size = int.from_bytes(before[:8], "little")
        header = json.loads(before[8 : 8 + size])
        change(header)
        new = json.dumps(header).encode()
        rest = before[8 + size :] if data is None else data
        path.write_bytes(struct.pack("<Q", len(new)) + new + rest)

    return damage


def _raw_header(header: bytes, size: int | None = None) -> Callable[[Path], None]:
    prefix = struct.pack("<Q", len(header) if size is None else size)
    return _bytes("model.safetensors", prefix + header + bytes(64))


NORM = "model.norm.weight"


def _index(weight_map: object, text: str | None = None) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        name = "model.safetensors.index.json"
        (folder / name).write_text(text or json.dumps({"weight_map": weight_map}))

    return damage


def _tokenizer(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "tokenizer.json"
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    return damage


def _special(index: int, content: str) -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, "special": True} | flags


def _many_tokens(value: dict) -> None:
    names = [*(f"<x{i}>" for i in range(100)), "The cat"]
    value["added_tokens"] += [_special(320 + i, name) for i, name in enumerate(names)]


def _named_templates(folder: Path) -> None:
    (folder / "additional_chat_templates").mkdir()
    for number in range(100):
        (folder / "additional_chat_templates" / f"{number}.jinja").write_text("x")


def _bos(value: dict) -> None:
    single = [{"SpecialToken": {"id": "<none>", "type_id": 0}}]
    value["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": single,
        "special_tokens": {},
    }  # fmt: skip


def _regex(value: dict) -> None:
    value["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "(" * 500}, "behavior": "Isolated", "invert": False,
    }  # fmt: skip


DIRECTORIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "header of 2^62": (_raw_header(b"{}", 1 << 62), "not a valid safetensors"),
    "header of 100 MB": (_raw_header(b"{}", 100 << 20), "not a valid safetensors"),
    "header deeply nested": (_raw_header(b"[" * 100_000), "not a valid safetensors"),
    "duplicate tensor": (
        lambda f: _raw_header(
            b'{"a":{"dtype":"F32","shape":[16],"data_offsets":[0,64]},'
            b'"a":{"dtype":"F32","shape":[16],"data_offsets":[0,64]}}'
        )(f),
        "duplicate key 'a'",
    ),
    "shape that overflows": (
        _header(lambda h: h[NORM].update(shape=[1 << 32, 1 << 32])), "not a valid safetensors",
    ),
    "shape of 2^62": (_header(lambda h: h[NORM].update(shape=[1 << 62])), "not a valid"),
    "shape that is a text": (_header(lambda h: h[NORM].update(shape="32")), "not a valid"),
    "offsets that overlap": (
        _header(lambda h: h[NORM].update(data_offsets=[0, 64])), "not a valid safetensors",
    ),
    "offsets past the end": (
        _header(lambda h: h[NORM].update(data_offsets=[1 << 40, (1 << 40) + 64])), "not a valid",
    ),
    "integers": (_header(lambda h: h[NORM].update(dtype="I16")), "has type I16; valid: F32"),
    "no tensor at all": (_header(lambda h: h.clear(), b""), "is missing"),
    "name that leads elsewhere": (
        _header(lambda h: h.update({"../../x": h.pop(NORM)})), "is missing",
    ),
    "data cut off": (_header(lambda h: None, bytes(100)), "not a valid safetensors"),
    "index to the parent": (_index({NORM: "../model.safetensors"}), "of this directory"),
    "index to the root": (_index({NORM: "/etc/passwd"}), "of this directory"),
    "index with a NUL": (_index({NORM: "\0.safetensors"}), "embedded null byte"),
    "index with duplicate keys": (
        _index(None, '{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}'),
        "duplicate key 'a'",
    ),
    "index deeply nested": (_index(None, '{"weight_map":' * 50_000), "nested too deeply"),
    "index to a missing file": (_index({NORM: "other.safetensors"}), "No such file"),
    "index of a text": (_index("model.safetensors"), "'weight_map' must be"),
    "config deeply nested": (_bytes("config.json", b'{"a":' * 100_000), "nested too deeply"),
    "config with duplicate keys": (_bytes("config.json", b'{"a": 1, "a": 2}'), "duplicate key"),
    "config with a number of 5000 digits": (
        _bytes("config.json", b'{"hidden_size": ' + b"9" * 5000 + b"}"), "not valid JSON",
    ),
    "config of 2^62 layers": (_json("config.json", num_hidden_layers=1 << 62), "from 1 to 10000"),
    "config of 2^62 tokens": (_json("config.json", vocab_size=1 << 62), "vocab_size must be"),
    "config that is not finite": (_json("config.json", rms_norm_eps=float("nan")), "rms_norm_eps"),
    "config with GPTQ weights": (
        _json("config.json", quantization_config={"quant_method": "gptq", "bits": 4}),
        "q_proj.weight' is stored as bfloat16; by its quantization_config it is int4",
    ),
    "config with nameless weights": (
        _json("config.json", quantization_config=[7]), "quantization_config must be an object",
    ),
    "compressed weights": (
        _json("config.json", compression_config={"quant_method": "compressed-tensors"}),
        "quantization_config: config_groups is missing",
    ),
    "AWQ beside the config": (_json("quant_config.json", w_bit=4), "quant_config.json: weights"),
    "end token beyond the embedding": (
        _json("generation_config.json", eos_token_id=1 << 62), "is not an id from 0",
    ),
    "end token of another type": (
        _json("generation_config.json", eos_token_id=[[[[7]]]]), "is not an id from 0",
    ),
    "tokenizer deeply nested": (_bytes("tokenizer.json", b"[" * 100_000), "not a valid tokenizer"),
    "tokenizer of nothing": (_bytes("tokenizer.json", b"null"), "not a valid tokenizer"),
    "tokenizer with an id of 2^32": (
        _tokenizer(lambda t: t["model"]["vocab"].update({"The": 1 << 32})), "not a valid tokenizer",
    ),
    "tokenizer with an id beyond the embedding": (
        _tokenizer(_many_tokens),
        "outside the model's vocabulary",
    ),
    "tokenizer with foreign merges": (
        _tokenizer(lambda t: t["model"].update(merges=[["no", "such"]])), "not a valid tokenizer",
    ),
    "tokenizer whose template misses a token": (_tokenizer(_bos), "not a valid tokenizer"),
    "tokenizer with an endless pattern": (_tokenizer(_regex), "tokenizer"),
    "tokenizer with a bad map of characters": (
        _tokenizer(
            lambda t: t.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
        ),
        "not a valid tokenizer",
    ),
    "added token elsewhere": (
        _json("tokenizer_config.json", added_tokens_decoder={"9": {"content": "<none>"}}),
        "token '<none>' is listed as 9, the tokenizer has it as",
    ),
    "added token without an id": (
        _json("tokenizer_config.json", added_tokens_decoder={"x": {"content": "<none>"}}),
        "added_tokens_decoder: 'x' is no id",
    ),
    "added token without content": (
        _json("tokenizer_config.json", added_tokens_decoder={"9": {"content": [1]}}),
        "token 9 has no content",
    ),
    "added token with odd flags": (
        _json("tokenizer_config.json", added_tokens_decoder={"9": {"content": "a", "lstrip": 3}}),
        "a flag of token 'a' is neither true nor false",
    ),
    "added tokens in a list": (
        _json("tokenizer_config.json", added_tokens_decoder=[1]), "must be an object of id",
    ),
    "special tokens map that is a list": (
        _bytes("special_tokens_map.json", b"[1]"), "expected a JSON object",
    ),
    "config of 40 MB": (
        _bytes("config.json", b'{"a":[' + b"0," * 20_000_000 + b"0]}"), "at most 8388608 are",
    ),
    "config of millions of objects": (
        _bytes("config.json", b'{"a":[' + b"{}," * 2_500_000 + b"{}]}"), "more than 262144 values",
    ),
    "millions of end tokens": (
        _bytes("generation_config.json", b'{"eos_token_id":[' + b"[]," * 2_500_000 + b"0]}"),
        "more than 262144 values",
    ),
    "config of a long name": (
        _json("config.json", architectures=["x" * 7_000_000]), "architecture 'xxx",
    ),
    "rope of 200,000 factors": (
        _json("config.json", rope_scaling={
            "type": "longrope", "factor": 2.0, "short_factor": [1] * 200_000, "long_factor": [1],
        }),
        "must be a list of at most 65536 numbers",
    ),
    "theta of 400 digits": (
        _json("config.json", rope_theta=10**400, rope_parameters=None),
        "rope_theta must be positive and finite, not a number of 1329 bits",
    ),
    "index of 300,000 names": (
        _index({f"t{i}": "x.safetensors" for i in range(300_000)}), "more than 262144 values",
    ),
    "100,000 empty tensors": (
        _header(
            lambda h: h.update({
                f"{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
                for i in range(100_000)
            }),
        ),
        "names more than 32768 tensors",
    ),
    "chat template of 60 MB": (_bytes("chat_template.jinja", b"x" * 60_000_000), "at most 8388608"),
    "50,000 added tokens": (
        _json("tokenizer_config.json", added_tokens_decoder={
            **{f"{320 + i}": {"content": f"<x{i}>"} for i in range(50_000)}, "0": {"content": "x"},
        }),
        "token 'x' is listed as 0",
    ),
    "added tokens by odd ids": (
        _bytes("added_tokens.json", b'{"<|foo|>": [[1]]}'), "has [[1]], not an id",
    ),
    "extra tokens of another type": (
        _json("tokenizer_config.json", extra_special_tokens="x"), "must be a list or an object",
    ),
    "a hundred chat templates": (_named_templates, "100 templates; at most 64"),
    "chat template named like a path": (
        _json("tokenizer_config.json", chat_template=[{"name": "../x", "template": "x"}]),
        "is no name of a chat template",
    ),
}  # fmt: skip


_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 98000\n" % (b"0" * 64)
_IS_POINTER = "a Git LFS pointer, not the file of 98000 bytes; run `git lfs pull` in its repository"
_PAGE = b"\n<!DOCTYPE html>\n<html><title>Sign in</title></html>"
STAND_INS: dict[str, tuple[Callable[[Path], None], str]] = {
    f"{kind} as {name}": (_bytes(name, data), expected)
    for kind, data, expected in (
        ("pointer", _POINTER, _IS_POINTER),
        ("page", _PAGE, "a web page, not the file; download it again"),
        ("error", b'<?xml version="1.0"?><Error/>', "a web page, not the file"),
    )
    for name in ("model.safetensors", "model.safetensors.index.json", "config.json",
                 "tokenizer.json")
}  # fmt: skip
DIRECTORIES |= STAND_INS


@pytest.mark.parametrize("case", DIRECTORIES)
def test_directory(case, tmp_path):
    folder = Path(shutil.copytree(TINY, tmp_path / "model"))
    damage, expected = DIRECTORIES[case]
    damage(folder)
    message = refusal(folder)
    assert expected in message
    assert str(folder) in message or "the text holds token" in message


# --- GGUF -----------------------------------------------------------------------------------------


def _file(changes: dict | None = None) -> bytes:
    return scan.whole_file(changes)


def _vocabulary(size: int) -> dict:
    tokens = scan.words(*(f"t{i}" for i in range(size)))
    scores = scan.floats(*(0.0,) * size)
    kinds = scan.numbers(*(1,) * size)
    return {
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
    }  # fmt: skip


GGUFS = {
    "array of 2^62": (scan.gguf_bytes((entry("k", ARRAY, U32(4) + U64(1 << 62)),)), "'k' needs"),
    "array of 10^8": (scan.gguf_bytes((entry("k", ARRAY, U32(4) + U64(10**8)),)), "'k' needs"),
    "strings of 2^62": (
        scan.gguf_bytes((entry("k", ARRAY, U32(STRING) + U64(1 << 62)),)), "at most 1048576",
    ),
    "string of 2^62": (scan.gguf_bytes((entry("k", STRING, U64(1 << 62)),)), "'k' needs"),
    "5000 nested arrays": (
        scan.gguf_bytes((entry("k", ARRAY, (U32(ARRAY) + U64(1)) * 5000),)), "array of arrays",
    ),
    "duplicate key": (scan.gguf_bytes((entry("k", 4, U32(1)),) * 2), "duplicate metadata key"),
    "duplicate tensor": (
        scan.gguf_bytes((), (tensor("t", (8,)),) * 2, bytes(32)), "duplicate tensor",
    ),
    "2^62 tensors": (b"GGUF" + U32(3) + U64(1 << 62) + U64(0), "at most 65536"),
    "2^62 keys": (b"GGUF" + U32(3) + U64(0) + U64(1 << 62), "at most 65536"),
    "65536 empty keys": (
        b"GGUF" + U32(3) + U64(0) + U64(65536) + text("") * 65536, "duplicate metadata key ''",
    ),
    "shape of 2^64": (
        scan.gguf_bytes((), (tensor("t", (1 << 32, 1 << 32)),)), "impossible shape",
    ),
    "tensor past the end": (
        scan.gguf_bytes((), (tensor("t", (8,), offset=1 << 40),), bytes(64)), "past the end",
    ),
    "tensors that overlap": (
        scan.gguf_bytes((), (tensor("a", (16,)), tensor("b", (8,), offset=32)), bytes(64)),
        "overlaps",
    ),
    "alignment of 2^31": (
        scan.gguf_bytes((entry("general.alignment", 4, U32(1 << 31)),)), "not a power of two",
    ),
    "unknown type": (scan.gguf_bytes((), (tensor("t", (8,), kind=99),)), "unknown ggml type 99"),
    "another byte order": (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
    "layers of 2^32": (
        _file({"llama.block_count": scan.number((1 << 32) - 1)}), "must be 1 to 10000",
    ),
    "width of 2^31": (
        _file({"llama.embedding_length": scan.number(1 << 31)}), "must be 1 to 16777216",
    ),
    "frequency that is none": (
        _file({"llama.rope.freq_base": (6, struct.pack("<f", float("inf")))}), "must be positive",
    ),
    "end token beyond the vocabulary": (
        _file({"tokenizer.ggml.eos_token_id": scan.number(1 << 31)}), "is not an id from 0",
    ),
    "first token beyond the vocabulary": (
        _file({"tokenizer.ggml.bos_token_id": scan.number(1 << 31)}), "outside the vocabulary",
    ),
    "tokens without scores": (
        _file({"tokenizer.ggml.scores": scan.floats(1.0)}), "scores has 1 entries for 8 tokens",
    ),
    "token of a megabyte": (
        _file({"tokenizer.ggml.tokens": scan.words(*scan.TOKENS[:-1], "a" * (1 << 20))}),
        "at most 1024",
    ),
    "tokens that are no text": (
        _file({"tokenizer.ggml.tokens": scan.words(*scan.TOKENS[:-1], b"\xff\xfe")}), "not UTF-8",
    ),
    "merges of nothing": (
        _file({"tokenizer.ggml.model": (STRING, text("gpt2")),
               "tokenizer.ggml.merges": scan.words("no such", "")}),
        "cannot rebuild the tokenizer",
    ),
    "chat template named like a path": (
        _file({"tokenizer.chat_template.../x": (STRING, text("x"))}), "is no name of a chat",
    ),
    "parts of 2^16": (_file({"split.count": (2, struct.pack("<H", 65535))}), "valid: 1 to 1024"),
    "tensors that are missing": (_file(), "is missing"),
    "pointer": (_POINTER, _IS_POINTER),
    "page": (_PAGE, "a web page, not the file"),
}  # fmt: skip


@pytest.mark.parametrize("case", GGUFS)
def test_gguf(case, tmp_path):
    data, expected = GGUFS[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    message = refusal(path)
    assert expected in message and str(path) in message


def test_twenty_of_each():
    assert len(GGUFS) >= 20 and len(DIRECTORIES) >= 20


# --- ours -----------------------------------------------------------------------------------------


OURS = {
    "a manifest of 2^17 lines": (
        lambda f: (f / manifest.NAME).write_text(
            "".join(f"{i:064x}  {i}\n" for i in range(1 << 17))
        ),
        "bytes; at most",
    ),
    "a manifest of one line": (
        lambda f: (f / manifest.NAME).write_text("0" * 8_000_000), "not a list of files",
    ),
    "a manifest that leads elsewhere": (
        lambda f: (f / manifest.NAME).write_text(f"{0:064x}  ../../etc/passwd\n"), "is",
    ),
    "weights that are a pointer": (
        lambda f: (f / "params" / "final_norm" / "0").write_bytes(_POINTER), _IS_POINTER,
    ),
    "tokenizer that is a pointer": (
        lambda f: (f / "tokenizer.json").write_bytes(_POINTER), _IS_POINTER,
    ),
    "weights that are a pipe": (
        lambda f: (
            (f / "params" / "final_norm" / "0").unlink(),
            os.mkfifo(f / "params" / "final_norm" / "0"),
        ),
        "final_norm/0: not the",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OURS)
def test_native_directory(case, tmp_path):
    folder = tmp_path / "native"
    convert.convert(resolve.resolve(str(TINY)).open(None), folder, "orbax")
    damage, expected = OURS[case]
    damage(folder)
    assert expected in refusal(folder)
