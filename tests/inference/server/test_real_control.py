"""A real engine that pauses, sleeps and takes other weights over HTTP, while it answers."""

import contextlib
import gc
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import ml_dtypes  # noqa: F401  (numpy knows bfloat16 by it)
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy

from inference.checkpoints import convert, resolve
from inference.engine import Engine
from inference.request import SamplingParams
from inference.server.client.launch import Thread
from inference.server.engine_process.served_engine import ServedEngine
from layers import decoder
from tests.inference.server.running import wait_until
from tests.inference.server.test_control import TEXT, control, controlled, ids_of, streamed

pytestmark = pytest.mark.quick_code

TINY = Path("tests/golden/llama-tokenizer")
SIZES = dict(max_context=256, page_tokens=16, chunk_tokens=64, prefill_chunks=(2,),
             cache_bytes=4 << 20, dtype="float32")  # fmt: skip
UPDATE = "/update_weights"


def step(folder: Path, seed: int) -> Path:
    """Weights of the tiny model, each moved by chance."""
    directory = folder / f"step_{seed}"
    directory.mkdir()
    for file in TINY.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    rng = np.random.default_rng(seed)

    def moved(tensor):
        wide = tensor.astype(np.float32)
        return (wide * (1 + 0.3 * rng.normal(size=wide.shape))).astype(tensor.dtype)

    weights = safetensors.numpy.load_file(TINY / "model.safetensors")
    safetensors.numpy.save_file(
        {name: moved(tensor) for name, tensor in weights.items()}, directory / "model.safetensors"
    )
    return directory


@pytest.fixture(scope="module")
def engine():
    return Engine.from_model(str(TINY), max_seqs=4, decode_rows=(4,), **SIZES)


class Bounded(ServedEngine):
    """Begins no step once it has generated `most` tokens."""

    most = math.inf

    @property
    def num_generated(self) -> int:
        return self._num_generated

    def slack_s(self):
        return 0.01 if self.num_generated >= self.most else super().slack_s()

    def halt_after(self, num_tokens: float) -> None:
        self.most = self.num_generated + num_tokens


@contextlib.contextmanager
def served(engine: Engine):
    """(Server, served engine) of an engine that outlives them."""
    one = Bounded(engine, "tiny", lambda: None, source=str(TINY))
    with controlled(Thread(lambda: one)) as server:
        yield server, one


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 200, size=8 + n % 9).tolist() for n in range(count)]


def is_of_its_weights(engine: Engine, sources: dict[int, Path], answers) -> set[int]:
    """Checks each token of (prompt, tokens, ranges of versions): it is what the weights of its
    version make of all before it. Returns the versions.
    """
    versions = {version for _, _, ranges in answers for _, _, version in ranges}
    for version in versions:
        engine.update_params(sources[version])
        runs = [
            (prompt + tokens[:begin], tokens[begin:end])
            for prompt, tokens, ranges in answers
            for begin, end, of in ranges
            if of == version
        ]
        params = [SamplingParams(len(new), temperature=0, ignore_eos=True) for _, new in runs]
        answers_again = engine.generate([before for before, _ in runs], params)
        assert [again.token_ids for again in answers_again] == [new for _, new in runs]
    return versions


def under_load(engine, folder, num_streams, num_updates, num_tokens):
    first, asked = engine.weight_version, prompts(num_streams)
    sources = {first: TINY} | {first + n: step(folder, n) for n in range(1, num_updates + 1)}

    def read(prompt):
        with streamed(server, prompt=prompt, max_tokens=num_tokens, ignore_eos=True) as chunks:
            ids, ranges = [], []
            for chunk in chunks:
                (choice,) = chunk["choices"]
                ids += choice["token_ids"]
                ranges += choice["weight_versions"]
            assert choice["finish_reason"] == "length"
        assert len(ids) == num_tokens
        assert [n for begin, end, _ in ranges for n in range(begin, end)] == list(range(num_tokens))
        merged = []
        for begin, end, version in ranges:
            if merged and merged[-1][2] == version:
                begin, _, _ = merged.pop()
            merged.append((begin, end, version))
        return prompt, ids, merged

    due = num_streams * num_tokens / (num_updates + 1)
    with served(engine) as (server, one), ThreadPoolExecutor(num_streams) as pool:
        one.most = due
        reading = [pool.submit(read, prompt) for prompt in asked]
        for n, version in enumerate([*sources][1:]):
            wait_until(lambda least=n * due: one.num_generated > least, 300)
            status = control(server, UPDATE, path=str(sources[version]))
            assert status["weight_version"] == version
            one.most += due
        answers = [each.result() for each in reading]
        assert server.service.client.num_restarts == 0
    assert is_of_its_weights(engine, sources, answers) == set(sources)


def test_weights_change_under_streams(engine, tmp_path):
    under_load(engine, tmp_path, 8, 3, 40)


