"""GGUF files: the parameters of the checkpoint they were made from, rounded once, cached once."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest

from configs import presets
from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.feed_forward import Gated, Plain
from configs.kinds.rope import Linear, Llama3, LongRope, Rope
from configs.model import LayerSpec, ModelConfig
from inference.checkpoints import resolve, sources
from inference.checkpoints.gguf import gguf_file, gguf_metadata
from layers import decoder, params
from layers import rope as rope_math

_HEADS = Attention(4, 2, 8, Rope(500.0))
_FFN = Gated(64)
LLAMA = ModelConfig(
    name="tiny", family="llama", vocab_size=48, width=32, num_layers=2, max_context=64,
    pattern=(LayerSpec(_HEADS, _FFN),),
)  # fmt: skip
_LOCAL = Attention(4, 2, 16, Rope(10_000.0), window=16, qk_norm="head")
_GLOBAL = Attention(4, 2, 16, Rope(1_000_000.0), qk_norm="head")
_GELU = Gated(64, "gelu_tanh")
GEMMA3 = dataclasses.replace(
    LLAMA, family="gemma3", num_layers=7, norm_eps=1e-6, norm_offset=1.0, post_norms=True,
    pattern=(LayerSpec(_LOCAL, _GELU),) * 5 + (LayerSpec(_GLOBAL, _GELU),),
    embedding_scale=32**0.5, tied=True,
)  # fmt: skip
_CAPPED = Attention(4, 2, 16, Rope(10_000.0), score_cap=50.0)
QWEN2 = dataclasses.replace(LLAMA.with_kinds(biases=("qkv",)), family="qwen2")
QWEN3 = dataclasses.replace(
    LLAMA.with_kinds(head_width=12, qk_norm="head"), family="qwen3", tied=True
)
SMOLLM3 = dataclasses.replace(
    LLAMA, family="smollm3", num_layers=5, tied=True,
    pattern=LLAMA.pattern * 3 + (LayerSpec(dataclasses.replace(_HEADS, rope=None), _FFN),),
)  # fmt: skip
GEMMA2 = dataclasses.replace(
    GEMMA3, family="gemma2", logit_cap=30.0,
    pattern=(LayerSpec(dataclasses.replace(_CAPPED, window=16), _GELU), LayerSpec(_CAPPED, _GELU)),
)  # fmt: skip
OLMO2 = dataclasses.replace(
    LLAMA.with_kinds(qk_norm="all"), family="olmo2", pre_norms=False, post_norms=True
)
_LONGROPE = LongRope((1.0, 1.5, 1.25), (2.0, 4.0, 8.0), 32, 1.25)
PHI3 = dataclasses.replace(
    LLAMA.with_kinds(rope=Rope(500.0, _LONGROPE, 0.75), window=16), family="phi3"
)
_BIASED = Attention(4, 4, 8, rope=None, biases=("qkv", "out"))
GPT2 = dataclasses.replace(
    LLAMA, family="gpt2", norm="layer", tied=True, learned_positions=64,
    pattern=(LayerSpec(_BIASED, Plain(64, "gelu_tanh", has_bias=True)),),
)  # fmt: skip
CONFIGS = {
    config.family: config
    for config in (LLAMA, GEMMA3, QWEN2, QWEN3, SMOLLM3, GEMMA2, OLMO2, PHI3, GPT2)
}


def random_params(config: ModelConfig) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    declared = params.flatten(decoder.param_infos(config))
    return {path: generator.normal(size=i.shape).astype(np.float32) for path, i in declared.items()}


def interleave(rows: np.ndarray, head: int) -> np.ndarray:
    """How llama.cpp's converter stores queries and keys: pairs (i, i + H/2) become neighbours."""
    return rows.reshape(-1, 2, head // 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def tensors_of(config: ModelConfig, leaves: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors llama.cpp's converter writes."""
    heads = config.mixers(Attention)[0]
    qkv = np.cumsum([heads.num_heads, heads.num_kv_heads]) * heads.head_width
    if config.family in ("phi3", "gpt2"):
        return _stacked_tensors(config, leaves)
    tensors = {
        "token_embd.weight": leaves["embed/table"],
        "output_norm.weight": leaves["final_norm"],
    }
    if not config.tied:
        tensors["output.weight"] = leaves["head/table"]
    for i in range(config.num_layers):
        layer = {p.removeprefix(f"layers/{i}/"): v for p, v in leaves.items()}
        query, key, value = np.split(layer["mixer/qkv"], qkv)
        if config.family in ("llama", "smollm3"):
            query, key = (interleave(part, heads.head_width) for part in (query, key))
        gate, up = np.split(layer["ffn/gate_up"], 2)
        block = {
            "attn_q": query, "attn_k": key, "attn_v": value, "attn_output": layer["mixer/out"],
            "ffn_gate": gate, "ffn_up": up, "ffn_down": layer["ffn/down"],
        }  # fmt: skip
        if config.pre_norms:
            block |= {"attn_norm": layer["mixer_norm"], "ffn_norm": layer["ffn_norm"]}
        if heads.biases:
            parts = zip("qkv", np.split(layer["mixer/qkv_bias"], qkv), strict=True)
            tensors |= {f"blk.{i}.attn_{part}.bias": bias for part, bias in parts}
        if heads.qk_norm:
            block |= {"attn_q_norm": layer["mixer/q_norm"], "attn_k_norm": layer["mixer/k_norm"]}
        if config.post_norms:
            block["post_attention_norm"] = layer["mixer_post_norm"]
            block["post_ffw_norm"] = layer["ffn_post_norm"]
        tensors |= {f"blk.{i}.{name}.weight": tensor for name, tensor in block.items()}
    if config.norm_offset:
        return {n: t + np.float32("norm" in n) for n, t in tensors.items()}
    return tensors


def _stacked_tensors(config: ModelConfig, leaves: dict[str, np.ndarray]) -> dict:
    """Of families whose tensors are one to one ours."""
    own = {
        "embed/table": "token_embd.weight", "head/table": "output.weight",
        "positions/table": "position_embd.weight", "final_norm": "output_norm", "mixer/qkv":
        "attn_qkv.weight", "mixer/out": "attn_output.weight", "mixer_norm": "attn_norm",
        "ffn/up": "ffn_up.weight", "ffn/gate_up": "ffn_up.weight", "ffn/down": "ffn_down.weight",
    }  # fmt: skip
    tensors = {}
    for path, leaf in leaves.items():
        layer, _, name = path.removeprefix("layers/").partition("/")
        prefix, name = (f"blk.{layer}.", name) if path.startswith("layers") else ("", path)
        matrix = name.removesuffix("_bias")
        if "norm" in name:
            norm, _, part = name.partition("/")
            stored = f"{own.get(norm, norm)}.{part or 'weight'}"
        else:
            stored = own[matrix] if matrix == name else own[matrix].replace(".weight", ".bias")
        tensors[prefix + stored] = leaf
    rope = config.layers[0].mixer.rope
    scaling = rope and rope.scaling
    if isinstance(scaling, LongRope):
        tensors["rope_factors_long.weight"] = np.array(scaling.long, np.float32)
        tensors["rope_factors_short.weight"] = np.array(scaling.short, np.float32)
    return tensors


def metadata_of(config: ModelConfig) -> dict[str, int | float]:
    heads, ffn = config.layers[0].mixer, config.layers[0].ffn
    values = {
        "block_count": config.num_layers,
        "context_length": config.max_context,
        "embedding_length": config.width,
        "feed_forward_length": ffn.width,
        "attention.head_count": heads.num_heads,
        "attention.head_count_kv": heads.num_kv_heads,
        "attention.key_length": heads.head_width,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
    }
    own: dict[str, dict[str, int | float]] = {
        "gemma3": {"attention.sliding_window": 16, "rope.freq_base": 1_000_000.0},
        "gemma2": {
            "attention.sliding_window": 16,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        "gpt2": {"attention.layer_norm_epsilon": config.norm_eps},
        "phi3": {
            "attention.sliding_window": 16,
            "rope.freq_base": 500.0,
            "rope.dimension_count": 6,
            "rope.scaling.original_context_length": 32,
            "rope.scaling.attn_factor": 1.25,
        },
    }
    values |= own.get(config.family, {"rope.freq_base": 500.0})
    if config.norm == "layer":
        del values["attention.layer_norm_rms_epsilon"]
    return values


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: dict[str, np.ndarray],
    changes: dict | None = None,
    quantization: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """A GGUF of the tensors; a change whose value is None drops that key."""
    writer = gguf.GGUFWriter(path, config.family)
    for key, value in (metadata_of(config) | (changes or {})).items():
        if isinstance(value, str):
            writer.add_string(f"{config.family}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{config.family}.{key}", value)
        elif value is not None:
            writer.add_float32(f"{config.family}.{key}", value)
    for name, tensor in tensors.items():
        if quantization is not None and tensor.ndim == 2:
            writer.add_tensor(name, gguf.quantize(tensor, quantization), raw_dtype=quantization)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def load(path: Path, dtype: str = "float32", progress=None) -> dict[str, jax.Array]:
    resolved = resolve.resolve(str(path))
    infos = decoder.param_infos(dataclasses.replace(resolved.config, dtype=dtype))
    return params.flatten(resolved.open(None).load_params(infos, progress))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch, request):
    if "real" not in request.node.name:
        monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("family", CONFIGS)
def test_configuration_is_the_one_it_was_made_from(family, tmp_path):
    config = CONFIGS[family]
    path = write_gguf(tmp_path / "tiny.gguf", config, tensors_of(config, random_params(config)))
    assert gguf_metadata.read_config(gguf_file.open_gguf(path)) == config


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_parameters_are_the_originals_rounded_once(family, dtype, tmp_path):
    config = CONFIGS[family]
    original = random_params(config)
    loaded = load(write_gguf(tmp_path / "tiny.gguf", config, tensors_of(config, original)), dtype)
    assert loaded.keys() == original.keys()
    for path, value in loaded.items():
        assert value.dtype == dtype
        exact = original[path]
        if config.norm_offset and "norm" in path:  # what is left of it after the 1 went on and off
            exact = (exact + np.float32(1)) - np.float32(1)
        expected = exact.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(value, np.float32), expected, path)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0", "BF16", "F16"])
