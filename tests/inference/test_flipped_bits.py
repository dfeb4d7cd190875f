"""A flipped bit is found in whatever is kept: the file is refused, or what it holds made again."""

import os
import random

import numpy as np
import pytest

from configs.errors import InputError
from configs.hardware import catalog
from inference.checkpoints import converted, packed_file, resolve
from inference.checkpoints.gguf import gguf_digests, gguf_file, gguf_tokenizer
from inference.checkpoints.gguf.export import gguf_export
from inference.families.shared import gguf_names
from inference.files import ownership
from inference.files.resumable_results import ResumableResults
from inference.layerwise.parts import Parts
from inference.planner.calibration import store
from inference.training import token_file
from layers import decoder
from tests.inference.checkpoints import test_packed_file
from tests.scripts import apps


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "tiny.gguf"
    gguf_export.write(resolve.resolve(str(apps.TINY)).open(None), path)
    return path


@pytest.fixture(params=[20, pytest.param(400, marks=pytest.mark.long)])
def every_flip_is_found(request):
    """Checks a file and a function that says whether damage is found in it."""

    def check(path, is_found):
        data = path.read_bytes()
        for bit in random.Random(7).sample(range(8 * len(data)), request.param):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            assert is_found(), f"bit {bit}"
        path.write_bytes(data)
        assert not is_found()

    return check


def refused(read):
    try:
        read()
    except InputError as error:
        assert "\n" not in str(error)
        return True
    return False


def made_again(load):
    """Whether `load`, given what is called to make the thing, calls it."""
    calls = []
    load(lambda: calls.append(1))
    return bool(calls)


def read_all(path):
    resolved = resolve.resolve(str(path))
    checkpoint = resolved.open(None)
    checkpoint.load_tokenizer()
    checkpoint.load_params(decoder.param_infos(resolved.config), None, in_part=True)


def test_a_gguf_file_of_ours(exported, every_flip_is_found):
    every_flip_is_found(exported, lambda: refused(lambda: read_all(exported)))


def test_a_gguf_file_whose_metadata_another_program_copied(exported, tmp_path, caplog):
    """llama-quantize does so: the file has another size."""
    data = exported.read_bytes()
    changed = data.replace(b"tokenizer.ggml.model", b"tokenizer.ggml.modem")
    path = tmp_path / "changed.gguf"
    path.write_bytes(changed)
    assert refused(lambda: gguf_file.open_gguf(path))
    path.write_bytes(changed + bytes(32))
    header = gguf_file.open_gguf(path)
    assert "copied the digests of another file" in caplog.text
    gguf_digests.check_data(header)


def test_divisors_of_a_gguf_file_of_ours(tmp_path):
    """They are in the configuration, which every start reads; it reads weights from a cache."""
    path = tmp_path / "stretched.gguf"
    source = apps.TINY.with_name("llama-gqa-tied-rope3")
    gguf_export.write(resolve.resolve(str(source)).open(None), path)
    entry = gguf_file.open_gguf(path).tensors[gguf_names.ROPE_FACTORS]
    last = entry.position + entry.num_bytes - 4  # of float32, the lowest byte
    data = bytearray(path.read_bytes())
    data[last] ^= 1
    path.write_bytes(data)
    assert refused(lambda: resolve.resolve(str(path)))


def test_weights_as_kernels_read_them(tmp_path, every_flip_is_found):
    kept = test_packed_file.Kept(tmp_path / "packed", "bfloat16")
    kept.load()

    def load(note):
        packed_file.load(kept.folder, kept.expected, lambda: note() or kept.params)

    every_flip_is_found(kept.path, lambda: made_again(load))


def test_converted_weights(tmp_path, exported, every_flip_is_found):
    resolved = resolve.resolve(str(exported))
    infos = decoder.param_infos(resolved.config)
    contents, path = resolved.open(None).contents(), tmp_path / "weights.safetensors"

    def load(note):
        source, progress = contents.source, lambda *done: note()
        converted.open_or_convert(path, infos, source, contents.name_map, progress)

    assert made_again(load)
    every_flip_is_found(path, lambda: made_again(load))


def test_token_ids(tmp_path, every_flip_is_found):
    def load(note):
        token_file.cached("a", lambda: note() or np.arange(200) % 7, 100)

    assert made_again(load)
    [path] = (tmp_path / "cache" / "tokens").iterdir()
    every_flip_is_found(path, lambda: made_again(load))


def test_a_tokenizer_of_a_gguf_file(tmp_path, exported, monkeypatch, every_flip_is_found):
    header = resolve.resolve(str(exported)).open(None).header
    before = os.umask(0o002)
    try:
        gguf_tokenizer.load_tokenizer(header, 320)
    finally:
        os.umask(before)
    [path] = (tmp_path / "cache" / "converted").rglob("tokenizer-*.json")
    ownership.check(path)  # beside it lie weights, which are mapped
    every_flip_is_found(path, lambda: gguf_tokenizer._cached(path) is None)


def test_what_was_measured_of_this_machine(monkeypatch, every_flip_is_found):
    store.write(catalog.get("v5e"))
    every_flip_is_found(store.path(), lambda: store.read() is None)


def test_finished_layers(tmp_path, every_flip_is_found):
    parts = Parts(tmp_path / "parts", {})
    parts.write("layer", {"a": np.ones((3, 4), np.float32)}, {"a": 0.5})
    every_flip_is_found(parts._place("layer"), lambda: refused(lambda: parts.read("layer")))


def test_results_of_a_run(tmp_path, every_flip_is_found):
    kept = ResumableResults(tmp_path / "out", {"weights": "w"}, ["a", "b"], False)
    kept.add("a", {"text": "ü", "token_ids": [1, 2]})
    kept.add("b", {"text": "b", "logprobs": None})
    kept.close(False)
    whole = dict(kept.results)

    def is_found():  # or what a damaged end of a line cut off is computed again
        try:
            again = ResumableResults(tmp_path / "out", {"weights": "w"}, ["a", "b"], False)
        except InputError:
            return True
        again.close(False)
        assert all(whole[key] == result for key, result in again.results.items())
        return again.results != whole

    every_flip_is_found(kept.path, is_found)
