"""`python -m scripts.bench` on a tiny checkpoint: its rows, and what it refuses."""

import json

import pytest
from absl import flags

from configs.hardware.spec import HardwareSpec
from inference import engine as engines
from inference.benchmark import steps
from inference.planner.calibration import lookup, store
from inference.planner.simulate import Simulator
from inference.runtime import naive as uncached
from inference.runtime.model_runner import ModelRunner
from inference.scheduling.scheduler import Scheduler
from scripts import bench, common
from scripts.modes import bench_modes, bench_probes
from tests.scripts import apps

pytestmark = pytest.mark.quick_code

_ARGS = (
    f"--model={apps.TINY}",
    "--set=engine.shapes.prefill_chunks=(2,)", "--set=engine.shapes.decode_rows=(4,)",
    "--set=engine.cache.page_tokens=16", "--set=engine.shapes.chunk_tokens=32",
)  # fmt: skip
CHIP = HardwareSpec("chip", 1e9, 1e9, {})
PRODUCTS = HardwareSpec("chip", 1e9, 1e9, {"float32": 1e9, "bfloat16": 1e9})
_SHORT = ("--prompt_tokens=20", "--new_tokens=5", "--set=engine.max_seqs=4")
_PREFILL = ("--prefill_tokens=40",)
_LATENCIES = {
    f"{name}_{statistic}_s"
    for name in ("ttft", "tpot", "itl", "e2e")
    for statistic in ("mean", "p50", "p90", "p99")
}
_ROW = _LATENCIES | {
    *("concurrency", "requests", "seconds", "output_tok_s", "requests_s", "goodput_share"),
    *(
        "goodput_requests_s",
        "kv_waste",
        "prompt_sharing",
        "spilled_pages",
        "restored_pages",
        "running_mean",
        "running_p50",
        "running_peak",
        "hit_rate",
        "steps",
    ),
    *("prefilled_tokens", "preemptions", "host_step_s", "compiles", "predicted"),
    *("predicted_output_tok_s", "snapshots", "snapshot_bytes"),
}
_NOT_PREDICTED = {"concurrency", "requests", "compiles", "predicted", "predicted_output_tok_s",
                  "snapshots", "snapshot_bytes"}  # fmt: skip


@pytest.fixture
def run(monkeypatch, capfd):
    monkeypatch.setattr(
        store, "calibration", lambda model=None, implementations=None: None
    )  # whatever was found here, or not
    return lambda *args: apps.call(bench, monkeypatch, capfd, *_ARGS, *args)


def test_rows_and_table(run, monkeypatch, tmp_path):
    ran = run(*_SHORT, *_PREFILL, "--concurrency=1,3", "--repeats=2", "--json_lines")
    assert ran.status == 0, ran.err
    *earlier, answer = map(json.loads, ran.out.splitlines())
    assert [line["rows"] for line in earlier] == [answer["rows"][:1], answer["rows"]]
    assert [row["concurrency"] for row in answer["rows"]] == [1, 3]
    for row in (*answer["rows"], answer["sampled"]):
        assert set(row) == _ROW and row["compiles"] == 0
        assert row["output_tok_s"] > 0 and row["predicted_output_tok_s"] > row["output_tok_s"]
        assert set(row["predicted"]) == _ROW - _NOT_PREDICTED
        assert row["snapshots"] == row["snapshot_bytes"] == 0, "the model has no states"
        assert row["requests"] == row["concurrency"] == row["running_peak"]
        # Two pages of 16 hold 20 to 24 tokens; after the last token nothing is held.
        assert 0.1 < row["kv_waste"] <= 12 / 32
    assert answer["prefill_tok_s"] > 0 and answer["first_token_s"] > 0
    assert answer["read_bandwidth"] > 0 and answer["best_product_rate"] > 0
    assert 0 < answer["decode_bandwidth_share"] < 1 and 0 < answer["prefill_rate_share"] < 1
    assert 0 < answer["batch_rate_share"] < 1

    beside = tmp_path / "beside.json"
    beside.write_text('{"peer": "other", "output_tok_s_1": 10, "prefill_tok_s": 2.5}')
    monkeypatch.setattr(
        ModelRunner, "warm_up", lambda *args: None
    )  # then steps compile as they come
    ran = run(*_SHORT, *_PREFILL, "--concurrency=1", "--repeats=1", f"--beside={beside}")
    lines = ran.out.splitlines()
    assert lines[0].split() == ["ridgeline", "predicted", "other", "ratio"]
    assert len(lines[1].split()) == 8 and "output tok/s at 1" in lines[1]
    assert "of rates measured in this run: decoding at 1 " in ran.out
    assert "executables compiled after warm-up: 0" not in ran.out


