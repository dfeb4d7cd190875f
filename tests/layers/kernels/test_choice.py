"""Who computes attention: by name, by measurement, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from configs import presets
from configs.cache import keys_values, latent
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.hardware import catalog
from configs.mesh import Mesh
from inference.checkpoints import weight_formats
from inference.runtime import model_runner
from layers import page_rows
from layers.kernels import autotune, tuning
from layers.kernels.attention import api, ffi_cpu, gpu, gpu_latent, jax_tpu, reference, tpu
from layers.kernels.attention.contract import Demand
from layers.kernels.cpu import library
from layers.kernels.device import Device, target_device
from layers.kernels.linear import api as linear
from layers.ragged import Rectangle
from tests import fakes
from tests.layers import native

_H200 = Device("gpu", "NVIDIA H200", 132)
_LLAMA = Demand(32, keys_values(8, 128).page_format("bfloat16"), 64, False)


def _asked(width: int = 128, **changes) -> Demand:
    """Fields of the demand or of its page format, changed."""
    changes = {"key_width": width, "value_width": width} | changes
    of_format = {name: changes.pop(name) for name in set(changes) - set(Demand._fields)}
    page_format = dataclasses.replace(_LLAMA.page_format, **of_format)
    return _LLAMA._replace(page_format=page_format, **changes)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"dtype": "float32"}, "bfloat16 or float16, not float32: set model.dtype"),
        ({"page_tokens": 16}, "64 or 128 tokens, not 16: set engine.cache.page_tokens"),
        ({"width": 80}, "heads of 64, 128 or 256, not 80"),
        ({"width": 512}, "heads of 64, 128 or 256, not 512"),
        ({"num_heads": 130, "kv_heads": 2}, "at most 64 query heads a KV head, not 65"),
        ({"width": 256, "page_tokens": 128}, "no room for pages of 128 tokens"),
        ({"deterministic": True}, "not been measured to be deterministic"),
    ],
)
def test_the_hopper_kernel_names_its_limits(asked, reason):
    assert reason in gpu.limit(_asked(**asked), _H200)


@pytest.mark.parametrize(("kernel", "device", "first_tokens_reason"), [
    (gpu, _H200, None),
    (tpu, Device("tpu", "TPU v6e", 1), "knows no first tokens beside a window: 'reference' does"),
])  # fmt: skip
def test_kernels_of_accelerators_know_chunks_and_some_first_tokens(
    kernel, device, first_tokens_reason
):
    """The reference is chosen where a layer has what a kernel does not know."""
    model = fakes.llama(head_width=64, window=64, first_tokens=4)
    engine = EngineConfig.of(page_tokens=64, attention="reference")
    for changes, reason in (
        ({}, first_tokens_reason),
        ({"first_tokens": 0, "chunked": True}, None),
    ):
        made = Config(model.with_kinds(**changes), engine)
        asked = api.demand(made, made.model.layers[0].mixer, made.model.cache_specs[0])
        page_format = dataclasses.replace(asked.page_format, dtype="bfloat16")
        assert kernel.limit(asked._replace(page_format=page_format), device) == reason


def test_two_blocks_of_the_hopper_kernel_fit_a_multiprocessor(monkeypatch):
    """Of Llama 3's heads, with two pages on their way each: 228 KiB, of which the system takes 1 a
    block.
    """
    assert [gpu.most_stages(*each, 2) for each in ((64, 128), (128, 128), (64, 256))] == [5, 2, 2]
    monkeypatch.setattr(gpu, "SHARED_BYTES", 113 << 10)
    assert gpu.most_stages(64, 128, 2) == 2


@pytest.mark.parametrize("spec, num_heads, most", [
    (keys_values(8, 128), 32, 5), (latent(512, 64), 128, 2)
])  # fmt: skip
def test_no_more_tuned_stages_than_fit_are_taken(monkeypatch, spec, num_heads, most):
    """Whatever a tuning file has."""
    page_format = spec.page_format("bfloat16")
    monkeypatch.setattr(tuning, "sizes", lambda *names: {"num_stages": 9})
    monkeypatch.setattr(gpu, "target_device", lambda: _H200)
    launched = []

    def attend_splits(*args, num_stages, shape, **options):
        launched.append(num_stages)
        return jnp.zeros(shape), None

    monkeypatch.setattr(gpu, "_attend_splits", attend_splits)
    monkeypatch.setattr(gpu_latent, "attend_splits", attend_splits)
    rectangle = Rectangle(
        jnp.zeros(1, jnp.int32), jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), bool),
        (jnp.zeros((1, 64), jnp.int32),),
    )  # fmt: skip
    q_YWNH = jnp.zeros((1, 1, num_heads, page_format.key_width), jnp.bfloat16)
    attend = functools.partial(gpu.attend_pages, group=0, page_format=page_format)
    jax.eval_shape(attend, q_YWNH, gpu.layout(9, 64, page_format), rectangle)
    assert launched == [most]


def test_the_hopper_kernel_runs_on_hopper():
    assert gpu.limit(_LLAMA, _H200) is None
    assert gpu.limit(_LLAMA, Device("gpu", "NVIDIA GH200 480GB", 132)) is None
    for kind in ("NVIDIA A100-SXM4-80GB", "NVIDIA B200", "cpu"):
        assert "Hopper" in gpu.limit(_LLAMA, Device("gpu", kind, 100))


_V6E = Device("tpu", "TPU v6 lite", 1)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"dtype": "float16"}, "bfloat16 or float32, not float16: set model.dtype"),
        ({"page_tokens": 8}, "16, 32, 64 or 128 tokens, not 8: set engine.cache.page_tokens"),
        ({"width": 80}, "multiple of 64, not 80"),
        ({"table_entries": 1 << 18}, "tables of 229376 entries, 262144 are needed"),
        ({"deterministic": True}, "not been measured to be deterministic"),
    ],
)
def test_the_tpu_kernel_names_its_limits(asked, reason):
    assert reason in tpu.limit(_asked(**asked), _V6E)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"dtype": "float32"}, "bfloat16, not float32: set model.dtype"),
        ({"width": 64}, "heads of 128, not 64: 'pallas_tpu' has others"),
        ({"kv_heads": 3}, "1, 2, 4 or a multiple of 8 KV heads, not 3: 'pallas_tpu'"),
        ({"has_window": True}, "'pallas_tpu' skips it"),
        ({"table_entries": 1 << 18}, "tables of 229376 entries, 262144 are needed"),
        ({"deterministic": True}, "not been measured to be deterministic"),
    ],
)
def test_jax_kernel_for_tpus_names_its_limits(asked, reason):
    assert reason in jax_tpu.limit(_asked(**asked), _V6E)


@pytest.mark.parametrize("kernel", [tpu, jax_tpu])
def test_the_tpu_kernels_run_on_what_the_gate_compiles_for(kernel):
    for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"):
        assert kernel.limit(_LLAMA, Device("tpu", kind, 1)) is None
    for kind in ("TPU v4", "NVIDIA H200", "cpu"):
        assert kind in kernel.limit(_LLAMA, Device("tpu", kind, 1))


@pytest.mark.parametrize(("kernel", "device"), [(gpu, _H200), (tpu, _V6E), (jax_tpu, _V6E)])
def test_kernels_refuse_pages_that_they_cannot_read(kernel, device):
    """The reference reads all."""
    uneven = _asked(value_width=64)
    assert kernel.limit(uneven, device) == "has keys and values of one width, not 128 and 64"
    for name in ("int8", "fp8", "int4"):
        for asked in (_asked(dtype=name), _latents(dtype=name, page_tokens=128)):
            assert reference.limit(asked, device) is None
            if kernel is jax_tpu:
                reason = f"reads no {name} caches: leave model.cache_format out"
                assert kernel.limit(asked, device) == reason
    assert reference.limit(uneven, device) is None


@pytest.mark.parametrize(("name", "line"), [
    ("fp8", None), ("int8", None),
    ("int4", "reads caches of int8 and fp8, not of int4: set model.cache_format"),
])  # fmt: skip
def test_an_engine_on_hopper_reads_quantized_pages_by_the_kernel(name, line):
    """Rows take the bytes that the planner counts."""
    model = fakes.llama("bfloat16", num_heads=4, num_kv_heads=2, head_width=64, cache_format=name)
    config = Config(model, EngineConfig.of(attention=None)).for_platform("gpu", pads_bytes=True)
    with jax.sharding.use_abstract_mesh(_mesh()):
        choice = api.choose(config)
    assert choice == (("pallas_gpu", {}) if line is None else ("reference", {"pallas_gpu": line}))
    if line is None:
        page_format = model.cache_specs[0].page_format(name)
        (page_bytes,) = model.page_bytes(64, config.engine.cache.row_multiple)
        assert 2 * gpu.layout(1, 64, page_format).size * model.num_layers == page_bytes


@pytest.mark.parametrize(("changes", "reason"), [
    ({"query_dtype": "float16"}, "int8 caches of bfloat16 models, not float16: set model.dtype"),
    ({"has_observers": True}, "engine.requests.prompt_budgets does not read them"),
    ({"page_tokens": 32}, "64 or 128 tokens, not 32: set engine.cache.page_tokens"),
    ({"width": 80}, "heads of 64, 128 or 256, not 80"),
    ({"num_heads": 264}, "at most 32 query heads a KV head over int8 pages, not 33"),
    ({"num_heads": 136, "width": 256}, "at most 16 query heads a KV head over int8 pages, not 17"),
])  # fmt: skip
def test_the_hopper_kernel_names_its_limits_of_quantized_pages(changes, reason):
    assert reason in gpu.limit(_asked(dtype="int8", **changes), _H200)


@pytest.mark.parametrize(("changes", "reason"), [
    ({}, None),
    ({"num_heads": 99}, "query heads evenly over tiles of at most 16, not 99"),
    ({"value_width": 576, "key_width": 640}, "latents of a multiple of 128 up to 512, not 576"),
    ({"key_width": 640}, "rotary keys of 64, not 128"),
])  # fmt: skip
def test_the_hopper_kernel_names_its_limits_of_quantized_latents(changes, reason):
    found = gpu.limit(_latents(dtype="fp8", **changes), _H200)
    assert found is None if reason is None else reason in found


def _latents(**changes) -> Demand:
    """Of DeepSeek-V3, unless told."""
    told = {"kv_heads": 1, "key_width": 576, "value_width": 512, "values_in_keys": True}
    return _asked(**told | {"num_heads": 128} | changes)


def test_kernels_read_latents():
    for heads in (16, 64, 96, 128):
        assert gpu.limit(_latents(num_heads=heads), _H200) is None
        assert tpu.limit(_latents(num_heads=heads, page_tokens=128), _V6E) is None
    assert gpu_latent.most_stages(576) == 2
    assert jax_tpu.limit(_latents(), _V6E) == "reads values beside their keys, not in them"
    assert reference.limit(_latents(), _V6E) is None


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"dtype": "float32"}, "bfloat16 or float16, not float32: set model.dtype"),
        ({"page_tokens": 16}, "64 or 128 tokens, not 16: set engine.cache.page_tokens"),
        ({"index_width": 96}, "of a multiple of 64 elements, at most 256, not 96"),
        ({"value_width": 192}, "latents of a multiple of 128 up to 512, not 192"),
        ({"value_width": 640, "key_width": 704}, "latents of a multiple of 128 up to 512, not 640"),
        ({"key_width": 544}, "rotary keys of a multiple of 64, not 32"),
        ({"num_heads": 99}, "query heads evenly over tiles of at most 64, not 99"),
        ({"key_width": 640}, "no room for latents of 512 elements beside rotary keys of 128"),
        ({"deterministic": True}, "not been measured to be deterministic"),
    ],
)
def test_the_hopper_kernel_for_latents_names_its_limits(asked, reason):
    assert reason in gpu.limit(_latents(**asked), _H200)


@pytest.mark.parametrize("name, changes, on_tpu", [
    ("deepseek-v3.2", {}, "reference"), ("llama3-8b", {"token_budget": 1024}, "reference"),
    ("deepseek-v4-flash", {}, "pallas_tpu"),
])  # fmt: skip
def test_kernels_serve_queries_that_choose_on_hopper(monkeypatch, name, changes, on_tpu):
    """Tokens by an indexer, pages, and entries of several tokens; a TPU's kernel has none of these,
    and V4's layers without entries.
    """
    model = presets.get(name).config.with_kinds(**changes)
    engine = EngineConfig.of(max_context=4096, cache_bytes=8 << 30)
    for device, expected in ((_H200, "pallas_gpu"), (_V6E, on_tpu)):
        monkeypatch.setattr(api, "target_device", lambda device=device: device)
        assert api.choose(Config(model, engine).for_platform(device.platform)).name == expected


def test_the_tpu_kernel_pads_latents_to_whole_lanes():
    assert "latents of a multiple of 128, not 192" in tpu.limit(_latents(value_width=192), _V6E)
    latents = _latents(page_tokens=128).page_format
    assert page_rows.in_lanes(3, 128, latents).shape == (3, 128, 640)
    assert page_rows.in_lanes(3, 128, _LLAMA.page_format).shape == (3, 128, 2048)


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_tpu_kernel_reads_eight_bits_in_whole_tiles(name):
    """Of bytes these are 32 tokens."""
    assert tpu.limit(_asked(dtype=name, page_tokens=32), _V6E) is None
    assert tpu.limit(_latents(dtype=name, page_tokens=128), _V6E) is None
    assert "pages of 32, 64 or 128 tokens, not 16" in tpu.limit(
        _asked(dtype=name, page_tokens=16), _V6E
    )
    assert "caches of int8 and fp8, not of int4" in tpu.limit(_asked(dtype="int4"), _V6E)
    page_format = _latents(dtype=name).page_format
    assert page_rows.in_lanes(3, 128, page_format).shape == (3, 128, 640)
    heads = _asked(dtype=name).page_format
    assert page_rows.in_lanes(3, 128, heads).shape == (3, 128, 2048 + 128)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"values_in_keys": True, "kv_heads": 1}, None),
        ({"key_width": 192}, None),
        ({"dtype": "float32", "kv_heads": 1, "value_width": 7}, None),
        ({"dtype": "float16"}, "reads pages of float32, bfloat16, fp8, int8 or int4, not float16"),
        ({"dtype": "int4"}, None),
        ({"width": 127}, "reads pairs of elements, a key has 127 and a token 2032"),
        ({"index_width": 7}, "reads pairs of elements, an indexer's key has 7"),
        ({"index_width": 7, "dtype": "float32"}, None),
        (
            {"kv_heads": 1, "value_width": 7},
            "reads pairs of elements, a key has 128 and a token 135",
        ),
        ({"width": 63, "dtype": "int8"}, "reads pairs of elements, a key has 63 and a token 1008"),
    ],
)
def test_the_cpu_kernel_names_its_limits(asked, reason):
    native.need()
    assert ffi_cpu.limit(_asked(**asked), Device("cpu", "cpu", 1)) == reason


def _config(attention: str | None, **changes) -> Config:
    model = fakes.llama("bfloat16", num_heads=4, num_kv_heads=2, head_width=64)
    return Config(model, EngineConfig.of(attention=attention, **changes)).for_platform("gpu")


def test_tables_are_counted_of_the_most_rows_a_step_has(monkeypatch):
    """Of long sequences in small pages they outgrow a TPU's scalar memory."""
    model = fakes.llama("bfloat16", num_heads=4, num_kv_heads=2, head_width=64, max_context=131072)
    monkeypatch.setattr(api, "target_device", lambda: _V6E)
    fits = EngineConfig.of(
        max_seqs=32, max_context=112 << 10, page_tokens=16, attention="pallas_tpu"
    )
    assert api.choose(Config(model, fits)).name == "pallas_tpu"
    for change in ({"max_seqs": 33}, {"max_context": None}, {"prefill_chunks": (33,)}):
        with pytest.raises(
            InputError, match="pallas_tpu has room .* raise engine.cache.page_tokens"
        ):
            api.choose(Config(model, fits.replace(**change)))
    large = fits.replace(max_seqs=200, page_tokens=None)
    assert api.choose(Config(model, large).for_platform("tpu")).name == "pallas_tpu"


