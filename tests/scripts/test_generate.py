"""`python -m scripts.generate` as its user sees it, on a tiny checkpoint with a tokenizer."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
import types

import jax
import numpy as np
import pytest

from configs.engine import EngineConfig
from configs.recipes.run import Run
from configs.runs import smollm2_laptop
from configs.settings.requests import RequestConfig
from inference.benchmark import first_start
from inference.engine import Engine
from inference.files import atomic
from inference.outputs import RequestOutput
from inference.planner.calibration import lookup, measure
from scripts import common, generate
from scripts.reports import costs
from tests import fakes
from tests.scripts import apps

pytestmark = pytest.mark.quick_code

_STATS = {
    *("prompt_tokens", "output_tokens", "ttft_s", "output_tok_s", "compile_s", "predicted_step_s"),
    *("tokens_per_pass", "measured_step_s", "step_bytes", "read_bandwidth", "bandwidth_share"),
    "busiest_expert",
}
_RESULT = {"text", "token_ids", "prompt_tokens", "finish_reason", "logprobs", "top_logprobs"}
_SETTINGS = (
    f"--model={apps.TINY}",
    "--set=model.dtype=float32",
    "--set=engine.shapes.prefill_chunks=(4,)",
    "--set=engine.shapes.decode_rows=(4,)",
    "--set=engine.max_seqs=3",
)  # few programs to compile


@pytest.fixture
def run(monkeypatch, capfd, load_once):
    return lambda *args: apps.call(generate, monkeypatch, capfd, *_SETTINGS, *args)


@pytest.fixture(scope="module")
def golden():
    with np.load(apps.TINY / "expected.npz") as arrays:
        return {name: arrays[name] for name in arrays.files}


@pytest.mark.long
def test_prompts_on_a_chip_of_their_own(run):
    args = (
        "--prompt=A short text",
        "--prompt=B",
        "--json",
        "--max_new_tokens=6",
        "--temperature=1",
    )
    found = []
    for more in ((), ("--set=prefill.chips=1",)):
        ran = run(*args, "--seed=3", *more)
        assert ran.status == 0 and ("prefill.chips=1" in ran.err) == bool(more)
        found.append([result["token_ids"] for result in json.loads(ran.out)["results"]])
    assert found[0] == found[1]


def test_json_of_two_prompts(run, golden):
    texts = golden["texts"][[1, 3]].tolist()
    prompts = [f"--prompt={text}" for text in texts]
    ran = run(*prompts, "--json", "--logprobs=2", "--max_new_tokens=24")
    assert ran.status == 0
    assert ran.out.count("\n") == 1
    answer = json.loads(ran.out)
    assert set(answer) == {"results", "stats", "config"}
    assert answer["config"]["engine"]["requests"]["top_logprobs"] == 2
    assert set(answer["stats"]) >= _STATS
    for name in ("ttft_s", "output_tok_s", "predicted_step_s", "measured_step_s"):
        assert answer["stats"][name] > 0
    for key, result in zip((1, 3), answer["results"], strict=True):
        expected = golden[f"greedy_{key}"].tolist()
        assert set(result) == _RESULT
        assert result["token_ids"] == expected
        assert result["prompt_tokens"] == len(golden[f"ids_{key}"])
        assert result["finish_reason"] == ("stop" if expected[-1] in (1, 2) else "length")
        assert len(result["logprobs"]) == len(result["top_logprobs"]) == len(expected)
        for token, logprob, top in zip(
            expected, result["logprobs"], result["top_logprobs"], strict=True
        ):
            assert len(top) == 2 and logprob <= 0
            assert top[str(token)] == pytest.approx(logprob) == max(top.values())


def test_several_answers(run, tmp_path):
    source = tmp_path / "in.jsonl"
    lines = [
        {"prompt": "Once upon", "n": 2, "temperature": 1.0, "seed": 3},
        {"prompt": "Once upon", "beam_width": 3, "n": 3, "length_penalty": 0.5},
        {"prompt": "Once upon"},
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = run(f"--input={source}", "--max_new_tokens=6", "--json", "--logprobs=1")
    sampled, searched, plain = json.loads(ran.out)["results"]
    assert set(plain) == _RESULT and set(sampled) == _RESULT | {"choices"}
    assert [len(result["choices"]) for result in (sampled, searched)] == [2, 3]
    for result in (sampled, searched):
        first = result["choices"][0]
        assert first == {name: result[name] for name in first}
        for choice in result["choices"]:
            assert len(choice["logprobs"]) == len(choice["token_ids"])
            assert {len(top) for top in choice["top_logprobs"]} == {1}
    scores = [choice["score"] for choice in searched["choices"]]
    assert scores == sorted(scores, reverse=True)
    asked = ("--n=2", "--temperature=1", "--seed=3")
    printed = run("--prompt=Once upon", "--max_new_tokens=6", *asked)
    assert printed.out == "".join(choice["text"] + "\n\n" for choice in sampled["choices"])


def test_prompts_that_give_up_pages(run, tmp_path):
    source, text = tmp_path / "in.jsonl", "Once upon a time there was a ridge. " * 5
    lines = [{"prompt": text, **more} for more in ({}, {"prompt_budget": 96})]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ran = run(f"--input={source}", "--max_new_tokens=4", "--json")
    whole, shorter = json.loads(ran.out)["results"]
    assert set(whole) == _RESULT and set(shorter) == _RESULT | {"kept_prompt_tokens"}
    assert 64 <= shorter["kept_prompt_tokens"] <= 96 < shorter["prompt_tokens"]
    refused = run(f"--prompt={text}", "--prompt_budget=40")
    assert refused.status == 1 and refused.out == "" and "prompt_budget" in refused.err
    assert "not 40" in refused.err


def test_answers_follow_a_schema(run, tmp_path):
    schema = tmp_path / "schema.json"
    properties = {"city": {"enum": ["Paris", "Rome"]}, "old": {"type": "boolean"}}
    whole = {"properties": properties, "required": ["city", "old"], "additionalProperties": False}
    schema.write_text(json.dumps(whole | {"type": "object"}))
    ran = run("--prompt=a", "--prompt=b", f"--json_schema={schema}", "--temperature=2", "--json")
    for result in json.loads(ran.out)["results"]:
        found = json.loads(result["text"])
        assert found.keys() == properties.keys() and result["finish_reason"] == "stop"
    for content, problem in [
        ("{", "Expecting"), ("[1]", "holds no JSON object"),
        ('{"type": "x"}', "schema.json: type='x': is one of null"),
        ('{"type": "string", "pattern": "(("}', "cannot be compiled"),
    ]:  # fmt: skip
        schema.write_text(content)
        assert problem in run("--prompt=a", f"--json_schema={schema}").error
    assert "No such file" in run("--prompt=a", f"--json_schema={schema}x").error
    assert "--naive" in run("--prompt=a", "--naive", f"--json_schema={schema}").error


def test_one_prompt_streams_and_ends_with_a_line_of_cost(run, golden):
    ran = run(f"--prompt={golden['texts'][1]}", "--max_new_tokens=4", "--seed=1")
    assert ran.status == 0 and ran.out.endswith("\n") and len(ran.out) > 1
    (line,) = (line for line in ran.err.split("\n") if "tok/s" in line)  # one, however long
    names = [group.split()[0] for group in line.split("  |  ") if "compiling" not in group]
    assert names == ["prompt", "TTFT", "decode", "step", "read"] and "13 tokens  |" in line
    assert "(predicted" in line and "%" in line


@pytest.mark.parametrize("share, text", [
    (1.0, "read 300 MB/step, 100 % of 30 GB/s"),
    (1.004, "read 300 MB/step, from caches, above 30 GB/s"),
])  # fmt: skip
def test_no_share_exceeds_all(share, text):
    stats = costs.nothing() | {
        "ttft_s": 0.125, "compile_s": 1.0, "output_tok_s": 42.0, "tokens_per_pass": 1.5,
        "measured_step_s": 0.02, "predicted_step_s": 0.019, "predicted_by": "calibrated",
        "step_bytes": 300_000_000, "read_bandwidth": 3e10, "bandwidth_share": share,
    }  # fmt: skip
    assert costs.summary(stats) == (
        "prompt 0 tokens  |  TTFT 0.12 s  |  compiling 1.0 s  |  decode 42.0 tok/s  |  "
        f"accepted 1.5 tokens/pass  |  step 20.0 ms (predicted 19.0 ms, calibrated)  |  {text}"
    )


def test_the_first_answer_calibrates_and_the_second_is_predicted_so(run, monkeypatch, tmp_path):
    monkeypatch.setenv("RIDGELINE_CACHE", str(tmp_path))
    monkeypatch.setattr(first_start, "_LEAST_BYTES", 1)
    monkeypatch.setattr(measure, "matmul_rate", lambda dtype: 1e11)
    monkeypatch.setattr(measure.Probe, "read", lambda self: 1e10)
    first, second = (run("--prompt=A", "--max_new_tokens=3", "--ignore_eos") for _ in range(2))
    assert first.out == second.out and len(first.out) > 1
    assert "timing steps of" in first.err and "timing steps of" not in second.err
    assert all("ms, calibrated)" in ran.err for ran in (first, second))
    stats = json.loads(run("--prompt=A", "--max_new_tokens=3", "--json").out)["stats"]
    assert stats["predicted_by"] == "calibrated"


def test_the_rate_leaves_compilation_out(run, golden):
    """With it the first run would have taken longer than all its compiling."""
    args = (f"--prompt={golden['texts'][1]}", "--json", "--max_new_tokens=24", "--ignore_eos",
            "--set=engine.shapes.chunk_tokens=48")  # fmt: skip
    with fakes.slow_compiler(0.25):
        first, second = (json.loads(run(*args).out)["stats"] for _ in range(2))
    assert first["compile_s"] > 20 * second["compile_s"]
    assert first["ttft_s"] > 5 * second["ttft_s"]
    assert 24 / first["output_tok_s"] < first["compile_s"] / 2


def test_what_a_first_token_does_not_need_is_not_imported_for_it():
    """Each of these would take 10 ms and more of every start."""
    code = (
        "import sys, scripts.generate, inference.engine\n"
        "from inference.checkpoints.gguf import gguf_tokenizer\n"
        "print(*sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=apps.ROOT, capture_output=True, text=True, check=True
    )
    loaded = set(run.stdout.split())
    assert "jax" in loaded and not loaded & {
        *("flax", "gguf", "huggingface_hub", "jinja2", "matplotlib", "optax", "orbax", "pandas"),
        *("safetensors", "scipy", "tensorstore", "yaml", "inference.benchmark"),
    }


def test_the_rate_of_one_answer_begins_with_its_first_token(monkeypatch):
    """Five seconds to the first tokens, four of them compiling; then two tokens in three seconds,
    one of them compiling. Two passes of four brought a draft more each.
    """
    counters = types.SimpleNamespace(num_passes=0, num_accepted=0)
    engine = types.SimpleNamespace(
        compile_s=7.0, scheduler=types.SimpleNamespace(counters=counters),
        config=types.SimpleNamespace(engine=EngineConfig.of(num_drafts=1, proposer="ngram")),
    )  # fmt: skip
    clock = iter([10.0, 15.0, 16.0, 18.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    watch = costs.Stopwatch(engine)
    for num_tokens, compiled in ((0, 7.0), (4, 11.0), (1, 12.0), (1, 12.0), (0, 12.0)):
        engine.compile_s = compiled
        watch.note(num_tokens)
    counters.num_passes, counters.num_accepted = 4, 2
    assert watch.figures(is_one=True) == {
        "output_tokens": 6, "ttft_s": 5.0, "output_tok_s": 1.0, "compile_s": 5.0,
        "tokens_per_pass": 1.5,
    }  # fmt: skip
    assert watch.figures(is_one=False)["output_tok_s"] == 2.0  # 6 in 8 - 5


def test_one_token_has_no_rate(run):
    ran = run("--prompt=A", "--max_new_tokens=1", "--json")
    assert json.loads(ran.out)["stats"]["output_tok_s"] is None
    assert "tok/s" not in run("--prompt=A", "--max_new_tokens=1").err


def test_the_first_token_is_no_update_without_one(run, monkeypatch):
    generate_all = Engine.as_completed

    def held(engine, prompts, params, on_output):
        on_output(RequestOutput(0, [], "", None))
        time.sleep(0.5)
        return generate_all(engine, prompts, params, on_output)

    monkeypatch.setattr(Engine, "as_completed", held)
    stats = json.loads(run("--prompt=A", "--max_new_tokens=2", "--json").out)["stats"]
    assert stats["ttft_s"] > 0.5


def test_an_interrupt_does_not_wait_for_answers_that_are_ranked_in_the_end(run, monkeypatch):
    steps, run_step = [], Engine.run_step

    def interrupted(engine):
        steps.append(engine)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        run_step(engine)

    monkeypatch.setattr(Engine, "run_step", interrupted)
    ran = run("--prompt=A", "--best_of=2", "--temperature=1", "--max_new_tokens=40")
    assert (ran.status, len(steps)) == (1, 3) and ran.err.endswith("error: interrupted\n")


def test_a_device_without_room_to_be_measured_costs_no_answer(run, monkeypatch):
    def full(*dtypes, **more):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(lookup, "this_machine", full)
    ran = run("--prompt=A", "--max_new_tokens=2", "--json")
    answer = json.loads(ran.out)
    assert len(answer["results"][0]["token_ids"]) == answer["stats"]["output_tokens"] == 2
    assert answer["stats"]["ttft_s"] > 0 and answer["stats"]["predicted_step_s"] is None
    assert "tok/s" in run("--prompt=A", "--max_new_tokens=2").err


@pytest.mark.parametrize("way", ["--json", "--output", "plain", "--naive"])
def test_non_finite_logits_fail_after_the_results_are_written(run, monkeypatch, tmp_path, way):
    monkeypatch.setattr(common, "load_engine", _load_poisoned)
    target = tmp_path / "out.jsonl"
    args = [] if way == "plain" else [f"--output={target}"] if way == "--output" else ["--json"]
    more = ["--naive", "--logprobs=0"] if way == "--naive" else []
    ran = run("--prompt=A", "--prompt=B", "--max_new_tokens=2", *args, *more)
    assert ran.status == 1 and "Traceback" not in ran.err
    line = "error: the model gave non-finite logits for prompt 1, 2\n"
    assert ran.err.endswith(line) and ran.err.count("error:") == 1
    if way == "--output":
        results = [json.loads(line) for line in target.read_text().splitlines()]
    else:
        results = [] if way == "plain" else json.loads(ran.out)["results"]
    assert {result["finish_reason"] for result in results} <= {"error"}
    assert len(results) == (0 if way == "plain" else 2) and "NaN" not in ran.out


_NAN = {"uint16": 0x7FC0}  # the bits of a bfloat16, as packed weights have them


def _load_poisoned(checkpoint, config, *expected):
    engine = Engine.from_checkpoint(config, checkpoint)
    embed = engine.model_runner.params["embed"]
    poisoned = jax.tree.map(lambda x: np.full_like(x, _NAN.get(str(x.dtype), np.nan)), embed)
    engine.model_runner.params |= {"embed": poisoned}
    return engine


def test_lines_in_lines_out(run, golden, tmp_path):
    """Prompts and conversations, blank lines, a separator that only `splitlines` knows."""
    messages = json.loads(str(golden["chat_messages"]))
    requests = [{"messages": messages}, None, {"prompt": "line\u2028separator"},
                {"prompt": str(golden["texts"][3])}]  # fmt: skip
    lines = [json.dumps(r, ensure_ascii=False) if r else "" for r in requests]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes("\r\n".join(lines).encode())
    ran = run(f"--input={source}", f"--output={target}", "--max_new_tokens=24")
    assert ran.status == 0 and ran.out == ""
    results = [json.loads(line) for line in target.read_text(encoding="utf-8").split("\n")[:-1]]
    assert [set(result) for result in results] == [_RESULT] * 3
    assert results[0]["token_ids"] == golden["greedy_chat"].tolist()
    assert results[0]["prompt_tokens"] == len(golden["ids_chat"])
    assert results[2]["token_ids"] == golden["greedy_3"].tolist()
    assert results[0]["logprobs"] is None and results[0]["top_logprobs"] is None
    beside = tmp_path / "out.jsonl.config.json"
    assert json.loads(beside.read_text(encoding="utf-8"))["model"]["dtype"] == "float32"
    assert set(tmp_path.iterdir()) == {source, target, beside}


def test_a_seed_repeats_and_another_does_not(run):
    def tokens(seed: int) -> list[list[int]]:
        ran = run("--prompt=A", "--prompt=A", "--json", "--temperature=1.5", f"--seed={seed}",
                  "--max_new_tokens=6", "--ignore_eos")  # fmt: skip
        return [result["token_ids"] for result in json.loads(ran.out)["results"]]

    first, second = tokens(5), tokens(6)
    assert first == tokens(5)
    assert first[0] == first[1]  # the noise depends on seed and position, not on the neighbour
    assert first != second


def test_a_prompt_may_be_a_message(run, monkeypatch):
    seen = []
    monkeypatch.setattr(generate, "_check", lambda requests, ids, *model: seen.append(ids))
    monkeypatch.setattr(common, "load_engine", lambda *args: common.fail("far enough"))
    run("--prompt=What holds the keys?", "--chat")
    run("--prompt=What holds the keys?")
    chat, plain = (prompts[0] for prompts in seen)
    assert len(chat) > len(plain)


def test_naive_agrees_with_the_cache(run, golden):
    ran = run(f"--prompt={golden['texts'][1]}", "--naive", "--json", "--logprobs=0")
    answer = json.loads(ran.out)
    (result,) = answer["results"]
    assert set(result) == _RESULT
    assert result["token_ids"] == golden["greedy_1"].tolist()
    assert result["finish_reason"] == "stop" and result["prompt_tokens"] == 13
    assert len(result["logprobs"]) == len(result["token_ids"])
    assert answer["stats"]["equal_tokens"]
    for name in ("ttft_s", "output_tok_s", "predicted_step_s", "measured_step_s", "measured_ratio",
                 "predicted_ratio"):  # fmt: skip
        assert answer["stats"][name] > 0


def test_preset_then_run_then_set_then_needs(monkeypatch, capfd):
    """A run brings its engine; flags that ask for a feature get it all the same."""
    configs = []

    def stop(checkpoint, config, *expected):
        configs.append(config)
        common.fail("far enough")

    monkeypatch.setattr(common, "load_engine", stop)
    engine = EngineConfig.of(max_seqs=7, page_tokens=64)
    monkeypatch.setattr(smollm2_laptop, "RUN", Run(str(apps.TINY), engine))
    args = ["--config=configs/runs/smollm2_laptop.py", "--prompt=A", "--set=engine.max_context=99"]
    for more in ((), ("--presence_penalty=0.5", "--logprobs=3", "--deterministic")):
        ran = apps.call(generate, monkeypatch, capfd, *args, *more)
        assert "far enough" in ran.error
    plain, asked = (config.engine for config in configs)
    assert (plain.max_seqs, plain.cache.page_tokens, plain.max_context) == (7, 64, 99)
    assert plain.requests == RequestConfig() and not plain.deterministic
    assert (asked.max_seqs, asked.cache.page_tokens) == (7, 64)
    assert asked.requests == RequestConfig(penalties=True, top_logprobs=3) and asked.deterministic


def test_output_goes_where_a_link_points(run, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    link = tmp_path / "out.jsonl"
    link.symlink_to(folder / "answers.jsonl")
    assert run("--prompt=A", f"--output={link}", "--max_new_tokens=2").status == 0
    assert link.is_symlink() and set(tmp_path.iterdir()) == {folder, link}
    assert {path.name for path in folder.iterdir()} == {
        "answers.jsonl",
        "answers.jsonl.config.json",
    }


@pytest.mark.parametrize("kind", ["answers", "beside"])
def test_neither_file_is_replaced_unless_both_are_written(run, tmp_path, monkeypatch, kind):
    target, beside = tmp_path / "out.jsonl", tmp_path / "out.jsonl.config.json"
    for path in (target, beside):
        path.write_text("before")
    write = atomic.open_file

    @contextlib.contextmanager
    def full(path):
        with write(path) as file:
            yield file
            if (path == target) == (kind == "answers"):
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic, "open_file", full)
    ran = run("--prompt=A", f"--output={target}", "--max_new_tokens=2", "--overwrite")
    assert ran.status == 1 and "out.jsonl: No space left on device; free some" in ran.error
    kept = tmp_path / "out.jsonl.partial"  # nothing computed is lost
    assert target.read_text() == "before" and set(tmp_path.iterdir()) == {target, beside, kept}
    monkeypatch.setattr(atomic, "open_file", write)
    ran = run("--prompt=A", f"--output={target}", "--max_new_tokens=2", "--json")
    assert ran.status == 0 and "1 of 1 results are in" in ran.err
    stats = json.loads(ran.out)["stats"]
    assert set(stats) >= _STATS and stats["output_tokens"] == 0 and stats["ttft_s"] is None
    assert json.loads(target.read_text())["token_ids"]
    assert set(tmp_path.iterdir()) == {target, beside}


def test_as_a_process(tmp_path):
    """The canonical call, compiled as it is: one JSON object on stdout, logs elsewhere."""
    ran = apps.start("generate", *_SETTINGS, "--prompt=A token", "--json", "--max_new_tokens=1",
                     cache=tmp_path, XLA_FLAGS=os.environ.get("XLA_FLAGS", ""))  # fmt: skip
    assert ran.status == 0, ran.err
    assert len(json.loads(ran.out)["results"][0]["token_ids"]) == 1
    assert "Traceback" not in ran.err and "Warning" not in ran.err
    first, *others = ran.err.splitlines()
    assert first == "llama-tokenizer, float32, max_seqs=3, decode_rows=(4,), prefill_chunks=(4,)"
    assert all(line.startswith("compiling ") for line in others)  # where that takes long


def test_bytes_that_are_no_text_as_a_process(tmp_path):
    ran = apps.start("generate", f"--model={apps.TINY}", b"--prompt=A \xff", cache=tmp_path)
    assert ran.status == 1
    assert "prompt 1 is not valid text: character 2" in ran.error