class Instant(Simulator):
    """An engine whose steps take no time."""

    def __init__(self, config, params=None):
        super().__init__(config, Scheduler(config), CHIP)

    def warm_up(self, progress, seals):
        progress()

    def rebuild(self):
        assert not self.scheduler.has_work


def test_requests_that_arrive_by_themselves(run, monkeypatch, tmp_path):
    monkeypatch.setattr(common, "load_engine", lambda checkpoint, config: Instant(config))
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"arrival_s": 0.01, "prompt": "two words", "output_tokens": 2}\n'
        '{"arrival_s": 0.0, "prompt_tokens": 5, "output_tokens": 3}\n'
    )
    ran = run(f"--workload={trace}", "--slo_ttft_s=1e-9", "--repeats=1", "--json")
    assert ran.status == 0, ran.err
    (row,) = json.loads(ran.out)["rows"]
    assert set(row) == _ROW | {"workload", "rate"} and row["requests"] == 2
    assert row["workload"] == "trace" and row["goodput_share"] == 0

    arrivals = ("--workload=poisson", "--rate=100", "--requests=3", *_SHORT)
    lines = run(*arrivals, "--prefix_tokens=16", "--repeats=1").out.splitlines()
    assert lines[0].split() == ["mean", "p50", "p90", "p99"]
    assert lines[1].startswith("first token, s") and "predicted" in lines[2]
    assert any(line.startswith("goodput, share") and "100%" in line for line in lines)


def test_agents(run, monkeypatch):
    monkeypatch.setattr(common, "load_engine", lambda checkpoint, config: Instant(config))
    load = ("--workload=agents", "--requests=3", "--concurrency=2", "--turns=fixed:2", *_SHORT,
            "--prefix_tokens=32", "--result_lengths=fixed:20", "--repeats=2")  # fmt: skip
    ran = run(*load, "--json")
    assert ran.status == 0, ran.err
    (row,) = json.loads(ran.out)["rows"]
    assert (row["concurrency"], row["requests"], row["workload"]) == (2, 6, "agents")
    assert [(turn["turn"], turn["requests"]) for turn in row["turns"]] == [(1, 3), (2, 3)]
    assert [turn["requests"] for turn in row["predicted"]["turns"]] == [3, 3]
    lines = run(*load).out.splitlines()
    (head,) = [n for n, line in enumerate(lines) if line.startswith("turn")]
    assert [line.split()[:2] for line in lines[head + 1 : head + 3]] == [["1", "3"], ["2", "3"]]


def test_ablation(run, monkeypatch, tmp_path):
    monkeypatch.setattr(engines, "Engine", Instant)
    monkeypatch.setattr(uncached, "decode", lambda params, model, sequence: [0.5] * 4)
    args = ("--ablation", "--requests=5", "--prompt_lengths=uniform:8:24", "--new_tokens=4",
            "--prefix_tokens=16", "--repeats=1")  # fmt: skip
    ran = run(*args, "--json", "--rate=100", "--ablation_only=naive,paged,prefix")
    assert ran.status == 0, ran.err
    found = json.loads(ran.out)
    naive, paged, prefix = found["ladder"]
    assert [row["rung"] for row in found["ladder"]] == ["naive", "paged", "prefix"]
    assert naive["measured"]["figures"]["scaled_from_requests"] == 4
    assert naive["measured"]["figures"]["seconds"] == 5 * 4 * 0.5
    assert naive["measured"]["gain"] is None and naive["predicted"]["after"] > 0
    assert paged["metric"] == "running_peak" and paged["measured"]["gain"] is None
    assert prefix["metric"] == "prefilled_tokens" and prefix["less_is_better"]
    assert prefix["measured"]["before"] == paged["measured"]["figures"]["prefilled_tokens"]
    assert prefix["measured"]["figures"]["equal_tokens"] == 1
    assert found["workload"]["rate"] == 100 and found["compiles"] == 0
    assert found["waste"] == []  # of the last one

    lines = run(*args).out.splitlines()
    names = ("ablation", "naive", "cached", "static", "dynamic", "continuous", "paged", "prefix",
             "chunked", "overlap")  # fmt: skip
    assert tuple(line.split()[0] for line in lines[: len(names)]) == names
    assert any("naive: 4 of the requests, scaled by tokens" in line for line in lines)
    assert any("tokens of 100% of the requests equal" in line for line in lines)
    assert [line.split()[2] for line in lines if line.startswith("pages of")] == ["16", "64", "128"]