def test_a_name_never_falls_back():
    assert api.choose(_config("reference")).name == "reference"
    for name, devices in (
        ("pallas_gpu", "Hopper GPUs"),
        ("pallas_tpu", "TPU v5e"),
        ("jax_tpu", "TPU v5e"),
    ):
        with pytest.raises(InputError, match=f"{name} runs on {devices}.* not on cpu; 'reference'"):
            api.choose(_config(name))
    with pytest.raises(InputError, match="attention=magic: must be one of reference, pallas_gpu"):
        _config("magic")


def test_a_winner_that_cannot_run_is_passed_over(monkeypatch):
    """And no kernel that lost is taken."""
    monkeypatch.setattr(tuning, "winners", lambda operation, device: ())
    with jax.sharding.use_abstract_mesh(_mesh()):
        assert api.choose(_config(None)) == ("reference", {})
        monkeypatch.setattr(tuning, "winners", lambda operation, device: ("pallas_gpu",))
        assert api.choose(_config(None)) == ("pallas_gpu", {})
        name, passed_over = api.choose(_config(None, page_tokens=16))
    assert name == "reference" and "64 or 128 tokens, not 16" in passed_over["pallas_gpu"]


_CHOICES = [
    (Device("gpu", "NVIDIA H200", 132), "Hopper", "pallas_gpu"),
    (Device("gpu", "NVIDIA H100 80GB HBM3", 132), "Hopper", "pallas_gpu"),
    (Device("gpu", "NVIDIA H100 PCIe", 114, "9.0"), "Hopper", "pallas_gpu"),
    (Device("gpu", "NVIDIA GH200 480GB", 132), "Hopper", "pallas_gpu"),
    (Device("gpu", "NVIDIA H20", 78), "Hopper", "pallas_gpu"),
    (Device("gpu", "a card of another name", 132, "9.0"), "Hopper", "pallas_gpu"),
    (Device("gpu", "NVIDIA A100-SXM4-80GB", 108, "8.0"), "NVIDIA A100-SXM4-80GB", "reference"),
    (Device("gpu", "NVIDIA B200", 148, "10.0"), "NVIDIA B200", "reference"),
    (Device("gpu", "AMD Instinct MI300X", 304), "AMD Instinct MI300X", "reference"),
    (Device("tpu", "TPU v5 lite", 1), "TPU v5e", "pallas_tpu"),
    (Device("tpu", "TPU v5", 2), "TPU v5p", "pallas_tpu"),
    (Device("tpu", "TPU v6 lite", 1), "TPU v6e", "pallas_tpu"),
    (Device("tpu", "TPU7x", 2), "TPU7x", "pallas_tpu"),
    (Device("tpu", "TPU v4", 2), "TPU v4", "reference"),
]


