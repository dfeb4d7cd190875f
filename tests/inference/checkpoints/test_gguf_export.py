"""What is written for llama.cpp: read back by us, and by the package `gguf`."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from configs import presets
from configs.errors import InputError
from inference.checkpoints import convert, resolve, sources
from inference.checkpoints.gguf.export import gguf_export
from inference.engine import Engine
from inference.families import families
from inference.request import SamplingParams
from layers import decoder, params
from tests.inference.checkpoints.test_gguf_converted import CASES as CONVERTED
from tests.inference.checkpoints.test_gguf_mixtures import CONFIGS as MIXTURES
from tests.inference.checkpoints.test_gguf_qwen import CASES as QWEN
from tests.inference.checkpoints.test_gguf_types import logits_of

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
WIDE = GOLDEN / "quantized" / "fp8-blocks"  # whose rows are whole blocks
CASES = (
    "llama-gqa-tied-rope3", "llama-tokenizer", "llama-mha-sharded", "mistral-mqa-tied",
    "qwen2-gqa-tied", "qwen3-gqa-tied", "qwen3-mha-untied-float32", "gemma2-gqa-tied",
    "gemma3-gqa-linear-rope", "gemma3-mqa", "smollm3-gqa-tied", "olmo2-mha-untied",
    "gpt2-mha-tied-bare", "ernie4_5-gqa-neighbors", "granite-gqa-scales", "ministral3-gqa-yarn",
    "hunyuan_v1_dense-gqa-alpha", "seed_oss-gqa-qkv-bias", "exaone4-gqa-window",
    "exaone4-mha-tied-float32", "arcee-gqa-yarn", "glm4-gqa-sandwich", "glm-gqa-bias",
    "glm4-mha-bias-tied-float32", "gemma-gqa-tied", "mimo-gqa-predicting", "internlm2-gqa-packed",
    "internlm3-gqa-linear-rope", "olmo-gqa-limit", "nemotron-gqa-partial",
    "cohere-gqa-norms-tied", "cohere2-mha-untied-float32", "phi-mha-untied",
    "gpt_neox-mha-untied", "stablelm-gqa-parallel-norms", "stablelm-mha-bias-tied-float32",
    "starcoder2-gqa-window-tied", "afmoe-gqa-window-scaled", "bailing_moe_v2-gqa-partial-groups",
    "ernie4_5_moe-gqa-dense-shared", "exaone_moe-gqa-window", "granitemoe-gqa-scales",
    "granitemoeshared-gqa-scales", "hunyuan_v1_moe-mqa-tied-float32", "phi3-mha-window",
)  # fmt: skip


def test_every_family_that_is_written_has_a_case():
    """Those with states have theirs in `test_gguf_states.py`; of others files are written again."""
    written = {
        name
        for name, family in families.ALL.items()
        if family.gguf and family.gguf.writer and not family.gguf.writer.has_states
    }
    own = {case.split("-")[0] for case in (*CASES, *CONVERTED, *QWEN)}
    own |= {config.family for config in MIXTURES.values()} | {"gemma4"}  # `test_gemma4.py`
    others = {"glm4_moe_lite", "gemma4_unified", "solar_open", "mistral_large3"}  # there
    assert written - others == own - others


def checkpoint(path: Path):
    """Without a scale of Gemma's queries, which llama.cpp has for the largest models alone."""
    own = resolve.resolve(str(path)).open(None)
    if not own.config.family.startswith("gemma"):
        return own
    pattern = tuple(
        dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, scale=None))
        for layer in own.config.pattern
    )
    return dataclasses.replace(own, config=dataclasses.replace(own.config, pattern=pattern))


def exact(own) -> tuple:
    """The model in float32, with the checkpoint's own numbers."""
    config = dataclasses.replace(own.config, dtype="float32", formats=())
    return config, own.exact().load_params(decoder.param_infos(config))


@pytest.mark.parametrize("case", CASES)
def test_the_model_is_the_same(case, tmp_path):
    """Up to norms from which 1 was taken again."""
    file = tmp_path / "model.gguf"
    original = checkpoint(GOLDEN / case)
    gguf_export.write(original, file)
    (one, found), (two, expected) = exact(checkpoint(file)), exact(original)
    assert one.layers == two.layers
    expected = params.flatten(expected)
    for path, values in params.flatten(found).items():
        np.testing.assert_allclose(values, expected[path], rtol=0, atol=one.norm_offset * 1e-7)