def test_the_last_ablation_runs_by_turns(run, monkeypatch):
    order, again = [], Instant.rebuild

    def rebuild(engine):
        order.append(
            (
                engine.config.engine.scheduling.chunked_prefill,
                engine.config.engine.scheduling.overlap,
            )
        )
        again(engine)

    monkeypatch.setattr(engines, "Engine", Instant)
    monkeypatch.setattr(Instant, "rebuild", rebuild)
    ran = run("--ablation", "--requests=5", "--prompt_lengths=uniform:8:24", "--new_tokens=4",
              "--prefix_tokens=16", "--repeats=2", "--rate=100",
              "--ablation_only=chunked,overlap")  # fmt: skip
    assert ran.status == 0 and "by turns with chunked" in ran.out, ran.err
    chunked, overlap = (True, False), (True, True)
    assert order[:6] == [chunked, chunked, chunked, overlap, chunked, overlap]


def test_probes(run, monkeypatch):
    monkeypatch.setattr(bench_probes, "_HOST_RUNNING", (2,))
    lines = run("--host_cost", "--set=model.max_context=1024").out.splitlines()
    assert lines[0].split()[0] == "running" and len(lines) == 2 and len(lines[1].split()) == 6


@pytest.mark.usefixtures("no_draws")
@pytest.mark.long
def test_decode_steps_of_random_weights(run, monkeypatch):
    """Of a checkpoint nothing but its configuration is read."""
    monkeypatch.setattr(bench.common, "open_checkpoint", None)
    points = ("--random_weights", "--decode=4x200,1x64", "--repeats=1")
    ran = run(*points, "--gap", "--json")
    assert ran.status == 0, ran.err
    measured = json.loads(ran.out)["decode_steps"]
    assert [(row["rows"], row["context"]) for row in measured] == [(4, 200), (1, 64)]
    for row in measured:
        assert row["measured_s"] > 0 and row["step_bytes"] > 0 and row["needed_bytes"] > 0
        assert row["ratio"] == row["predicted_s"] / row["measured_s"]
        assert row["gap_s"] == row["engine_s"] - row["measured_s"]

    monkeypatch.setattr(lookup, "this_machine", lambda *dtypes, **more: CHIP)
    monkeypatch.setattr(steps, "needed_bytes", lambda config: 2e9 * config.engine.max_seqs - 2e9)
    header, first, second, machine = run(*points[:1], "--decode=1x64,2x64").out.splitlines()
    assert header.split()[:3] == ["rows", "x", "context"] and len(first.split()) == 8
    assert second.endswith("does not fit: 2.0 GB of 1.0 GB") and "roofline" in machine


