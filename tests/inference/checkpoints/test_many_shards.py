"""A checkpoint of 810 GB in 1,137 shards is accepted or rejected by its headers alone."""

import json
import mmap
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from configs.errors import InputError
from inference.checkpoints import resolve, safetensors_file, text_files
from inference.checkpoints.hf.quantized import modelopt
from inference.families.shared.config_keys import Keys
from inference.files import contents
from tests.inference.checkpoints.test_published import PUBLISHED

CONFIG = PUBLISHED["meta-llama/Meta-Llama-3.1-405B"]["config"]
WIDTH, INNER, ROWS = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["vocab_size"]
CACHED = WIDTH // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
LAYER = {
    "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (CACHED, WIDTH),
    "self_attn.v_proj": (CACHED, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER),
    "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,),
}  # fmt: skip
TENSORS = {
    "model.embed_tokens.weight": (ROWS, WIDTH),
    "model.norm.weight": (WIDTH,),
    "lm_head.weight": (ROWS, WIDTH),
} | {
    f"model.layers.{number}.{name}.weight": shape
    for number in range(CONFIG["num_hidden_layers"])
    for name, shape in LAYER.items()
}


class Counts(NamedTuple):
    """Names of mapped files, and bytes that were copied out of them."""

    files: list[str]
    num_bytes: list[int]


@pytest.fixture
def counts(monkeypatch) -> Counts:
    """Counts what is mapped and copied; files are read in no other way."""
    read = Counts([], [])

    class Counted(mmap.mmap):
        def __getitem__(self, key):
            part = super().__getitem__(key)
            read.num_bytes.append(len(part))
            return part

    def map_counted(descriptor, *args, **options):
        read.files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return Counted(descriptor, *args, **options)

    monkeypatch.setattr(contents.mmap, "mmap", map_counted)
    return read


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """Writes the headers; the weights are holes in the files."""
    folder = tmp_path_factory.mktemp("sparse")
    (folder / text_files.CONFIG).write_text(json.dumps(CONFIG))
    weight_map = {}
    for number, (name, shape) in enumerate(TENSORS.items(), start=1):
        weight_map[name] = f"model-{number:05}-of-{len(TENSORS):05}.safetensors"
        with (folder / weight_map[name]).open("wb") as file:
            num_bytes = safetensors_file.write_header(file, {name: (shape, "bfloat16")}, {})
            file.truncate(file.tell() + num_bytes)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / safetensors_file.INDEX).write_text(json.dumps(index))
    return folder


def read_once(counts: Counts) -> bool:
    """Whether each shard was mapped once, and little more than headers was copied."""
    shards = [name for name in counts.files if name.endswith(".safetensors")]
    assert len(shards) == len(set(shards)) == len(TENSORS) == 1137
    return sum(counts.num_bytes) < 1 << 20


def test_it_is_planned_without_its_shards(checkpoint, counts):
    assert resolve.resolve(str(checkpoint)).config.num_layers == 126
    assert {Path(name).name for name in counts.files} == {text_files.CONFIG}


def test_it_is_accepted_by_its_headers(checkpoint, counts):
    resolve.resolve(str(checkpoint)).open(None)
    assert read_once(counts)


def changed(checkpoint: Path, folder: Path, **keys: object) -> str:
    """Links the shards beside a configuration with some keys changed."""
    for path in checkpoint.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / text_files.CONFIG).unlink()
    (folder / text_files.CONFIG).write_text(json.dumps(CONFIG | keys))
    return str(folder)


def test_it_is_rejected_by_its_headers(checkpoint, counts, tmp_path):
    wide = changed(checkpoint, tmp_path, intermediate_size=INNER + 128)
    with pytest.raises(InputError, match=r"expected \[53376, 16384\]"):
        resolve.resolve(wide).open(None)
    assert read_once(counts)


def test_where_the_head_is_tied_the_index_says_whether_another_is_stored(
    checkpoint, counts, tmp_path
):
    tied = changed(checkpoint, tmp_path, tie_word_embeddings=True)
    index = json.loads((checkpoint / safetensors_file.INDEX).read_text())
    del index["weight_map"]["lm_head.weight"]
    (tmp_path / safetensors_file.INDEX).unlink()
    (tmp_path / safetensors_file.INDEX).write_text(json.dumps(index))
    assert resolve.resolve(tied).config.tied
    assert not [name for name in counts.files if name.endswith(".safetensors")]


def test_an_index_of_more_than_eight_megabytes_is_read(tmp_path):
    """DeepSeek-V3's has 8.9 MB, because it lists each expert's scales."""
    names = {f"model.layers.{n}.{'mlp.experts.' * 8}": "a.safetensors" for n in range(80_000)}
    path = tmp_path / safetensors_file.INDEX
    path.write_text(json.dumps({"weight_map": names}))
    assert path.stat().st_size > 9e6 and len(safetensors_file.read_index(tmp_path)) == 80_000


def test_names_of_experts_are_no_patterns(monkeypatch):
    """The list of Nemotron 3 Nano in NVFP4 names thousands of modules, for thousands of tensors."""
    listed = [f"backbone.layers.1.mixer.experts.{number}.up_proj" for number in range(2_000)]
    find = modelopt.modelopt(Keys({"quant_algo": "NVFP4", "ignore": [*listed, "lm_head*"]}))
    compared = []
    monkeypatch.setattr(modelopt.fnmatch, "fnmatchcase", lambda *pair: compared.append(pair))
    assert find(listed[-1], False) is None and find(f"{listed[0]}s", False) is not None
    assert {pattern for _, pattern in compared} == {"lm_head*"}
