"""Packed weights in a file: mapped as they were, and written again where they are of no use."""

import chex
import jax
import pytest

from configs.engine import Config, EngineConfig
from configs.errors import InputError
from inference.checkpoints import converted, packed_file, safetensors_file
from layers import decoder
from layers.kernels.cpu import library
from layers.kernels.linear import api as linear
from layers.kernels.linear import packed
from tests import fakes
from tests.layers import native


class Kept:
    """A folder, and parameters that can be read into it."""

    def __init__(self, folder, dtype: str):
        native.need()
        model = fakes.llama(dtype)
        config = Config(model, EngineConfig.of(linear="ffi_cpu"))
        infos = decoder.param_infos(model)
        self.folder, self.num_reads = folder, 0
        self.params = linear.pack_params(config, fakes.real_params(model), infos)
        self.expected = linear.abstract(config, infos)

    def load(self):
        def read():
            self.num_reads += 1
            return self.params

        found = packed_file.load(self.folder, self.expected, read)
        chex.assert_trees_all_equal(found, self.params)
        return found

    @property
    def path(self):
        (path,) = self.folder.glob("packed-*")
        return path


@pytest.fixture(params=["bfloat16", "float32"])
def kept(request, tmp_path):
    return Kept(tmp_path, request.param)


def test_a_later_start_maps_them_without_a_copy(kept, monkeypatch):
    map_arrays, mapped = safetensors_file.map_arrays, {}
    monkeypatch.setattr(
        safetensors_file, "map_arrays", lambda path: mapped.update(map_arrays(path)) or mapped
    )
    kept.load()
    assert not mapped
    found = jax.tree.leaves(kept.load(), is_leaf=packed.is_packed)
    matrices = [leaf.data for leaf in found if packed.is_packed(leaf)]
    places = {array.ctypes.data for array in mapped.values()}
    assert matrices and {matrix.unsafe_buffer_pointer() for matrix in matrices} <= places
    assert kept.num_reads == 1


@pytest.mark.parametrize("damage", ["truncated", "emptied", "another's"])
def test_a_file_of_no_use_is_written_again(kept, damage, caplog):
    kept.load()
    whole = kept.path.read_bytes()
    damaged = {"truncated": whole[:-1], "emptied": b"", "another's": whole.replace(b"[", b"[ ", 1)}
    kept.path.write_bytes(damaged[damage])
    kept.load()
    kept.load()
    assert kept.num_reads == 2 and kept.path.read_bytes() == whole
    assert caplog.text.count("; weights are packed again") == 1


def test_another_layout_is_packed_again(kept, monkeypatch, caplog):
    kept.load()
    monkeypatch.setattr(library, "LAYOUT", library.LAYOUT + 1)
    kept.load()
    kept.load()
    assert kept.num_reads == 2 and f"packed-{library.LAYOUT}-" in kept.path.name
    assert caplog.text.count("weights packed in another layout are packed again") == 1


def test_a_folder_that_cannot_be_written_costs_a_line(kept, caplog):
    kept.folder = kept.folder / "file" / "folder"
    kept.folder.parent.write_text("")
    kept.load()
    assert "packed weights are not kept" in caplog.text


def test_a_file_that_another_process_removes_meanwhile(tmp_path):
    with pytest.raises(InputError, match="packed-x: No such file or directory"):
        converted.map_kept(tmp_path / "packed-x")