@pytest.mark.parametrize(("device", "architecture", "name"), _CHOICES)
def test_a_choice_holds_for_an_architecture(monkeypatch, device, architecture, name):
    """A measured Hopper ranks for every other; a fallback says what could not run, and why."""
    monkeypatch.setattr(api, "target_device", lambda: device)
    config = dataclasses.replace(_config(None), engine=EngineConfig()).for_platform(device.platform)
    choice = api.choose(config)
    assert (device.architecture, choice.name) == (architecture, name)
    assert device.is_hopper == (architecture == "Hopper")
    assert bool(choice.passed_over) == (name == "reference")
    assert all(device.kind in reason for reason in choice.passed_over.values())
    if device.is_hopper:
        assert tuning.winners("attention", device) == ("pallas_gpu",)


def test_sizes_are_those_of_the_nearest_device(monkeypatch):
    sizes = {kind: {"a": {"n": n}} for n, kind in enumerate(("NVIDIA H100 PCIe", "NVIDIA H200"))}
    cores = {"NVIDIA H100 PCIe": 114, "NVIDIA H200": 132}
    measured = {kind: {"sizes": {"k": size}, "cores": cores[kind]} for kind, size in sizes.items()}
    monkeypatch.setattr(tuning, "results", lambda: measured | {"TPU v6 lite": {"attention": ["t"]}})
    for kind, num_cores, n in (
        ("NVIDIA H200", 114, 1), ("NVIDIA H100 80GB HBM3", 132, 1), ("NVIDIA H20", 78, 0),
    ):  # fmt: skip
        assert tuning.sizes("k", Device("gpu", kind, num_cores), "a") == {"n": n}
    assert tuning.winners("attention", Device("tpu", "TPU v6e", 1)) == ("t",)
    assert tuning.winners("attention", Device("tpu", "TPU v5e", 1)) is None


