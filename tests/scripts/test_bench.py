"""`python -m scripts.bench` on a tiny checkpoint: its rows, and what it refuses."""

import json

import pytest

from inference.executor import Executor
from inference.planner import calibrate
from scripts import bench
from tests.scripts import apps

pytestmark = pytest.mark.quick_code

_ARGS = (
    f"--model={apps.TINY}", "--prompt_tokens=20", "--new_tokens=5", "--prefill_tokens=40",
    "--set=engine.prefill_tiles=(2,)", "--set=engine.decode_rows=(4,)",
    "--set=engine.page_tokens=16", "--set=engine.tile_tokens=32",
)  # fmt: skip
_ROW = {
    *("concurrency", "output_tok_s", "predicted_output_tok_s", "ttft_p50_s", "ttft_p99_s"),
    *("itl_p50_s", "itl_p99_s", "kv_waste", "compiles"),
}


@pytest.fixture
def run(monkeypatch, capfd):
    monkeypatch.setattr(calibrate, "read", lambda: None)  # whatever was found here, or not
    return lambda *args: apps.call(bench, monkeypatch, capfd, *_ARGS, *args)


def test_rows_and_table(run, monkeypatch, tmp_path):
    ran = run("--concurrency=1,3", "--repeats=2", "--json")
    assert ran.status == 0, ran.err
    answer = json.loads(ran.out)
    assert [row["concurrency"] for row in answer["rows"]] == [1, 3]
    for row in (*answer["rows"], answer["sampled"]):
        assert set(row) == _ROW and row["compiles"] == 0
        assert row["output_tok_s"] > 0 and row["predicted_output_tok_s"] > row["output_tok_s"]
        # Two pages of 16 hold 20 to 24 tokens; after the last token nothing is held.
        assert 0.1 < row["kv_waste"] <= 12 / 32
    assert answer["prefill_tok_s"] > 0 and answer["first_token_s"] > 0

    beside = tmp_path / "beside.json"
    beside.write_text('{"peer": "other", "output_tok_s_1": 10, "prefill_tok_s": 2.5}')
    monkeypatch.setattr(Executor, "warm_up", lambda *args: None)  # then steps compile as they come
    ran = run("--concurrency=1", "--repeats=1", f"--beside={beside}")
    lines = ran.out.splitlines()
    assert lines[0].split() == ["ridgeline", "predicted", "other", "ratio"]
    assert len(lines[1].split()) == 8 and "output tok/s at 1" in lines[1]
    assert "programs compiled after warm-up: 0" not in ran.out


REFUSED = {
    "no number": (["--concurrency=1,x"], "is a list of numbers"),
    "zero": (["--concurrency=0"], "are at least 1"),
    "no prefill": (["--prefill_tokens=0"], "--prefill_tokens, --new_tokens, --repeats are at"),
    "long prefill": (["--prefill_tokens=256"], "grow to 257 tokens, the context holds 256"),
    "long": (["--prompt_tokens=200", "--new_tokens=57"], "grow to 257 tokens"),
    "many": (
        ["--concurrency=1,9", "--set=engine.max_seqs=8"],
        "--concurrency=9 is above engine.max_seqs=8",
    ),
}


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
    assert "is not a file with one JSON object" in run(f"--beside={tmp_path}").error
