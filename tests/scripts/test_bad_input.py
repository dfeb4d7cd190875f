"""What cannot be run is refused in one line that names the cause, before weights are read."""

import json
import os
import shutil
import struct
import sys

import pytest

from inference.checkpoints import load
from scripts import evaluate, generate, plan
from tests.scripts import apps

_TINY = f"--model={apps.TINY}"


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    def read(*args):
        raise AssertionError("weights were read")

    monkeypatch.setattr(load, "load_params", read)


@pytest.fixture
def refuse(monkeypatch, capfd, tmp_path):
    """Calls an app that must refuse; its output file stays as it was."""
    target = tmp_path / "out.jsonl"
    target.write_text("before")

    def run(*args: str, app=generate) -> apps.Ran:
        output = [f"--output={target}", "--overwrite"] if app is generate else []
        ran = apps.call(app, monkeypatch, capfd, *output, *args)
        assert ran.error and target.read_text() == "before"
        assert not list(tmp_path.glob(".*"))
        return ran

    return run


_LONG = "--prompt=" + "word " * 300
_FLAGS = {
    "no prompt": ([], 1, "give either --prompt or --input"),
    "prompt and input": (["--prompt=A", "--input=x.jsonl"], 1, "either --prompt or --input"),
    "empty prompt": (["--prompt=A", "--prompt="], 1, "prompt 2 is empty"),
    "no text": (["--prompt=A\udcff"], 1, "prompt 1 is not valid text: character 1"),
    "long prompt": ([_LONG], 1, "the context of 256 holds at most 255"),
    "long for the setting": (
        ["--prompt=one two three four five", "--set=engine.max_context=4"],
        *(1, "the context of 4 holds at most 3"),
    ),
    "nothing to generate": (["--prompt=A", "--max_new_tokens=0"], 1, "is at least 1, not 0"),
    "temperature NaN": (["--prompt=A", "--temperature=nan"], 1, "from 0 to 100, not nan"),
    "temperature below 0": (["--prompt=A", "--temperature=-1"], 1, "from 0 to 100, not -1"),
    "top-p": (["--prompt=A", "--top_p=1.5"], 1, "top_p is a number above 0 and at most 1, not 1.5"),
    "alternatives": (["--prompt=A", "--logprobs=21"], 1, "between 0 and 20, not 21"),
    "seed": (["--prompt=A", f"--seed={2**64}"], 1, "seed is a whole number from -9223"),
    "empty stop": (["--prompt=A", "--stop="], 1, "at least one character"),
    "stop of no text": (["--prompt=A", "--stop=\udcff"], 1, "stop '\\udcff' can never match"),
    "stop too late": (["--prompt=A", "--stop=a", "--min_tokens=200"], 1, "stop can never match"),
    "positional": (["--prompt=A", "hello"], 1, "unexpected argument 'hello'"),
    "naive penalties": (["--prompt=A", "--naive", "--presence_penalty=1"], 1, "--naive takes no"),
    "unknown flag": (["--prompt=A", "--bogus=1"], 2, "Unknown command line flag 'bogus'"),
    "type of a flag": (["--prompt=A", "--max_new_tokens=some"], 2, "--max_new_tokens=some"),
    "unknown run": (["--prompt=A", "--config=nowhere.py"], 1, "configs/runs/smollm2_laptop.py"),
    "a run of its own": (["--prompt=A", "--config=/tmp/smollm2_laptop.py"], 1, "no run '/tmp/smol"),
    "a run's name in a path": (["--prompt=A", "--config=x/smollm2_laptop"], 1, "no run 'x/smollm2"),
    "a run with a NUL": (["--prompt=A", "--config=a\0b"], 1, "configs/runs/smollm2_laptop.py"),
    "unknown key": (["--prompt=A", "--set=engine.max_seq=1"], 1, "is not one of max_seqs,"),
    "unknown section": (["--prompt=A", "--set=motor.max_seqs=1"], 1, "not one of model, engine"),
    "whole section": (["--prompt=A", "--set=engine=1"], 1, "a field of it is needed"),
    "no value": (["--prompt=A", "--set=engine.max_seqs"], 1, "--set takes key=value"),
    "type of a key": (["--prompt=A", "--set=engine.max_seqs=many"], 1, "expected int"),
    "fraction": (["--prompt=A", "--set=engine.max_seqs=1.5"], 1, "expected int"),
    "dtype": (["--prompt=A", "--set=model.dtype=int4"], 1, "'float32' or 'bfloat16', not 'int4'"),
    "cache": (["--prompt=A", "--cache=int3"], 1, "fp8, int8 or int4, not 'int3'"),
    "cache of four bits": (
        ["--prompt=A", "--cache=int4"],
        *(1, "int4 shares a scale among 32 elements, so keys and values have a multiple of 32"),
    ),
    "page size": (["--prompt=A", "--set=engine.cache.page_tokens=15"], 1, "must divide 128"),
    "old name": (
        ["--prompt=A", "--set=engine.num_drafts=2"],
        *(1, "error: engine.num_drafts: is now engine.drafts.num_drafts\n"),
    ),
    "attention": (
        ["--prompt=A", "--set=engine.kernels.attention=magic"],
        *(1, "engine.kernels.attention=magic: must be one of reference"),
    ),
    "a kernel elsewhere": (
        ["--prompt=A", "--set=engine.kernels.attention=pallas_gpu"],
        *(1, "engine.kernels.attention=pallas_gpu runs on Hopper GPUs (H100, H200), not on cpu"),
    ),
    "chips of prefill": (["--prompt=A", "--set=prefill.chips=2"], 1, "must equal mesh.model (1)"),
    "chips that do both": (
        ["--prompt=A", "--set=prefill.chips=1", "--set=prefill.first_chip=0"],
        *(1, "prefill.first_chip=0: must be at least 1, because chips 0 to 0 decode"),
    ),
    "chips that are not there": (
        ["--prompt=A", "--set=prefill.chips=1", "--set=prefill.first_chip=999"],
        *(1, "prefill takes chips 999 to 999, here are"),
    ),
    "chips without a page": (
        ["--prompt=A", "--set=prefill.chips=1", "--set=prefill.cache_bytes=1"],
        *(1, "chips of prefill: engine.cache.cache_bytes=1: must be at least"),
    ),
    "context": (["--prompt=A", "--set=engine.max_context=512"], 1, "be from 1 to the model's 256"),
}  # fmt: skip