@pytest.mark.parametrize("text", [
    '{"NVIDIA H200": ', "[]", '{"NVIDIA H200": []}', '{"NVIDIA H200": {"attention": ["fastest"]}}',
    '{"NVIDIA H200": {"sizes": {"pallas_gpu": {"a": {"num_splits": "2"}}}}}',
    '{"NVIDIA H200": {"sizes": {"pallas_gpu": 2}}}',
])  # fmt: skip
def test_a_damaged_file_of_measurements_is_not_used(monkeypatch, tmp_path, caplog, text):
    """A line says so once, and the back end's kernels are chosen, with sizes of their own."""
    path = tmp_path / "tuning.json"
    path.write_text(text)
    monkeypatch.setattr(tuning, "PATH", path)
    monkeypatch.setattr(api, "target_device", lambda: _H200)
    tuning.results.cache_clear()
    try:
        assert tuning.winners("attention", _H200) is None
        assert tuning.sizes("pallas_gpu", _H200, "a") == {}
        config = dataclasses.replace(_config(None), engine=EngineConfig()).for_platform("gpu")
        assert api.choose(config).name == "pallas_gpu"
    finally:
        tuning.results.cache_clear()
    (line,) = caplog.messages
    assert line.startswith(f"{path} is not used, kernels choose their sizes: ") and "\n" not in line


