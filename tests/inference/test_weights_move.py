"""Weights that leave the device, come back, and give way to others while requests run."""

import gc
import json
import math
import time
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from configs import overrides
from configs.engine import Config, EngineConfig
from configs.errors import InputError
from configs.mesh import ONE_CHIP, Mesh
from inference.checkpoints import resolve
from inference.engine import Engine
from inference.outputs import version_ranges
from inference.request import SamplingParams
from layers import decoder
from layers.params import init
from tests import fakes

pytestmark = pytest.mark.quick_code

_SIZES = dict(max_seqs=4, decode_rows=(4,), page_tokens=8, chunk_tokens=16, prefill_chunks=(2,),
              cache_bytes=1 << 20)  # fmt: skip
_PROMPTS = fakes.prompts([21, 40, 5, 33, 12, 9], 131, seed=1)
_CHIPS = [ONE_CHIP, Mesh(data=2, model=2)]


def _make(params=None, mesh=ONE_CHIP, **settings):
    return fakes.engine(fakes.llama(), params, "one", mesh=mesh, **_SIZES | settings)


def _params(seed=3):
    params = init(decoder.param_infos(fakes.llama()), seed)
    return jax.tree.map(lambda leaf: leaf * 2 if leaf.ndim == 2 else leaf, params)


def _requests():
    return [
        SamplingParams(max_new_tokens=14, ignore_eos=True, seed=i, temperature=i % 2, n=1 + i % 3)
        for i in range(len(_PROMPTS))
    ]


def _start(engine, steps):
    groups = []
    for prompt, params in zip(_PROMPTS, _requests(), strict=True):
        groups.append(engine._requests[engine.add_request(prompt, params)].group)
    for _ in range(steps):
        engine.step()
    return groups


def _answers(groups):
    completions = [group.completion() for group in groups]
    return [[one.token_ids for one in (c, *c.others)] for c in completions]


def _device_bytes():
    """Reading a shard's data would make another array of the same memory, counted the next time."""
    gc.collect()
    return sum(
        math.prod(array.sharding.shard_shape(array.shape))
        * array.dtype.itemsize
        * len(array.sharding.addressable_devices)
        for array in jax.live_arrays()
    )


@pytest.mark.parametrize("mesh", _CHIPS, ids=str)
@pytest.mark.parametrize("keeps_pages", [False, True])
def test_an_engine_sleeps_and_goes_on(mesh, keeps_pages):
    groups = _start(undisturbed := _make(mesh=mesh), 0)
    fakes.drain(undisturbed)
    expected = _answers(groups)
    prefilled = undisturbed.scheduler.counters.num_prefilled_tokens
    del undisturbed, groups
    fakes.real_params(fakes.llama())
    outside = _device_bytes()
    engine = _make(lambda: fakes.real_params.__wrapped__(fakes.llama()), mesh)
    groups = _start(engine, 6)
    awake = _device_bytes() - outside
    engine.sleep(keeps_pages=keeps_pages)
    assert _device_bytes() - outside <= 0.05 * awake
    for refused in (
        lambda: engine.add_request([1, 2], SamplingParams()),
        engine.step,
        engine.sleep,
        engine.warm_up,
        engine.rebuild,
        lambda: engine.update_params(_params()),
    ):
        with pytest.raises(InputError, match="the engine sleeps"):
            refused()
    engine.wake()
    assert _device_bytes() - outside == pytest.approx(awake, rel=0.01)
    fakes.drain(engine)
    assert _answers(groups) == expected
    is_same = engine.scheduler.counters.num_prefilled_tokens == prefilled
    assert is_same == keeps_pages  # nothing is computed twice, or what was running
    with pytest.raises(InputError, match="does not sleep"):
        engine.wake()