@pytest.mark.parametrize("case", ["llama-gqa-tied-rope3", "gemma3-gqa-linear-rope"])
def test_logits_are_the_same(case, tmp_path):
    original = checkpoint(GOLDEN / case)
    gguf_export.write(original, tmp_path / "model.gguf")
    found, expected = exact(checkpoint(tmp_path / "model.gguf")), exact(original)
    np.testing.assert_allclose(logits_of(*found), logits_of(*expected), rtol=0, atol=1e-5)


def numbers(file: Path) -> dict[str, np.ndarray]:
    """What the package `gguf` reads."""
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(file).tensors
    }


def test_the_package_reads_the_same_numbers(tmp_path):
    """Interleaved heads, as llama.cpp has them: pair i of a head is its rows i and i + H / 2."""
    own = checkpoint(GOLDEN / "llama-mha-sharded")
    gguf_export.write(own, tmp_path / "model.gguf")
    found, source = numbers(tmp_path / "model.gguf"), own.contents().source
    attention = own.config.layers[0].mixer
    for part, name in (("q", "blk.1.attn_q"), ("v", "blk.1.attn_v")):
        stored = f"model.layers.1.self_attn.{part}_proj.weight"
        rows = np.asarray(source.read(stored, 0, source.shapes[stored][0]), np.float32)
        heads = rows.reshape(-1, attention.head_width, rows.shape[1])
        half = attention.head_width // 2
        pairs = [row for i in range(half) for row in (i, i + half)]
        expected = heads[:, pairs] if part == "q" else heads
        np.testing.assert_array_equal(found[f"{name}.weight"], expected.reshape(rows.shape))
    assert found["blk.0.attn_norm.weight"].dtype == np.float32


@pytest.mark.parametrize("dtype", ["q8_0", "q5_0", "q4_0", "q4_1", "bfloat16"])
def test_matrices_get_the_type_that_is_asked_for(dtype, tmp_path):
    own, file = checkpoint(WIDE), tmp_path / "model.gguf"
    gguf_export.write(own, file, dtype)
    source, found = own.contents().source, numbers(file)
    name = "model.layers.1.mlp.down_proj.weight"
    values = np.asarray(source.read(name, 0, source.shapes[name][0]), np.float32)
    kind = gguf.GGMLQuantizationType[{"bfloat16": "BF16"}.get(dtype, dtype.upper())]
    expected = gguf.dequantize(gguf.quantize(values, kind), kind)
    np.testing.assert_array_equal(found["blk.1.ffn_down.weight"], expected)
    assert {t.tensor_type.name for t in gguf.GGUFReader(file).tensors} == {"F32", kind.name}
    if dtype != "bfloat16":
        kept = {path: own for path, own in checkpoint(file).formats().items() if {*own} == {dtype}}
        assert set(kept) >= {"embed/table", "layers/0/mixer/qkv", "layers/1/ffn/gate_up"}


@pytest.mark.parametrize("dtype", [None, "q4_0"])
def test_blocks_are_written_as_they_are_stored(dtype, tmp_path):
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    gguf_export.write(checkpoint(WIDE), first, "q4_0")
    gguf_export.write(checkpoint(first), second, dtype)
    one, two = gguf.GGUFReader(first).tensors, gguf.GGUFReader(second).tensors
    assert [tensor.name for tensor in one] == [tensor.name for tensor in two]
    for a, b in zip(one, two, strict=True):
        assert a.tensor_type == b.tensor_type and a.data.tobytes() == b.data.tobytes(), a.name


def directory(folder: Path, vocab_size: int, tokenizer: dict, **described) -> Path:
    """A tiny model with a tokenizer."""
    folder.mkdir()
    raw = json.loads((WIDE / "config.json").read_text())
    del raw["quantization_config"]
    raw |= {"vocab_size": vocab_size, "eos_token_id": [2]}
    source = checkpoint(WIDE).contents().source
    tensors = {name: source.read(name, 0, shape[0]) for name, shape in source.shapes.items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.resize(tensors[name], (vocab_size, 64))
    tensors = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3, 4]}))
    return folder