def test_quantized_rows_are_dequantized_by_the_library(kind, tmp_path):
    quantization = gguf.GGMLQuantizationType[kind]
    tensors = tensors_of(LLAMA, random_params(LLAMA))
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, tensors, quantization=quantization)
    source = gguf_file.tensors(gguf_file.open_gguf(path), LLAMA)
    name = "blk.1.ffn_down.weight"
    whole = gguf.dequantize(gguf.quantize(tensors[name], quantization), quantization)
    expected = whole.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(source.read(name, 0, 32), expected)
    np.testing.assert_array_equal(source.read(name, 5, 17), expected[5:17])
    rows = source.read("blk.0.attn_q.weight", 0, 32)
    np.testing.assert_array_equal(source.read("blk.0.attn_q.weight", 3, 21), rows[3:21])


def test_second_start_reads_the_cache(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, tensors_of(LLAMA, random_params(LLAMA)))
    steps = []
    first = load(path, progress=lambda done, total, label: steps.append(label))
    assert set(steps) == {"converting weights", "loading weights"}
    steps.clear()
    monkeypatch.setattr(gguf_file, "_read", None)  # the file itself is not read again
    second = load(path, progress=lambda done, total, label: steps.append(label))
    assert set(steps) == {"loading weights"}
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])


@pytest.mark.parametrize("damage", ["empty", "truncated", "foreign", "another format"])
def test_damaged_cache_is_written_anew(damage, tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, tensors_of(LLAMA, random_params(LLAMA)))
    first = load(path)
    (cached,) = (tmp_path / "cache").rglob("weights.safetensors")
    sound = cached.read_bytes()
    cached.write_bytes(
        {
            "empty": b"",
            "truncated": sound[: len(sound) // 2],
            "foreign": b"\2\0\0\0\0\0\0\0{}",
            "another format": sound.replace(b'"format": "1"', b'"format": "0"'),
        }[damage]
    )
    for name, value in load(path).items():
        np.testing.assert_array_equal(value, first[name])
    assert cached.read_bytes() == sound
    assert [p.name for p in cached.parent.iterdir()] == [cached.name]  # nothing half-written


def test_changed_file_is_converted_again(tmp_path):
    path = tmp_path / "tiny.gguf"
    original = random_params(LLAMA)
    load(write_gguf(path, LLAMA, tensors_of(LLAMA, original)))
    changed = original | {"final_norm": original["final_norm"] + 1}
    write_gguf(path, LLAMA, tensors_of(LLAMA, changed))
    expected = changed["final_norm"].astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(load(path)["final_norm"], expected)


def test_a_file_that_is_replaced_meanwhile_is_not_taken_for_the_one_that_was_read(tmp_path):
    path, original = tmp_path / "tiny.gguf", random_params(LLAMA)
    write_gguf(path, LLAMA, tensors_of(LLAMA, original))
    header = gguf_file.open_gguf(path)
    changed = original | {"final_norm": original["final_norm"] + 1}
    os.replace(write_gguf(tmp_path / "new.gguf", LLAMA, tensors_of(LLAMA, changed)), path)
    assert header.fingerprints != gguf_file.open_gguf(path).fingerprints


def test_cache_that_cannot_be_written_only_costs_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path / "file"))
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, tensors_of(LLAMA, random_params(LLAMA)))
    assert load(path)