@pytest.mark.usefixtures("no_draws")
def test_prefill_steps_of_random_weights(run, monkeypatch):
    monkeypatch.setattr(bench.common, "open_checkpoint", None)
    monkeypatch.setattr(lookup, "this_machine", lambda *dtypes, **more: PRODUCTS)
    monkeypatch.setattr(steps, "needed_bytes", lambda config: 5e8 * config.engine.max_seqs)
    ran = run("--random_weights", "--prefill=1x48,2x16", "--repeats=1", "--json_lines")
    assert ran.status == 0, ran.err
    first, last = (json.loads(line)["prefill_steps"] for line in ran.out.splitlines()[::2])
    assert first == last[:1] and last[1] == {"rows": 2, "tokens": 16, "needed_bytes": 1e9}
    (row,) = first
    assert (row["rows"], row["tokens"]) == (1, 48) and row["measured_s"] > 0
    assert row["ratio"] == row["predicted_s"] / row["measured_s"]
    assert row["rate_share"] == row["step_flops"] / row["measured_s"] / 1e9


@pytest.mark.usefixtures("no_draws")
def test_a_closed_load_on_random_weights(run, monkeypatch):
    monkeypatch.setattr(bench.common, "open_checkpoint", None)
    ran = run(*_SHORT, *_PREFILL, "--random_weights", "--concurrency=1", "--repeats=1", "--json")
    assert ran.status == 0, ran.err
    assert json.loads(ran.out)["rows"][0]["output_tok_s"] > 0