def test_weights_that_sleep_dropped_are_given_to_wake(monkeypatch):
    engine = _make(_params(3))
    before = engine.generate(_PROMPTS[:1], fakes.greedy(8))[0]
    engine.sleep(keeps_weights=False)
    with pytest.raises(InputError, match="no weights were kept"):
        engine.wake()
    with pytest.raises(InputError, match="final_norm is absent"):
        engine.wake({"embed": _params()["embed"]})
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(engine.model_runner, "reset", Mock(side_effect=MemoryError))
        engine.wake(_params(4))
    assert not engine.model_runner.params  # it sleeps on
    engine.wake(_params(4))
    after = engine.generate(_PROMPTS[:1], fakes.greedy(8))[0]
    expected = _make(_params(4)).generate(_PROMPTS[:1], fakes.greedy(8))[0]
    assert after.token_ids == expected.token_ids != before.token_ids
    assert (before.params_versions, after.params_versions) == ((0,), (1,))


@pytest.mark.parametrize("mesh", _CHIPS, ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_weights_change_under_load(mesh, overlap):
    """Up to the change an answer is the old weights', then what the new ones make of it; requests
    that end before, run on and come after say so, streamed or whole.
    """
    old, new = _params(3), _params(4)
    engine = _make(old, mesh, overlap=overlap)
    prompts, lengths = [*_PROMPTS, _PROMPTS[3]], [2, 30, 40, 25, 9, 9, 5]
    ids = [
        engine.add_request(prompt, fakes.greedy(n, ignore_eos=True))
        for prompt, n in zip(_PROMPTS, lengths[:-1], strict=True)
    ]
    groups = [engine._requests[id].group for id in ids]
    versions, outputs = {}, []
    while len(groups[1].sequences[0].output_tokens) < 12:
        outputs += engine.step()
    engine.scheduler.check_integrity()
    assert engine.update_params(new) == 1
    ids.append(engine.add_request(_PROMPTS[3], fakes.greedy(lengths[-1], ignore_eos=True)))
    groups.append(engine._requests[ids[-1]].group)
    at = [len(group.sequences[0].output_tokens) for group in groups]
    while engine.scheduler.has_work:
        outputs += engine.step()
        engine.scheduler.check_integrity()
    for output in outputs:
        versions[output.id] = output.params_versions
    found = {group.id: group.completion() for group in groups}
    by_old, by_new = _make(old, mesh), _make(new, mesh)
    seen = set()
    for id, prompt, n, first in zip(ids, prompts, lengths, at, strict=True):
        answer = found[id]
        expected = []
        if first:
            expected = by_old.generate([prompt], fakes.greedy(first, ignore_eos=True))[0].token_ids
        if first < n:
            rest = fakes.greedy(n - first, ignore_eos=True)
            expected = expected + by_new.generate([prompt + expected], rest)[0].token_ids
        assert answer.token_ids == expected
        assert answer.params_versions == versions[id] == (0,) * bool(first) + (1,) * (first < n)
        ranges = version_ranges(answer.version_starts, 0, n)
        assert ranges == [(0, first, 0)] * bool(first) + [(first, n, 1)] * (first < n)
        seen.add(answer.params_versions)
    assert seen == {(0,), (0, 1), (1,)}


def test_pages_are_kept_by_choice():
    old, new = _params(3), _params(4)
    prompt = fakes.prompts([40], 131, seed=9)[0]
    for keeps_pages in (False, True):
        engine = _make(old)
        id = engine.add_request(_PROMPTS[1], fakes.greedy(20, ignore_eos=True))
        group = engine._requests[id].group
        engine.generate([prompt], fakes.greedy(2))
        counters = engine.scheduler.counters
        cached, prefilled = counters.num_cached_tokens, counters.num_prefilled_tokens
        engine.update_params(new, keeps_pages=keeps_pages)
        (hit,) = engine.generate([prompt], fakes.greedy(2))
        fakes.drain(engine)
        assert (counters.num_cached_tokens - cached > 0) == keeps_pages
        assert hit.params_versions == ((0, 1) if keeps_pages else (1,))
        assert group.completion().params_versions == (0, 1)
        if keeps_pages:  # a prompt's last page alone
            assert counters.num_prefilled_tokens - prefilled <= 8
        (other,) = engine.generate([_PROMPTS[2]], fakes.greedy(2))
        assert other.params_versions == (1,)
        assert engine.score([prompt])[0].params_versions == (1,)


@pytest.mark.parametrize("mesh", _CHIPS, ids=str)
def test_other_trees_are_refused_and_nothing_changes(mesh):
    engine = _make(_params(3), mesh)
    (before,) = engine.generate(_PROMPTS[:1], fakes.greedy(8))
    good = _params(4)
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), good)
    for bad, message in (
        ({"embed": good["embed"]}, "final_norm is absent, not float32"),
        (narrow, r"is bfloat16 \[\d+.*, not float32 \["),
        (good | {"final_norm": good["final_norm"][:-1]}, r"final_norm is float32 \[23\], not"),
        (good | {"more": good["final_norm"]}, r"more is float32 \[24\], not absent"),
        ({"embed": 3, **{k: v for k, v in good.items() if k != "embed"}}, "embed/table is absent"),
        ("nowhere", "no model 'nowhere'"),
        ("tests/golden/llama-gqa-yarn-bias", "is another model than tiny-llama"),
    ):
        with pytest.raises(InputError, match=message) as refused:
            engine.update_params(bad)
        assert "\n" not in str(refused.value)
    (after,) = engine.generate(_PROMPTS[:1], fakes.greedy(8))
    assert after.token_ids == before.token_ids
    assert after.params_versions == (0,) == before.params_versions