def test_llama3_frequencies_are_recognized(tmp_path):
    scaled = Rope(500.0, Llama3(8.0, 1.0, 4.0, 32))
    divisors = rope_math.inverse_frequencies(Rope(500.0), 8) / rope_math.inverse_frequencies(
        scaled, 8
    )
    tensors = tensors_of(LLAMA, random_params(LLAMA)) | {"rope_freqs.weight": divisors}
    context = {"rope.scaling.original_context_length": 32}
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, tensors, context)
    assert gguf_metadata.read_config(gguf_file.open_gguf(path)).layers[0].mixer.rope == scaled
    load(path)
    tensors["rope_freqs.weight"] = divisors[::-1].copy()
    write_gguf(path, LLAMA, tensors, context)
    with pytest.raises(InputError, match="does not follow the llama3 rule"):
        resolve.resolve(str(path))


@pytest.mark.parametrize("family", CONFIGS)
def test_position_tensors_are_understood_or_named(family, tmp_path):
    config = CONFIGS[family]
    usual = tensors_of(config, random_params(config))
    for name in ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"):
        if (family, name) == ("llama", "rope_freqs.weight"):
            continue
        tensors = {n: t for n, t in usual.items() if n != name}
        if name not in usual:
            tensors[name] = np.linspace(
                1, 8, config.layers[0].mixer.head_width // 2, dtype=np.float32
            )
        with pytest.raises(
            InputError, match="rope_f.* (no place for|missing)|no place for: rope_f"
        ):
            load(write_gguf(tmp_path / "tiny.gguf", config, tensors))