@pytest.mark.parametrize("case", _FLAGS)
def test_flags(refuse, case):
    args, status, message = _FLAGS[case]
    named = [] if any(arg.startswith("--config") for arg in args) else [_TINY]
    ran = refuse(*named, *args)
    assert ran.status == status and message in ran.err


@pytest.mark.parametrize("model", ["nowhere.gguf", "nowhere", "", "a\0b", "x" * 5000])
def test_a_model_that_is_not_there(refuse, model):
    ran = refuse(f"--model={model}", "--prompt=A")
    assert "nowhere.gguf" in ran.err or "valid: a preset (smollm2-135m, gemma3-270m" in ran.err


_GOOD = b'{"prompt": "A"}\n'
_LINES = {
    "not JSON": (_GOOD + b"\n{'prompt': 'A'}\n", "line 3 is not JSON: Expecting property name"),
    "cut off": (_GOOD + b'{"prompt": "A', "line 2 is not JSON: Unterminated string"),
    "no object": (b'["A"]\n', 'line 1 is not one of {"prompt": text}'),
    "neither": (_GOOD + b'{"text": "A"}\n', 'line 2 is not one of {"prompt": text}'),
    "both": (b'{"prompt": "A", "messages": []}\n', "line 1 is not one of"),
    "type": (_GOOD * 4 + b'{"prompt": 5}\n', "line 5: 'prompt' is a text, not int"),
    "empty": (_GOOD + b'{"prompt": ""}\n', "line 2: 'prompt' is empty"),
    "half a pair": (_GOOD + b'{"prompt": "\\ud83d"}\n', "line 2: 'prompt' is not valid text"),
    "no messages": (b'{"messages": []}\n', "line 1: 'messages' is not one of"),
    "no role": (b'{"messages": [{"content": "A"}]}\n', "line 1: 'messages' is not one of"),
    "half a pair said": (
        b'{"messages": [{"role": "user", "content": "\\ud83d"}]}\n',
        "line 1: 'content' is not valid text",
    ),
    "twice": (_GOOD + b'{"prompt": "A", "prompt": "B"}\n', "line 2 is not JSON: duplicate key"),
    "deep": (b"[" * 100_000, "line 1 is not JSON"),
    "long number": (b'{"prompt": ' + b"9" * 5000 + b"}", "line 1 is not JSON"),
    "not UTF-8": (_GOOD + b'{"prompt": "\xff"}\n', "is not UTF-8: byte 28"),
    "nothing": (b"\n\n", "no line holds a request"),
}


@pytest.mark.parametrize("case", _LINES)
def test_lines(refuse, tmp_path, case):
    content, message = _LINES[case]
    source = tmp_path / "in.jsonl"
    source.write_bytes(content)
    # Not even the model is looked for.
    ran = refuse("--model=nowhere", f"--input={source}")
    assert message in ran.err and "in.jsonl" in ran.err


