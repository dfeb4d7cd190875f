"""SmolLM2 converted: faster than its GGUF, in bounded memory, and read by transformers."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import chex
import jax
import pytest

from configs import presets
from inference.checkpoints import convert, resolve, sources
from inference.engine import Engine
from inference.request import SamplingParams
from layers import decoder, params
from tests.inference.checkpoints.test_gguf import _PEAK

ROOT = Path(__file__).parents[3]
MODEL = "smollm2-135m"
GOLDEN_PYTHON = Path(os.environ.get("GOLDEN_PYTHON", ROOT / ".venv-golden" / "bin" / "python"))


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("real") / "native"
    convert.convert(resolve.resolve(MODEL).open(None), output, "orbax")
    return output


def seconds_to_load(model: str) -> float:
    """From finding the model to parameters on the device; files lie in the page cache."""
    start = time.perf_counter()
    resolved = resolve.resolve(model)
    infos = decoder.param_infos(resolved.config)
    jax.block_until_ready(resolved.open(None).load_params(infos, None))
    return time.perf_counter() - start


@pytest.mark.long
def test_it_loads_twice_as_fast_as_its_gguf(native, tmp_path, monkeypatch):
    """A GGUF that was not opened before, with two cores to spare; once converted into our cache it
    has less to do than a native directory, which is verified.
    """
    gguf = str(sources.fetch(presets.get(MODEL).weights))
    slow, fast = [], []
    for attempt in range(6):
        monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / f"{attempt}"))
        slow.append(seconds_to_load(gguf))
        fast.append(seconds_to_load(str(native)))
    print(f"GGUF {min(slow):.2f} s, native {min(fast):.2f} s")
    assert min(slow) >= 2 * min(fast)


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="anonymous memory is told by /proc"
)
def test_it_loads_in_bounded_memory(native):
    script = _PEAK.replace('"converting"\npeaks', '"loading"\npeaks')
    command = [sys.executable, "-c", script, str(native)]
    _, peak = map(int, subprocess.check_output(command, cwd=ROOT, text=True).split())
    total = params.num_bytes(decoder.param_infos(resolve.resolve(MODEL).config))
    assert total <= peak + (4 << 20) and peak <= total + (32 << 20)


def test_it_is_the_same_model(native):
    first, second = resolve.resolve(MODEL), resolve.resolve(str(native))
    assert first.config == second.config
    one, two = first.open(None), second.open(None)
    assert one.eos_ids == two.eos_ids
    infos = decoder.param_infos(first.config)
    chex.assert_trees_all_equal(one.load_params(infos, None), two.load_params(infos, None))
    old, new = one.load_tokenizer(), two.load_tokenizer()
    assert (old.special_tokens, old.template) == (new.special_tokens, new.template)
    text = "The cat's 12 naïve 猫 \n\n  def f(x):\t<|im_start|>user\n"
    assert old.encode(text) == new.encode(text)


@pytest.mark.long
@pytest.mark.skipif(
    not GOLDEN_PYTHON.exists(), reason="transformers is missing: make golden, or GOLDEN_PYTHON="
)
def test_transformers_reads_the_export(native, tmp_path):
    convert.convert(
        resolve.resolve(str(native)).open(None), tmp_path / "hf", "hf", max_shard_bytes=10**8
    )
    text = "The three laws of motion are"
    command = [str(GOLDEN_PYTHON), "tests/golden/read_export.py", str(tmp_path / "hf"), text, "16"]
    theirs = json.loads(subprocess.check_output(command, cwd=ROOT, text=True))
    engine = Engine.from_model(str(tmp_path / "hf"), dtype="float32", max_seqs=2, max_context=256)
    tokenizer = resolve.resolve(str(tmp_path / "hf")).open(None).load_tokenizer()
    assert theirs["dtype"] == "torch.bfloat16" and theirs["ids"] == tokenizer.encode(text)
    assert theirs["chat"] == tokenizer.chat_text([{"role": "user", "content": text}])
    assert set(theirs["eos"]) == engine.eos_ids
    assert theirs["special"] == tokenizer.special_tokens
    (ours,) = engine.generate([text], SamplingParams(max_new_tokens=16, ignore_eos=True))
    assert list(ours.token_ids) == theirs["greedy"]