@pytest.mark.parametrize(
    ("changes", "scaling"),
    [({"rope.scaling.factor": 4.0}, Linear(4.0)),  # llama.cpp's own default is linear
     ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, Linear(4.0)),
     ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
     ({"rope.scaling.type": "linear"}, None)],
)  # fmt: skip
def test_a_factor_stretches_unless_the_file_says_otherwise(changes, scaling, tmp_path):
    tensors = tensors_of(LLAMA, random_params(LLAMA))
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, tensors, changes)
    assert resolve.resolve(str(path)).config.layers[0].mixer.rope == Rope(500.0, scaling)


BAD_METADATA = {
    "missing": ({"block_count": None}, "llama.block_count is missing"),
    "unknown key": ({"logit_scale": 8}, "'llama.logit_scale' is not supported"),
    "type": ({"block_count": "two"}, "llama.block_count must be one int"),
    "zero": ({"attention.head_count": 0}, "head_count must be 1 to"),
    "layers": ({"block_count": 10**6}, "block_count must be 1 to 10000"),
    "heads": ({"attention.head_count_kv": 3}, "not a multiple"),
    "theta": ({"rope.freq_base": float("nan")}, "freq_base must be positive"),
    "partial rotation": ({"rope.dimension_count": 4}, "differs from the head width 8"),
    "scaling": ({"rope.scaling.type": "yarn"}, "'yarn' is not supported; valid: none, linear"),
}


@pytest.mark.parametrize("case", BAD_METADATA)
def test_bad_metadata_is_named(case, tmp_path):
    changes, expected = BAD_METADATA[case]
    tensors = tensors_of(LLAMA, random_params(LLAMA))
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, tensors, changes)
    with pytest.raises(InputError, match=expected) as caught:
        resolve.resolve(str(path))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_unknown_architecture_lists_the_known(tmp_path):
    config = dataclasses.replace(LLAMA, family="bloom")
    path = write_gguf(tmp_path / "tiny.gguf", config, {"t": np.zeros(32, np.float32)})
    with pytest.raises(
        InputError, match="'bloom' is not supported; valid: llama, smollm3, gemma, gemma2"
    ):
        resolve.resolve(str(path))