def test_an_update_that_fails_leaves_weights_and_version(monkeypatch):
    engine = _make(_params(3))
    (before,) = engine.generate(_PROMPTS[:1], fakes.greedy(8))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(engine.model_runner, "reset", Mock(side_effect=MemoryError))
        engine.update_params(_params(4))
    engine.rebuild()
    (after,) = engine.generate(_PROMPTS[:1], fakes.greedy(8))
    assert (after.token_ids, after.params_versions) == (before.token_ids, (0,))
    assert engine.update_params(_params(4)) == 1


@pytest.mark.parametrize("mesh", _CHIPS, ids=str)
def test_weights_of_a_training_loop(tmp_path, mesh):
    """A tree that lies on other chips, which its owner overwrites; and steps of Orbax's of it."""
    new, prompt = _params(4), _PROMPTS[:1]
    expected = _make(new).generate(prompt, fakes.greedy(8))[0].token_ids
    fsdp = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[4:])

    def spread(leaf):
        spec = PartitionSpec("fsdp") if leaf.shape[0] % 4 == 0 else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(fsdp, spec))

    tree = jax.tree.map(spread, new)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(100, args=ocp.args.StandardSave(tree))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", {"params": tree, "opt_state": [jnp.zeros(3)]})
    for source in (tree, tmp_path / "run" / "100", str(tmp_path / "state")):
        engine = _make(_params(3), mesh)
        assert engine.generate(prompt, fakes.greedy(8))[0].token_ids != expected
        assert engine.update_params(source) == 1
        if source is tree:
            jax.tree.map(lambda leaf: leaf.delete(), tree)
        assert engine.generate(prompt, fakes.greedy(8))[0].token_ids == expected
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "part", {"embed": new["embed"]})
    for name, message in (("part", "is missing"), ("broken", "Orbax cannot read")):
        if name == "broken":
            (tmp_path / "part" / "_METADATA").write_text("{")
        with pytest.raises(InputError, match=message):
            engine.update_params(tmp_path / "part")
    assert engine.generate(prompt, fakes.greedy(8))[0].token_ids == expected


_CHECKPOINT = Path("tests/golden/llama-tokenizer")


def _checkpoint(folder, **changes):
    """A copy that says something else of the same weights."""
    folder.mkdir()
    for file in _CHECKPOINT.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rms_norm_eps": 1e-3}, "norm_eps is 0.001, not 1e-05;"),
        (
            {"rope_parameters": {"rope_theta": 9e4, "rope_type": "default"}},
            "layers/0/mixer/rope/theta is 90000.0, not 10000.0, the first of 2 differences;",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}},
            "layers/0/mixer/rope/scaling is 'Linear', not None, the first of ",
        ),
    ],
)
def test_a_checkpoint_of_another_function_is_refused(tmp_path, changes, message):
    engine = Engine.from_model(str(_CHECKPOINT), **_SIZES)
    other = _checkpoint(tmp_path / "other", **changes)
    with pytest.raises(InputError, match=f"is another model than llama-tokenizer: {message}") as no:
        engine.update_params(other)
    assert "\n" not in str(no.value)
    engine.sleep()
    with pytest.raises(InputError, match=message):
        engine.wake(other)


