"""What a host reads of a checkpoint when it holds some of a mesh's chips."""

import dataclasses
import json
import socket
import subprocess
import sys

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from configs.kinds.params import ParamInfo
from configs.mesh import Mesh
from inference.checkpoints import load, resolve, safetensors_file
from inference.checkpoints.names import Stored
from inference.checkpoints.tensor_source import TensorSource
from layers import decoder, params
from sharding import rules
from tests import fakes
from tests.inference.checkpoints import test_convert, test_gguf

HF = ["llama-mha-sharded", "gpt2-mha-tied-bare", "gemma3-mqa", "phi3-mha-window", "qwen2-gqa-tied"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


def check_parts(path, chips=2, **changes):
    """Each chip's part, read alone, is that of the whole; `changes` are of the configuration."""
    checkpoint = resolve.resolve(str(path)).open(None)
    config, num_parts = dataclasses.replace(checkpoint.config, **changes), 0

    def place(path, info, stored):
        nonlocal num_parts
        parts = [
            rules.part(config, path, info, stored, Mesh(model=chips), 0, chip)
            for chip in range(chips)
        ]
        whole = np.asarray(stored)
        for chip, part in enumerate(parts):
            expected = rules.part(config, path, info, whole, Mesh(model=chips), 0, chip)
            assert part.dtype == expected.dtype
            np.testing.assert_array_equal(part, expected, path)
        num_parts += bool(rules.mesh_axes(path, info))
        return whole

    infos = decoder.param_infos(config)
    checkpoint.load_params(infos, None, place, in_part=True)
    assert num_parts > len(params.flatten(infos)) / 3


@pytest.mark.parametrize("chips", [2, 3])
@pytest.mark.parametrize("name", HF)
def test_parts_of_a_directory(name, chips):
    check_parts(test_convert.GOLDEN / name, chips)


def test_a_share_without_heads_is_zeros():
    """Chip 1 of 4 has none of 9 heads in 3 groups."""
    model = fakes.llama(num_heads=9, num_kv_heads=3)
    values = {path: np.ones(info.shape, np.float32) for path, info
              in params.flatten(model.parameters()).items()}  # fmt: skip
    found = []
    for path, info in params.flatten(model.parameters()).items():
        source = TensorSource(
            "",
            {path: info.shape},
            lambda name, start, stop, columns=slice(None): values[name][
                (slice(start, stop), columns)[: values[name].ndim]
            ],
        )
        stored = load.StoredParameter(source, Stored((path,)), info)
        for chip in range(4):
            part = rules.part(model, path, info, stored, Mesh(model=4), 0, chip)
            expected = rules.part(model, path, info, values[path], Mesh(model=4), 0, chip)
            np.testing.assert_array_equal(part, expected, path)
            found.append(part.size and not part.any())
    assert any(found)


def test_parts_of_a_native_directory(tmp_path):
    check_parts(test_convert.run(test_convert.TINY, tmp_path / "native", "native"))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_parts_of_a_file_with_blocks(kind, tmp_path):
    """32 columns a block, and 24 of 48 are a chip's."""
    config = test_gguf.LLAMA
    tensors = test_gguf.tensors_of(config, test_gguf.random_params(config))
    kind = gguf.GGMLQuantizationType[kind]
    check_parts(test_gguf.write_gguf(tmp_path / "tiny.gguf", config, tensors, quantization=kind))
    assert not (tmp_path / "cache").exists()  # nothing is converted for one host's part


def test_little_more_than_the_parts_is_read(monkeypatch):
    """Half of all but norms, which every chip has."""
    read, counted = safetensors_file._read, []

    def counting(*arguments):
        found = read(*arguments)
        counted.append(found.nbytes)
        return found

    monkeypatch.setattr(safetensors_file, "_read", counting)
    checkpoint = resolve.resolve(str(test_convert.GOLDEN / "llama-gqa-tied-rope3")).open(None)
    config, infos = checkpoint.config, decoder.param_infos(checkpoint.config)
    counted.clear()
    checkpoint.load_params(
        infos,
        None,
        lambda path, info, stored: rules.part(config, path, info, stored, Mesh(model=2), 0, 1),
    )
    assert sum(counted) <= 0.55 * params.num_bytes(infos)


_ONE_OF_TWO = """
import json, sys, threading
import jax
index, port, path = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.config.update("jax_num_cpu_devices", 1)
jax.distributed.initialize(f"localhost:{port}", 2, index)
import numpy as np
from configs.engine import Config, EngineConfig
from configs.kinds.params import ParamInfo
from configs.mesh import Mesh
from inference import new_weights
from inference.checkpoints import resolve
from inference.checkpoints import safetensors_file

read, counted = safetensors_file._read, []
def counting(*arguments):
    found = read(*arguments)
    counted.append(found.nbytes)
    return found
safetensors_file._read = counting

def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

checkpoint = resolve.resolve(path).open(None)
engine = EngineConfig.of(linear="reference")
load = new_weights.reader(Config(checkpoint.config, engine, Mesh(model=2)), checkpoint)
jax.device_put(np.zeros(8)).block_until_ready()
before, most, has_loaded = anonymous(), 0, threading.Event()

def sample():
    global most
    while not has_loaded.wait(0.002):
        most = max(most, anonymous())

sampling = threading.Thread(target=sample)
sampling.start()
params = load()
has_loaded.set()
sampling.join()
grown, leaves = max(most, anonymous()) - before, jax.tree.leaves(params)
shards = [leaf.addressable_shards[0].data for leaf in leaves]
held, sums = sum(x.nbytes for x in shards), [float(np.asarray(x, np.float32).sum()) for x in shards]
print(json.dumps([sum(counted), grown, held, sums]))
"""


def _write_sharded(directory):
    """202 MB of bfloat16 in two files: 2 MB and 8 MB a matrix, 33 MB a table."""
    width, ffn, vocab, layers = 1024, 4096, 16384, 4
    shapes = {f"model.layers.{layer}.{part}.weight": shape for layer in range(layers) for
              part, shape in {
                  **{f"self_attn.{one}_proj": (width, width) for one in "qkvo"},
                  **{f"mlp.{one}_proj": (ffn, width) for one in ("gate", "up")},
                  "mlp.down_proj": (width, ffn), "input_layernorm": (width,),
                  "post_attention_layernorm": (width,)}.items()}  # fmt: skip
    shapes |= {"model.norm.weight": (width,), "lm_head.weight": (vocab, width),
               "model.embed_tokens.weight": (vocab, width)}  # fmt: skip
    generator, files = np.random.default_rng(0), {"a.safetensors": {}, "b.safetensors": {}}
    for index, (name, shape) in enumerate(shapes.items()):
        values = generator.random(shape, np.float32).astype(ml_dtypes.bfloat16)
        files["ab"[index % 2] + ".safetensors"][name] = values
    for name, tensors in files.items():
        save_file(tensors, directory / name)
    index = {name: file for file, tensors in files.items() for name in tensors}
    (directory / safetensors_file.INDEX).write_text(json.dumps({"weight_map": index}))
    config = json.loads((test_convert.GOLDEN / "llama-mha-sharded" / "config.json").read_text())
    config |= dict(hidden_size=width, intermediate_size=ffn, vocab_size=vocab)
    config |= dict(num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=8)
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.long
def test_two_processes_read_their_halves(tmp_path):
    """Counted bytes, and anonymous memory: its shards, twice the largest tensor and 64 MB."""
    _write_sharded(tmp_path)
    with socket.socket() as one:
        one.bind(("localhost", 0))
        port = str(one.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _ONE_OF_TWO, str(index), port, str(tmp_path)],
            stdout=subprocess.PIPE, text=True, cwd=test_convert.ROOT,
        )
        for index in range(2)
    ]  # fmt: skip
    found = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    checkpoint = resolve.resolve(str(tmp_path)).open(None)
    config, infos = checkpoint.config, decoder.param_infos(checkpoint.config)
    whole = params.flatten(checkpoint.load_params(infos, None))
    declared, largest = params.flatten(infos), max(leaf.nbytes for leaf in whole.values())
    for chip, (num_read, grown, held, sums) in enumerate(found):
        print(f"process {chip}: read {num_read / params.num_bytes(infos):.3f} of the files, holds "
              f"{held} bytes, anonymous memory grew by {grown}")  # fmt: skip
        assert num_read <= 0.55 * params.num_bytes(infos)
        assert grown <= held + 2 * largest + (64 << 20)
        parts = [rules.part(config, path, declared[path], np.asarray(leaf), Mesh(model=2), 0, chip)
                 for path, leaf in whole.items()]  # fmt: skip
        expected = [float(np.asarray(part, np.float32).sum()) for part in parts]
        np.testing.assert_allclose(sums, expected, rtol=1e-6)


def test_blocks_are_as_wide_as_they_are_stored():
    """256 numbers of Q4_K are 144 bytes in a file, and 148 where kernels read them."""
    blocks = np.arange(3 * 144).astype(np.uint8).reshape(3, 144)
    source = TensorSource(
        "", {"x": (3, 256)}, lambda *_: None, read_blocks=lambda name: blocks,
        formats={"x": "q4_k"},
    )  # fmt: skip
    stored = load.StoredParameter(
        source, Stored(("x",)), ParamInfo((3, 256), "q4_k", ("mlp", "embed"))
    )
    assert stored.shape == blocks.shape
    np.testing.assert_array_equal(np.asarray(stored), blocks)