def test_choices_of_a_compiler_are_loaded_by_kind_and_version(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(autotune, "FOLDER", tmp_path)
    other = tmp_path / "nvidia-h200-jax-0.1.txt"
    other.touch()
    for device in (_H200, _H200, Device("gpu", "NVIDIA H100", 132)):
        assert autotune.compiler_options(device) == {}
    reason = f"is not used, the compiler chooses anew: not of jax {jax.__version__}"
    assert caplog.messages == [f"{other} {reason}"]
    path = tmp_path / f"nvidia-h200-jax-{jax.__version__}.txt"
    path.touch()
    options = {"xla_gpu_load_autotune_results_from": str(path)}
    assert autotune.compiler_options(_H200) == options
    assert not autotune.reject(_H200, jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory"))
    assert autotune.compiler_options(_H200) == options
    damaged = jax.errors.JaxRuntimeError("INVALID: Failed to parse autotune results string.\nat")
    assert autotune.reject(_H200, damaged) and autotune.reject(_H200, damaged)  # two compile
    assert autotune.compiler_options(_H200) == {}
    reason = "is not used, the compiler chooses anew: Failed to parse autotune results string."
    assert caplog.messages[1:] == [f"{path} {reason}"]


def test_choices_that_cannot_be_read_are_not_loaded(monkeypatch, tmp_path, caplog):
    """XLA would raise for such a file, here a folder."""
    monkeypatch.setattr(autotune, "FOLDER", tmp_path)
    path = tmp_path / f"nvidia-h200-jax-{jax.__version__}.txt"
    path.mkdir()
    for _ in range(2):
        assert autotune.compiler_options(_H200) == {}
    reason = "is not used, the compiler chooses anew: Is a directory"
    assert caplog.messages == [f"{path} {reason}"]


@pytest.mark.parametrize(("device", "level", "line"), [
    (_H200, "INFO", "on NVIDIA H200: attention by pallas_gpu, products by XLA"),
    (Device("gpu", "NVIDIA A100", 108), "WARNING",
     "on NVIDIA A100: attention by reference, products by XLA; pallas_gpu runs on Hopper"),
])  # fmt: skip
def test_a_start_names_its_implementations(monkeypatch, caplog, device, level, line):
    """Matrices of 24 features have no kernel."""
    for module in (api, linear, model_runner):
        monkeypatch.setattr(module, "target_device", lambda: device)
    caplog.set_level("INFO")
    model_runner.for_this_device(_config(None))
    (record,) = caplog.records
    assert record.levelname == level and record.getMessage().startswith(line)


@pytest.mark.parametrize(("name", "format", "device", "products"), [
    ("llama3-8b", None, _H200, "of up to 64 rows by skinny_gpu"),
    ("llama3-8b", "int4_g32", _H200, "of up to 64 rows (int4_g32: 48) by skinny_gpu"),
    ("llama3-8b", "w8a8", _H200,
     "of up to 64 rows by skinny_gpu, except 128 matrices of w8a8 by XLA"),
    ("gpt-oss-20b", "mxfp4", _H200,
     "of up to 48 rows by skinny_gpu, except 1 matrix of int8 (depth 2,880: no multiple of 128), "
     "72 matrices of mxfp4 (depth 2,880: no multiple of 256), 24 matrices of float32 by XLA"),
    ("llama3-8b", None, _V6E, "by XLA: 129 matrices of bfloat16"),
    ("llama3-8b", "int4", _V6E,
     "of up to 128 rows by low_bit_tpu, except 1 matrix of int8 by XLA"),
])  # fmt: skip
def test_a_start_names_products_and_what_has_no_kernel(
    monkeypatch, caplog, name, format, device, products
):
    for module in (api, linear, model_runner):
        monkeypatch.setattr(module, "target_device", lambda: device)
    caplog.set_level("INFO")
    model = presets.get(name).config
    if format is not None:
        formats = weight_formats.rounded(model, format)
        model = dataclasses.replace(model, formats=tuple(formats.items()))
    engine = EngineConfig.of(max_context=4096, cache_bytes=8 << 30)
    model_runner.for_this_device(Config(model, engine).for_platform(device.platform))
    (record,) = caplog.records
    assert record.getMessage().endswith(f", products {products}")


@pytest.mark.parametrize(("device", "dtype"), [
    (_H200, "bfloat16"), (_H200, "float32"), (Device("gpu", "NVIDIA A100", 108), "bfloat16"),
])  # fmt: skip
def test_bytes_of_quantized_pages_are_those_of_the_chosen_layout(monkeypatch, device, dtype):
    """The kernel pads rows; the reference, which other GPUs and float32 get, does not."""
    for module in (api, linear, model_runner):
        monkeypatch.setattr(module, "target_device", lambda: device)
    model = fakes.llama(dtype, num_heads=4, num_kv_heads=2, head_width=64, cache_format="int8")
    config, name = model_runner.for_this_device(
        Config(model, EngineConfig.of(attention=None)).for_platform("gpu")
    )
    assert (name == "pallas_gpu") == (device == _H200 and dtype == "bfloat16")
    pages = api.implementation(name).layout(1, 64, model.cache_specs[0].page_format("int8"))
    num_bytes = pages.size * pages.dtype.itemsize * model.num_layers
    assert [num_bytes] == model.page_bytes(64, config.engine.cache.row_multiple)


@pytest.mark.parametrize(("chip", "device"), [
    ("h100", Device("gpu", "NVIDIA H100 80GB HBM3", 132)), ("h200", _H200),
    ("b200", Device("gpu", "NVIDIA B200", 148)), ("a100", Device("gpu", "NVIDIA A100", 108)),
    ("l4", Device("gpu", "NVIDIA L4", 58)), ("v5e", Device("tpu", "TPU v5 lite", 1)),
    ("v5p", Device("tpu", "TPU v5", 1)), ("v6e", Device("tpu", "TPU v6 lite", 1)),
    ("v7x", Device("tpu", "TPU7x", 1)),
])  # fmt: skip
def test_a_chip_is_planned_with_the_pages_that_an_engine_has_there(monkeypatch, chip, device):
    for module in (api, linear, model_runner):
        monkeypatch.setattr(module, "target_device", lambda: device)
    for name in (None, "int8", "fp8", "int4"):
        model = fakes.llama(
            "bfloat16", num_heads=4, num_kv_heads=2, head_width=64, cache_format=name
        )
        config, _ = model_runner.for_this_device(Config(model, EngineConfig.of(attention=None)))
        lanes = catalog.get(chip).lanes(model.cache_dtype)
        assert config.engine.cache.row_multiple == lanes, name


def test_a_cpu_gets_the_native_library_where_it_is_there(monkeypatch):
    """And the reference for what that cannot read, or without it."""
    native.need()
    assert api.choose(_config(None)).name == "ffi_cpu" == linear.choose(_config(None))
    assert linear.choose(_config(None, linear="reference")) == "reference"
    monkeypatch.setattr(library, "_library", None)
    assert api.choose(_config(None)).name == "reference" == linear.choose(_config(None))
    for choose, part in ((api.choose, "attention"), (linear.choose, "linear")):
        with pytest.raises(
            InputError, match=f"engine.kernels.{part}=ffi_cpu needs the native library"
        ):
            choose(_named(part))


def _named(part: str) -> Config:
    config = _config(None)
    return config.with_engine(**{part: "ffi_cpu"})


def _mesh() -> jax.sharding.AbstractMesh:
    described = jax.sharding.AbstractDevice(_H200.kind, _H200.num_cores, "cuda")
    return jax.sharding.AbstractMesh((1,), ("x",), abstract_device=described)


@pytest.mark.parametrize("platform, described, name", [
    ("gpu", (_H200.kind, _H200.num_cores, "cuda"), "pallas_gpu"),
    ("tpu", (_V6E.kind, 1, "tpu"), "pallas_tpu"),
])  # fmt: skip
def test_chips_that_divide_tokens_take_the_kernels_that_one_takes(platform, described, name):
    """Others are refused by name."""
    model = fakes.llama("bfloat16", num_heads=4, num_kv_heads=2, head_width=64)
    mesh = jax.sharding.AbstractMesh(
        (1,), ("x",), abstract_device=jax.sharding.AbstractDevice(*described)
    )
    for attention in (None, name, "jax_tpu"):
        config = Config(model, EngineConfig.of(attention=attention), Mesh(context=2))
        with jax.sharding.use_abstract_mesh(mesh):
            if attention == "jax_tpu":
                with pytest.raises(InputError, match="jax_tpu reads all tokens of a sequence"):
                    api.choose(config.for_platform(platform, pads_bytes=True))
            else:
                assert api.choose(config.for_platform(platform, pads_bytes=True)) == (name, {})


def test_the_device_may_be_one_that_is_not_there():
    assert target_device().platform == jax.default_backend()
    with jax.sharding.use_abstract_mesh(_mesh()):
        assert target_device() == _H200