def test_what_reads_images_beside_a_file_is_left_out(tmp_path, caplog):
    path = write_gguf(tmp_path / "tiny.gguf", LLAMA, tensors_of(LLAMA, random_params(LLAMA)))
    config = dataclasses.replace(LLAMA, family="clip")
    projector = write_gguf(tmp_path / "mmproj-tiny.gguf", config, {"t": np.zeros(32, np.float32)})
    resolve.resolve(str(path)).open(None)
    (line,) = (line for line in caplog.messages if "images" in line)
    assert line == f"{path}: images and sounds are not served: {projector.name} is left out"
    with pytest.raises(InputError, match="mmproj-tiny.gguf: architecture 'clip' reads images for"):
        resolve.resolve(str(projector))


def test_missing_left_over_and_misshapen_tensors_are_named(tmp_path):
    tensors = tensors_of(LLAMA, random_params(LLAMA))
    up, down = "blk.0.ffn_up.weight", "blk.0.ffn_down.weight"
    cases = {
        "'blk.0.ffn_up.weight' is missing": {n: t for n, t in tensors.items() if n != up},
        "no place for: extra": tensors | {"extra": tensors[up]},
        "'blk.0.ffn_up.weight' is .32, 64.; expected .64, 32.": tensors | {up: tensors[down]},
        "'blk.0.attn_q.weight' is .16, 32.; expected .32, 32.": tensors | swap(tensors, "q", "k"),
        "'output_norm.weight' is .31.; expected .32. for final_norm": tensors
        | {"output_norm.weight": tensors["output_norm.weight"][:31]},
        "has type I32, which is no weight": tensors | {up: tensors[up].astype(np.int32)},
    }
    for expected, changed in cases.items():
        path = write_gguf(tmp_path / "tiny.gguf", LLAMA, changed)
        with pytest.raises(InputError, match=expected) as caught:
            load(path)
        assert "\n" not in str(caught.value)
        assert not list((tmp_path / "cache").rglob("*.safetensors"))


def swap(tensors: dict[str, np.ndarray], one: str, other: str) -> dict[str, np.ndarray]:
    first, second = f"blk.0.attn_{one}.weight", f"blk.0.attn_{other}.weight"
    return {first: tensors[second], second: tensors[first]}


_PEAK = """
import sys, threading
from pathlib import Path
from inference.checkpoints import resolve
from layers import decoder, params

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))

def watch():
    while not done.wait(0.002):
        peaks[phase] = max(peaks[phase], anonymous_bytes() - before)

def progress(so_far, total, label):
    global phase
    if label == "converting weights":
        phase = "loading" if so_far == total else "converting"

checkpoint = resolve.resolve(sys.argv[1]).open(None)
infos = decoder.param_infos(checkpoint.config)
done, before, phase = threading.Event(), anonymous_bytes(), "converting"
peaks = {"converting": 0, "loading": 0}
watcher = threading.Thread(target=watch)
watcher.start()
loaded = checkpoint.load_params(infos, progress)
peaks["loading"] = max(peaks["loading"], anonymous_bytes() - before)  # the watcher may be late
done.set()
watcher.join()
assert params.num_bytes(infos) == sum(leaf.nbytes for leaf in params.flatten(loaded).values())
print(*peaks.values())
"""


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="anonymous memory is told by /proc"
)
@pytest.mark.parametrize(
    "model", ["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.long)]
)
def test_real_weights_match_their_preset_and_load_in_bounded_memory(model, tmp_path, monkeypatch):
    """Watched from a thread while temporaries are there, in a process without freed memory."""
    weights = presets.get(model).weights
    path = sources.fetch(weights)
    assert sources.cached_path(weights) == path
    (tmp_path / "weights").symlink_to(path.parent.parent)  # nothing is converted yet
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    checkpoint = resolve.resolve(model).open(None)
    assert checkpoint.config == presets.get(model).config
    total = params.num_bytes(decoder.param_infos(checkpoint.config))
    root = Path(__file__).parents[3]
    out = subprocess.check_output([sys.executable, "-c", _PEAK, model], cwd=root, text=True)
    converting, loading = map(int, out.split())
    assert 0 < converting <= 48 << 20
    assert total <= loading <= total + (48 << 20)