def test_files_without_end_are_refused(refuse):
    for app, flag in ((generate, "--input"), (evaluate, "--text")):
        ran = refuse(_TINY, f"{flag}=/dev/zero", app=app)
        assert "cannot read /dev/zero: it is a device" in ran.err


def test_a_file_is_not_replaced_by_its_answers(monkeypatch, capfd, tmp_path):
    source = tmp_path / "in"
    source.write_bytes(_GOOD)
    (tmp_path / "link").symlink_to(source)
    for name in ("in", "in.config.json", "in.partial"):
        target = tmp_path / name
        source.rename(target)
        ran = apps.call(generate, monkeypatch, capfd, _TINY, f"--input={target}",
                        f"--output={tmp_path / 'in'}")  # fmt: skip
        assert "is the --input, which would be replaced" in ran.error
        target.rename(source)
    ran = apps.call(generate, monkeypatch, capfd, _TINY, f"--input={source}",
                    f"--output={tmp_path / 'link'}")  # fmt: skip
    assert "is the --input" in ran.error and source.read_bytes() == _GOOD


def test_overwrite_goes_with_an_output(monkeypatch, capfd):
    ran = apps.call(generate, monkeypatch, capfd, _TINY, "--prompt=A", "--overwrite")
    assert "--overwrite starts an --output over" in ran.error


# Python 3.12 renders what 3.11 could read and not walk.
@pytest.mark.parametrize("depth", [100_000, *([900] if sys.version_info < (3, 12) else [])])
def test_deep_messages_are_named(refuse, tmp_path, depth):
    deep = b'{"messages": [{"role": "user", "content": "A", "x": %s}]}'
    source = tmp_path / "in.jsonl"
    source.write_bytes(_GOOD + deep % (b"[" * depth + b"]" * depth))
    assert "in.jsonl line 2" in refuse(_TINY, f"--input={source}").err


def test_files_that_cannot_be_read_or_written(refuse, tmp_path, monkeypatch):
    assert "cannot read" in refuse(_TINY, f"--input={tmp_path / 'none.jsonl'}").err
    assert "cannot read" in refuse(_TINY, f"--input={tmp_path}").err
    (tmp_path / "x.jsonl.config.json").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/full")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for target in ("", "none/out.jsonl", "x.jsonl", "pipe", "link", "loop/x", "a\0b", "x" * 5000):
        ran = refuse(_TINY, "--prompt=A", f"--output={tmp_path / target}")
        assert "not a file in an existing folder" in ran.err or "is no path" in ran.err
    with monkeypatch.context() as patch:  # whoever runs the tests may be allowed everything
        patch.setattr(os, "access", lambda path, mode: False)
        ran = refuse(_TINY, "--prompt=A", f"--output={tmp_path / 'new.jsonl'}")
    assert f"the folder {tmp_path} cannot be written to" in ran.err


@pytest.mark.parametrize("app", [generate, plan])
def test_chips_that_do_not_divide_the_experts(refuse, app):
    model = f"--model={apps.ROOT / 'tests' / 'golden' / 'mixtral-gqa-float32'}"
    prompt = ["--prompt=A"] if app is generate else []
    ran = refuse(model, "--mesh=expert=3", *prompt, app=app)
    assert (
        "mesh expert=3 does not divide the 5 experts of mixtral-gqa-float32; valid: 1, 5" in ran.err
    )
    ran = refuse(_TINY, "--mesh=expert=2", *prompt, app=app)
    assert "mesh expert=2: llama-tokenizer has no experts to divide" in ran.err


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(apps.TINY, tmp_path / "model")