@pytest.mark.long
def test_twenty_updates_land_under_a_hundred_streams(tmp_path):
    many = Engine.from_model(str(TINY), max_seqs=32, decode_rows=(32,), **SIZES | {
        "cache_bytes": 32 << 20})  # fmt: skip
    under_load(many, tmp_path, 100, 20, 160)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_pages_and_weights_and_texts_stay(engine, level):
    def device_bytes():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    asked = {"prompt": "Once upon", "max_tokens": 60, "ignore_eos": True}
    runner = engine.model_runner
    with served(engine) as (server, one):
        control(server, UPDATE, path=str(TINY))  # whatever tests before have left
        with streamed(server, **asked) as chunks:
            expected = ids_of(chunks)
        one.halt_after(20)
        with streamed(server, **asked) as chunks:
            begun = [next(chunks) for _ in range(3)]
            control(server, "/pause?mode=keep")
            one.most = math.inf
            own = sum(leaf.nbytes for leaf in jax.tree.leaves((runner.params, runner.cache)))
            awake = device_bytes()
            control(server, f"/sleep?level={level}")
            asleep = device_bytes()
            assert asleep <= awake - own
            assert not (runner.params or runner.cache)
            control(server, "/wake_up")
            assert device_bytes() >= asleep + own
            control(server, "/resume")
            assert ids_of([*begun, *chunks]) == expected
        with streamed(server, **asked) as chunks:
            assert ids_of(chunks) == expected


def test_a_pause_changes_no_text(engine):
    asked = {"prompt": "Once upon", "max_tokens": 60, "ignore_eos": True, "seed": 3}
    with served(engine) as (server, one):
        with streamed(server, **asked, temperature=1) as chunks:
            expected = ids_of(chunks)
        one.halt_after(20)
        with streamed(server, **asked, temperature=1) as chunks:
            begun = [next(chunks) for _ in range(3)]
            control(server, "/pause?mode=keep")
            one.most = math.inf
            control(server, "/resume")
            assert ids_of([*begun, *chunks]) == expected


def test_weights_come_from_directories_checkpoints_and_steps_of_orbax(engine, tmp_path):
    source = step(tmp_path, 1)
    checkpoint = resolve.resolve(str(source)).open(None)
    convert.convert(checkpoint, tmp_path / "native", "orbax")
    with ocp.StandardCheckpointer() as checkpointer:
        infos = decoder.param_infos(engine.config.model)
        checkpointer.save(tmp_path / "step", checkpoint.load_params(infos, None))
    asked = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    with served(engine) as (server, one):

        def tokens():
            (choice,) = server.post(TEXT, **asked).json()["choices"]
            return choice["token_ids"]

        control(server, UPDATE, path=str(TINY))
        first, texts = tokens(), []
        for place in (source, tmp_path / "native", tmp_path / "step"):
            control(server, UPDATE, path=str(place))
            texts.append(tokens())
            control(server, UPDATE, path=str(TINY))
            assert tokens() == first
        assert texts == [texts[0]] * 3 and texts[0] != first


def test_weights_that_do_not_fit_are_one_line_and_change_nothing(engine, tmp_path):
    with_nan, cut, other = step(tmp_path, 1), step(tmp_path, 2), step(tmp_path, 3)
    for directory, change in (
        (with_nan, lambda tensor: tensor * np.where(np.arange(tensor.size) == 5, np.nan, 1)),
        (cut, lambda tensor: tensor[:-1]),
    ):
        weights = safetensors.numpy.load_file(directory / "model.safetensors")
        name = "model.norm.weight"
        weights[name] = change(weights[name]).astype(weights[name].dtype)
        safetensors.numpy.save_file(weights, directory / "model.safetensors")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    torn = step(tmp_path, 4)
    data = (torn / "model.safetensors").read_bytes()
    (torn / "model.safetensors").write_bytes(data[: len(data) // 2])
    (tmp_path / "empty").mkdir()
    asked = {"prompt": "Once upon", "max_tokens": 12, "ignore_eos": True}
    with served(engine) as (server, one):
        control(server, UPDATE, path=str(TINY))
        version = control(server, "/is_sleeping")["weight_version"]
        with streamed(server, **asked) as chunks:
            expected = ids_of(chunks)
        for path, message in (
            (with_nan, "final_norm holds NaN or infinity"),
            (cut, "'model.norm.weight' is [31]; expected [32]"),
            (other, "norm_eps is 0.001, not 1e-05"),
            (Path("tests/golden/llama-gqa-yarn-bias"), "is another model than llama-tokenizer"),
            (Path("tests/golden/gemma-gqa-tied"), "is another model than llama-tokenizer"),
            (torn, "model.safetensors"),
            (tmp_path / "empty", "config.json"),
            (tmp_path / "nowhere", "no model "),
        ):
            assert message in control(server, UPDATE, 400, path=str(path))
            control(server, "/sleep?level=2")
            assert message in control(server, f"/wake_up?path={path}", 400)
            assert control(server, "/is_sleeping")["is_sleeping"]
            control(server, f"/wake_up?path={TINY}")
            with streamed(server, **asked) as chunks:
                assert ids_of(chunks) == expected
        assert control(server, "/is_sleeping")["weight_version"] == version + 8