REFUSED = {
    "no point": (["--decode=16"], "is like 1x1024,16x1024 (sequences x context), not '16'"),
    "no sequences": (["--decode=0x64"], "not '0x64'"),
    "short context": (["--decode=1x16"], "contexts from 17 to the model's 256 - 16, not at 16"),
    "long prompt": (["--prefill=1x256"], "prompts below the model's context of 256 tokens, not"),
    "no prompt": (["--prefill=512"], "--prefill is like 1x1024,16x1024 (sequences x tokens), not"),
    "gap of prefill": (["--prefill=1x64", "--gap"], "--prefill does not read --gap: it goes with"),
    "gap of nothing": (["--gap"], "--workload=closed does not read --gap: it goes with --decode"),
    "decoding and an ablation": (
        ["--decode=1x64", "--ablation"],
        "give one of --ablation, --decode",
    ),
    "ablation without weights": (
        ["--ablation", "--random_weights"],
        "not read --random_weights: it",
    ),
    "ablation of a few": (
        ["--ablation", "--concurrency=4"],
        "error: --ablation does not read --concurrency: it goes with --workload=closed or "
        "--workload=agents or --url\n",
    ),
    "picture of decoding": (
        ["--decode=1x64", "--plot=x.png"],
        "--decode does not read --plot: it goes with --workload=closed or --workload=poisson or",
    ),
    "seed of decoding": (["--decode=1x64", "--seed=1"], "--decode does not read --seed"),
    "requests of the host": (
        ["--host_cost", "--requests=5"],
        "--host_cost does not read --requests",
    ),
    "repeats of the host": (["--host_cost", "--repeats=5"], "--host_cost does not read --repeats"),
    "targets of an ablation": (
        ["--ablation", "--slo_itl_s=1"],
        "--ablation does not read --slo_itl_s",
    ),
    "prefill beside": (["--interference", "--prefill_tokens=5"], "not read --prefill_tokens: it"),
    "lines of one row": (
        ["--ablation", "--json_lines"],
        "does not read --json_lines: it goes with --workload=closed or --decode or --prefill",
    ),
    "another app's": (["--device=cpu"], "--workload=closed does not read --device\n"),
    "workload": (["--workload=bursty"], "poisson, agents or a FILE.jsonl, not 'bursty'"),
    "turns of a closed load": (
        ["--turns=fixed:2"],
        "--workload=closed does not read --turns: it goes with --workload=agents",
    ),
    "turns": (["--workload=agents", "--turns=0"], "--turns: lengths are fixed:N, uniform"),
    "agents at times": (
        ["--workload=agents", "--rate=1"],
        "--workload=agents does not read --rate",
    ),
    "many agents": (["--workload=agents", "--concurrency=1,2"], "is one number here, not '1,2'"),
    "no rate": (["--workload=poisson"], "workload.rate is needed where kind is 'poisson'"),
    "negative rate": (["--workload=poisson", "--rate=-1"], "a second above 0, not -1.0"),
    "rate of a closed load": (["--rate=1"], "workload.rate goes with kind 'poisson'"),
    "no requests": (["--workload=poisson", "--rate=1", "--requests=0"], "is at least 1, not 0"),
    "lengths": (["--prompt_lengths=lognormal:9"], "--prompt_lengths: lengths are fixed:N, uniform"),
    "lengths twice": (
        ["--output_lengths=fixed:9", "--new_tokens=9"],
        "either --output_lengths or --new_tokens",
    ),
    "share": (["--prefix_share=2"], "workload.prefix_share is from 0 to 1, not 2.0"),
    "targets": (["--slo_ttft_s=0"], "slo_ttft_s is a number of seconds above 0, not 0.0"),
    "no trace": (["--workload=missing.jsonl"], "cannot read missing.jsonl: No such file"),
    "a trace and lengths": (["--workload=a.jsonl", "--prefix_tokens=1"], "leave --prefix_tokens"),
    "two answers": (["--ablation", "--host_cost"], "give one of --ablation, --host_cost"),
    "ablations": (
        [
            "--ablation",
            "--ablation_only=orbital",
            "--prompt_lengths=fixed:8",
            "--new_tokens=5",
            "--prefix_tokens=9",
        ],
        "--ablation_only lists some of naive, cached",
    ),
    "ablations alone": (
        ["--ablation_only=paged"],
        "does not read --ablation_only: it goes with --ablation",
    ),
    "ablation and load": (
        ["--ablation", "--workload=poisson"],
        "--ablation does not read --workload: it",
    ),
    "interference": (["--interference"], "needs a context of 4096, the model's holds 256"),
    "nobody": (["--interference", "--running=0"], "num_running is at least 1, not 0"),
    "chips of prefill": (["--set=prefill.chips=1"], "bench predicts chips that do both"),
    "repeats": (["--repeats=0"], "--repeats is at least 1, not 0"),
    "plot": (["--plot=x.jpg"], "x.jpg is not a .png file in an existing folder"),
    "open and closed": (
        ["--workload=poisson", "--rate=1", "--concurrency=2"],
        "FILE.jsonl does not read --concurrency: it goes with --workload=closed",
    ),
    "no number": (["--concurrency=1,x"], "takes whole numbers from 1"),
    "zero": (["--concurrency=0"], "takes whole numbers from 1"),
    "no tokens": (["--prompt_tokens=0"], "fixed lengths are from 1 to"),
    "no prefill": (["--prefill_tokens=0"], "--prefill_tokens is at least 1"),
    "long prefill": (["--prefill_tokens=256"], "--prefill_tokens is below the context of 256, not"),
    "long": (["--prompt_tokens=200", "--new_tokens=57", *_PREFILL], "grow to 257 tokens"),
    "very long": (
        ["--prompt_tokens=999999", "--new_tokens=64", "--concurrency=32"],
        "a prompt of 999999 tokens and 64 new ones grow to 1000063 tokens, the context holds 256",
    ),
    "many": (
        ["--concurrency=1,9", "--set=engine.max_seqs=8"],
        "--concurrency=9 is above engine.max_seqs=8",
    ),
}


def test_every_flag_is_read_by_some_mode():
    """But for those that concern the process."""
    modules = ("scripts.bench", "scripts.common")
    keys = (key for name in modules for key in flags.FLAGS.get_key_flags_for_module(name))
    known = {key.name for key in keys}
    assert "concurrency" in known and "prefix_share" in known
    read = {name for names in bench_modes.READ.values() for name in names}
    assert known - read <= {"device"} and read <= known


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_the_checkpoint_is_opened(run, monkeypatch, case):
    args, message = REFUSED[case]
    monkeypatch.setattr(bench.common, "open_checkpoint", None)
    assert message in run(*args).error


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 10**5, '{"a": "1"}', '{"a": true}', '{"a": 0}', '{"a": NaN}',
             '{"a": {"b": 1}}', '{"peer": 5}'],
)  # fmt: skip
def test_figures_beside_are_numbers(run, tmp_path, text):
    path = tmp_path / "beside.json"
    path.write_text(text)
    assert "beside.json" in run(f"--beside={path}").error
    assert "not a regular file" in run(f"--beside={tmp_path}").error