def golden_tokenizer(name: str) -> dict:
    return json.loads((GOLDEN / name / "tokenizer.json").read_text())


def pieces(tmp_path: Path, **described) -> Path:
    """A SentencePiece vocabulary of 640, and ten rows of the embedding behind it."""
    own = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | described
    return directory(tmp_path / "pieces", 650, golden_tokenizer("sentencepiece-tokenizer"), **own)


def bytes_of(tmp_path: Path) -> Path:
    return GOLDEN / "llama-tokenizer"


@pytest.mark.parametrize("make", [bytes_of, pieces])
def test_a_tokenizer_comes_back(make, tmp_path):
    own, file = checkpoint(make(tmp_path)), tmp_path / "model.gguf"
    gguf_export.write(own, file)
    found = checkpoint(file)
    one, two = found.load_tokenizer(), own.load_tokenizer()
    assert one.template == two.template and one.special_tokens == two.special_tokens
    assert one.bos_id == two.bos_id and found.eos_ids == own.eos_ids
    for text in ("The quick brown  fox", "1234 Ünï çødé 東京 🙂\n\n x"):
        assert one.encode(text) == two.encode(text)
        assert one.decode(one.encode(text)) == two.decode(two.encode(text))
    gguf_export.write(found, tmp_path / "again.gguf")
    fields = [gguf.GGUFReader(path).fields for path in (file, tmp_path / "again.gguf")]
    assert {key: own.contents() for key, own in fields[0].items() if key[:9] == "tokenizer"} == {
        key: own.contents() for key, own in fields[1].items() if key[:9] == "tokenizer"
    }


def test_marks_of_gaps_come_back(tmp_path):
    names = {"fim_pre_token": "<before>", "fim_suf_token": "<after>", "fim_mid_token": "<between>"}
    own, file = checkpoint(pieces(tmp_path, **names)), tmp_path / "model.gguf"
    gguf_export.write(own, file)
    fields = gguf.GGUFReader(file).fields
    marks = [fields[f"tokenizer.ggml.{key}_id"].contents() for key in names]
    one, two = checkpoint(file).load_tokenizer(), own.load_tokenizer()
    assert marks == [two.special_id(key) for key in names] == [640, 641, 642]
    ids = one.encode_infill("x", "y")
    assert ids == two.encode_infill("x", "y") and [id for id in ids if id >= 640] == marks


def test_templates_are_written(tmp_path):
    folder = pieces(tmp_path, chat_template="{{ messages }}")
    gguf_export.write(checkpoint(folder), tmp_path / "model.gguf")
    assert checkpoint(tmp_path / "model.gguf").load_tokenizer().template == "{{ messages }}"


def other_model(raw):
    raw["model"] = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}
    raw["added_tokens"], raw["post_processor"] = [], None


TOKENIZERS = {
    "model": (other_model, "its model is 'WordLevel', not BPE"),
    "pre-tokenizer": (
        lambda raw: raw.update(pre_tokenizer={"type": "WhitespaceSplit"}),
        "its pre-tokenizer has 'WhitespaceSplit'",
    ),
    "pattern": (
        lambda raw: raw.update(
            pre_tokenizer={
                "type": "Split", "pattern": {"Regex": "abc"}, "behavior": "Isolated",
                "invert": False,
            }
        ),
        "llama.cpp has no name for how it cuts texts, 'abc'",
    ),
    "normalizer": (lambda raw: raw.update(normalizer={"type": "NFKC"}), "its normalizer is 'NFKC'"),
}  # fmt: skip


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_without_a_counterpart_is_named(case, tmp_path):
    change, message = TOKENIZERS[case]
    raw = golden_tokenizer("llama-tokenizer")
    change(raw)
    with pytest.raises(InputError) as caught:
        gguf_export.write(checkpoint(directory(tmp_path / "x", 400, raw)), tmp_path / "x.gguf")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "x.gguf").exists()