def _edit_config(model, **changes) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _cut(path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def _break(model, how: str) -> str:
    """Damages a checkpoint and returns what the refusal must say."""
    weights = model / "model.safetensors"
    if how == "cut weights":
        _cut(weights, 30_000)
        return "not a valid safetensors file"
    if how == "cut header":
        _cut(weights, 100)
        return "not a valid safetensors file"
    if how == "huge header":
        weights.write_bytes(struct.pack("<Q", 2**62) + weights.read_bytes()[8:])
        return "not a valid safetensors file"
    if how == "empty weights":
        weights.write_bytes(b"")
        return "model.safetensors"
    if how == "no weights":
        weights.unlink()
        return "no weights; expected model.safetensors"
    if how == "pickle":
        weights.rename(model / "pytorch_model.bin")
        return "pytorch_model.bin is a pickle, which can run code when loaded"
    if how == "architecture":
        _edit_config(model, architectures=["RwkvForCausalLM"])
        return "'RwkvForCausalLM' is not supported; the part that it needs first is not here: "
    if how == "type in config":
        _edit_config(model, hidden_size="wide")
        return "hidden_size must be an integer"
    if how == "heads":
        _edit_config(model, num_key_value_heads=3)
        return "is not a multiple of"
    if how == "no config":
        (model / "config.json").unlink()
        return "config.json"
    if how == "config is no JSON":
        (model / "config.json").write_text("{")
        return "config.json"
    if how == "config is not UTF-8":
        (model / "config.json").write_bytes(b'{"a": "\xff"}')
        return "config.json"
    if how == "shape":
        _edit_config(model, intermediate_size=51)
        return "expected [51, 32]"
    if how == "no tokenizer":
        (model / "tokenizer.json").unlink()
        return "tokenizer.json"
    assert how == "tokenizer is no JSON"
    (model / "tokenizer.json").write_text("{}")
    return "tokenizer.json"


@pytest.mark.parametrize(
    "how",
    ["cut weights", "cut header", "huge header", "empty weights", "no weights", "pickle",
     "architecture", "type in config", "heads", "no config", "config is no JSON",
     "config is not UTF-8", "shape", "no tokenizer", "tokenizer is no JSON"],
)  # fmt: skip
def test_directories(refuse, model, how):
    message = _break(model, how)
    assert message in refuse(f"--model={model}", "--prompt=A").err


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


_HEADER = b"GGUF" + struct.pack("<I", 3)
_GGUF = {
    "empty": b"",
    "another format": b"PK\x03\x04" + bytes(100),
    "cut off": _HEADER + struct.pack("<Q", 1),
    "countless keys": _HEADER + struct.pack("<QQ", 1, 2**60),
    "countless tensors": _HEADER + struct.pack("<QQ", 2**60, 0),
    "endless key": _HEADER + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**60) + b"general",
    "endless list": _HEADER + struct.pack("<QQ", 0, 1) + _string(b"tokens")
    + struct.pack("<IIQ", 9, 8, 2**60),
    "architecture": _HEADER + struct.pack("<QQ", 0, 1) + _string(b"general.architecture")
    + struct.pack("<I", 8) + _string(b"clip"),
}  # fmt: skip


@pytest.mark.parametrize("how", _GGUF)
def test_gguf_files(refuse, tmp_path, how):
    path = tmp_path / "model.gguf"
    path.write_bytes(_GGUF[how])
    ran = refuse(f"--model={path}", "--prompt=A")
    assert "model.gguf" in ran.err
    assert how != "architecture" or ("clip" in ran.err and "llama" in ran.err)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pkl"])
def test_a_pickle_by_name(refuse, tmp_path, suffix):
    path = tmp_path / f"model{suffix}"
    path.write_bytes(b"\x80\x04.")
    assert "pickles can run code" in refuse(f"--model={path}", "--prompt=A").err


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.__init__.__globals__ }}",
     "{{ cycler.__init__.__globals__.os.popen('id').read() }}", "{% for x in %}"],
)  # fmt: skip
def test_templates(refuse, model, template):
    path = model / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    ran = refuse(f"--model={model}", "--prompt=A", "--chat")
    assert "template" in ran.err


def test_no_template(refuse, model):
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["chat_template"]
    path.write_text(json.dumps(config))
    ran = refuse(f"--model={model}", "--prompt=A", "--chat")
    assert "prompt 1: this checkpoint has no chat template; give it a plain prompt" in ran.err


def test_evaluate(refuse, tmp_path):
    text = tmp_path / "text"
    refused = {
        "cannot read": [f"--text={tmp_path / 'none'}"],
        "--window is at least 2": ["--window=1"],
        "--window is at most the context of 256, not 512": ["--window=512"],
        "--max_tokens is at least 2": ["--window=64", "--max_tokens=1"],
        "unexpected argument 'x'": ["x"],
    }
    for message, args in refused.items():
        assert message in refuse(_TINY, *args, app=evaluate).err
    for content, message in ((b"", "nothing to predict"), (b"ab\xff", "is not UTF-8: byte 2")):
        text.write_bytes(content)
        assert message in refuse(_TINY, f"--text={text}", "--window=9", app=evaluate).err
    assert refuse(_TINY, "--windows=9", app=evaluate).status == 2


def test_an_unknown_flag_as_a_process(tmp_path):
    ran = apps.start("evaluate", "--bogus", cache=tmp_path)
    assert ran.status == 2 and "Unknown command line flag 'bogus'" in ran.error