def test_a_checkpoint_goes_with_a_model_that_was_changed(tmp_path):
    """By overrides: the next checkpoint says what the first said, or what runs."""
    config = Config(resolve.resolve(str(_CHECKPOINT)).config, EngineConfig.of(**_SIZES))
    settings = ["model.norm_eps=1e-3", "model.dtype=float32", "model.max_context=64"]
    changed = overrides.apply(config, [*settings, "model.pattern.mixer.window=32"])
    checkpoint = resolve.resolve(str(_CHECKPOINT)).open(None)
    engine = Engine.from_checkpoint(changed, checkpoint)
    assert engine.update_params(_CHECKPOINT) == 1
    assert engine.update_params(_checkpoint(tmp_path / "runs", rms_norm_eps=1e-3)) == 2
    with pytest.raises(InputError, match="norm_eps is 0.01, not 0.001;"):
        engine.update_params(_checkpoint(tmp_path / "other", rms_norm_eps=1e-2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_files_with_numbers_that_are_not_finite_are_refused(tmp_path, dtype, value):
    engine = Engine.from_model(str(_CHECKPOINT), dtype=dtype, **_SIZES)
    folder = _checkpoint(tmp_path / "step")
    weights = safetensors.numpy.load_file(folder / "model.safetensors")
    for name, path in (("layers.1.mlp.down_proj", "layers/1/ffn/down"), ("norm", "final_norm")):
        tensor = weights[f"model.{name}.weight"].copy()
        tensor.reshape(-1)[7] = value
        changed = weights | {f"model.{name}.weight": tensor}
        safetensors.numpy.save_file(changed, folder / "model.safetensors")
        with pytest.raises(InputError, match=f"{path} holds NaN or infinity; give") as refused:
            engine.update_params(folder)
        assert "\n" not in str(refused.value)


@pytest.mark.long
def test_weights_of_a_directory():
    path = "tests/golden/llama-gqa-yarn-bias"
    engine = Engine.from_model(path, **_SIZES)
    first = engine.generate([[5, 9, 2]], fakes.greedy(6))[0].token_ids
    runner = engine.model_runner
    engine.update_params(jax.tree.map(lambda leaf: leaf * 0, runner.params))
    assert engine.generate([[5, 9, 2]], fakes.greedy(6))[0].token_ids != first
    assert engine.update_params(path) == 2
    assert engine.generate([[5, 9, 2]], fakes.greedy(6))[0].token_ids == first


@pytest.mark.long
@pytest.mark.quick_code(False)
def test_a_real_model_sleeps():
    engine = Engine.from_model("smollm2-135m", max_seqs=8)
    before = engine.generate(["Once upon a time"], fakes.greedy(8))[0].token_ids
    for keeps_pages in (False, True):
        times = []
        for _ in range(4):
            awake, start = _device_bytes(), time.perf_counter()
            engine.sleep(keeps_pages=keeps_pages)
            asleep, middle = _device_bytes(), time.perf_counter()
            engine.wake()
            jax.block_until_ready((engine.model_runner.params, engine.model_runner.cache))
            times.append((middle - start, time.perf_counter() - middle))
            assert asleep <= 0.05 * awake
            assert engine.generate(["Once upon a time"], fakes.greedy(8))[0].token_ids == before
        slept, woke = (1e3 * sorted(part)[1] for part in zip(*times, strict=True))
        print(f"pages {'kept' if keeps_pages else 'dropped'}: {awake / 1e6:.0f} MB awake,", end=" ")
        print(f"{asleep / 1e6:.0f} asleep; {slept:.0f} ms to sleep, {woke:.0f} to wake")