def test_merges_in_another_order_than_tokens_are_named(tmp_path):
    """Of pieces the file has scores alone, which rank merges by what they make."""
    raw = golden_tokenizer("sentencepiece-tokenizer")
    raw["model"]["merges"] = raw["model"]["merges"][: len(raw["model"]["merges"]) // 4]
    folder = directory(tmp_path / "x", 650, raw, bos_token="<s>", unk_token="<unk>")
    with pytest.raises(InputError, match="would be cut in another way"):
        gguf_export.write(checkpoint(folder), tmp_path / "x.gguf")


@pytest.mark.long
@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_a_published_file_is_written_bit_for_bit(model, tmp_path):
    """And its tokenizer is expressed from the files of a directory."""
    original = sources.fetch(presets.get(model).weights)
    gguf_export.write(resolve.resolve(model).open(None), tmp_path / "model.gguf")
    one, two = (
        {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
        for path in (original, tmp_path / "model.gguf")
    )
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        assert tensor.tensor_type == two[name].tensor_type, name
        assert tensor.data.tobytes() == two[name].data.tobytes(), name
    convert.convert(resolve.resolve(model).open(None), tmp_path / "hf", "hf")
    gguf_export.write(checkpoint(tmp_path / "hf"), tmp_path / "again.gguf", "q8_0")


@pytest.mark.long
@pytest.mark.skipif("LLAMA_CPP_PYTHON" not in os.environ, reason="llama.cpp: LLAMA_CPP_PYTHON=")
@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_llama_cpp_generates_the_same_tokens(model, tmp_path):
    """From the files of a directory, in float32, in which both compute."""
    text, count = "The quick brown fox jumps over the lazy dog. In the year 1969, people", 24
    convert.convert(resolve.resolve(model).open(None), tmp_path / "hf", "hf")
    file = tmp_path / "model.gguf"
    gguf_export.write(checkpoint(tmp_path / "hf"), file, "float32")
    command = [os.environ["LLAMA_CPP_PYTHON"], "tests/golden/read_gguf.py", str(file), text]
    told = subprocess.check_output([*command, str(count)], cwd=ROOT, text=True)
    theirs = json.loads(told.splitlines()[-1])
    engine = Engine.from_model(str(tmp_path / "hf"), max_seqs=1, dtype="float32")
    (ours,) = engine.generate([text], SamplingParams(max_new_tokens=count, temperature=0.0))
    assert engine.tokenizer.encode(text) == theirs["ids"]
    assert list(ours.token_ids) == theirs["greedy"]


def changed(**fields):
    own = checkpoint(WIDE)
    return dataclasses.replace(own, config=dataclasses.replace(own.config, **fields))


MODELS = {
    "family": (changed, {"family": "helium"}, "the family helium is not written as .gguf; valid:"),
    "cap": (changed, {"logit_cap": 3.0}, "model.logit_cap has no place in a .gguf file"),
    "rows": (lambda: checkpoint(GOLDEN / "qwen3-gqa-tied"), {}, "not a multiple of q8_0's block"),
    "blocks": (
        lambda: checkpoint(GOLDEN / "quantized" / "ct-int4-g32"), {},
        "is stored in int4_g32, which --dtype=q8_0 would round again",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MODELS)
def test_a_model_without_a_counterpart_is_named(case, tmp_path):
    make, fields, message = MODELS[case]
    with pytest.raises(InputError) as caught:
        gguf_export.write(make(**fields), tmp_path / "x.gguf", "q8_0")
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_blocks_of_ours_are_written_as_numbers_alone(tmp_path):
    own = checkpoint(GOLDEN / "quantized" / "ct-int4-g32")
    with pytest.raises(InputError, match="stored in int4_g32, which .gguf files have not"):
        gguf_export.write(own, tmp_path / "x.gguf")
    gguf_export.write(own, tmp_path / "x.gguf", "float32")
    found, expected = exact(checkpoint(tmp_path / "x.gguf")), exact(own)
    np.testing.assert_allclose(logits_of(*found), logits_of(*expected), rtol=0, atol=1e-5)


def test_a_file_that_is_there_stays(tmp_path):
    (tmp_path / "x.gguf").write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        gguf_export.write(checkpoint(WIDE), tmp_path / "x.gguf")
    assert (tmp_path / "x.gguf").read_text() == "mine"
