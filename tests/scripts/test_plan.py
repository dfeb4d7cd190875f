"""`python -m scripts.plan` as its own process: known truths, its start, and what it refuses."""

import json
import resource
import subprocess
import sys

import pytest

from scripts import plan as script
from tests.scripts import apps


@pytest.fixture
def plan(tmp_path):
    def run(*args: str) -> apps.Ran:
        return apps.start("plan", *args, cache=tmp_path)

    return run


@pytest.fixture
def answer(plan):
    def run(*args: str) -> dict:
        ran = plan(*args, "--json")
        assert ran.status == 0, ran.err
        return json.loads(ran.out)

    return run


_LECTURE = ("--accounting=lecture", "--hardware=h100")
_KV_HEADS = "model.pattern.mixer.num_kv_heads"


# --- known truths ---------------------------------------------------------------------------------


def test_the_lecture_on_llama2_13b(answer):
    found = answer(*_LECTURE, "--model=llama2-13b", "--batch=1,16,64,256", "--context=1024")
    rows = [
        (f"{row['memory_bytes'] / 1e9:.4g}", f"{row['step_s'] * 1e3:.4g}",
         f"{row['output_tok_s']:.1f}") for row in found["rows"]
    ]  # fmt: skip
    assert rows == [
        ("26.87", "8.021", "124.7"), ("39.45", "11.78", "1358.6"),
        ("79.72", "23.8", "2689.5"), ("240.8", "71.87", "3561.8"),
    ]  # fmt: skip
    assert [row["fits"] for row in found["rows"]] == [True, True, True, False]
    assert found["largest_batch"] == [{"context": 1024, "batch": 70}]
    assert {row["parameters"] for row in found["rows"]} == {13_015_864_320}
    wanted = {"batch", "context", "parameters", "weight_bytes", "cache_bytes", "memory_bytes",
              "step_s", "ttft_s", "output_tok_s", "bound"}  # fmt: skip
    assert wanted <= set(found["rows"][0])
    assert found["config"]["model"]["name"] == "llama2-13b"


def test_fewer_key_value_heads(answer):
    found = answer(*_LECTURE, "--model=llama2-13b", f"--set={_KV_HEADS}=8", "--batch=64,256")
    assert [f"{row['memory_bytes'] / 1e9:.2f}" for row in found["rows"]] == ["33.41", "65.63"]
    assert [f"{row['output_tok_s']:.0f}" for row in found["rows"]] == ["6417", "13068"]
    assert f"{found['rows'][0]['parameters'] / 1e9:.2f}" == "11.34"


def test_caches_of_llama2_70b(answer):
    one = answer(*_LECTURE, "--model=llama2-70b", "--context=4096")
    assert f"{one['rows'][0]['cache_bytes'] / 1e9:.2f}" == "1.34"
    many = answer(
        *_LECTURE, "--model=llama2-70b", "--context=32768", "--batch=64",
        "--set=model.max_context=32768",
    )  # fmt: skip
    assert f"{many['rows'][0]['cache_bytes'] / 1e9:.1f}" == "687.2"


def test_drafts_of_the_lecture(answer):
    plain, drafted = (
        answer(*_LECTURE, "--model=llama2-70b", *more)["rows"][0]["output_tok_s"]
        for more in ((), ("--speculate=4,0.8,0.11",))
    )
    assert f"{drafted / plain:.2f}" == "2.33"


def test_the_formula_shows_its_parts(answer):
    found = answer("--model=llama2-13b", "--hardware=h100", "--batch=64", "--mesh=model=2")
    parts = found["parts"]
    assert parts["cache_bytes_per_token"] == 2 * 40 * 40 * 128 * 2
    assert parts["ridge"] == pytest.approx(989 / 3.35, rel=1e-6)
    decode = {part["operation"]: part for part in parts["decode"]["operations"]}
    prefill = {part["operation"]: part for part in parts["prefill"]["operations"]}
    assert decode["ffn.gate_up"]["bound"] == "memory"
    assert 60 < decode["ffn.gate_up"]["intensity"] < 64  # one FLOP a byte for each sequence
    assert prefill["ffn.gate_up"]["bound"] == "compute"
    assert decode["attend"]["intensity"] == pytest.approx(1, rel=0.01)
    assert parts["decode"]["time"]["collective_s"] > 0
    exchanged = parts["decode"]["exchanges"]
    assert [each["collective"]["place"] for each in exchanged[:3]] == ["embed", "mixer", "ffn"]
    seconds = sum(each["seconds"] for each in exchanged if each["collective"]["exposed"])
    assert seconds == pytest.approx(parts["decode"]["time"]["collective_s"])


def test_a_mesh_beyond_its_links_is_said(answer, plan):
    asked = ("--model=llama2-70b", "--hardware=h100", "--mesh=model=16")
    (warning,) = answer(*asked)["warnings"]
    assert warning == "links join 8 chips, this mesh takes all for joined so"
    assert f"note: {warning}" in plan(*asked).out
    assert answer(*asked[:2], "--mesh=model=8")["warnings"] == []


def test_tables_for_people(plan):
    shown = plan("--model=mixtral-8x7b", "--batch=1,16", "--weights=int4", "--cache=int8",
                 "--price=2", "--new_tokens=128", "--speculate=auto").out  # fmt: skip
    for words in ("int4 weights, int8 cache", "ridge", "experts.gate_up", "largest batch",
                  "tokens a step", "$/1M tok", "12.75 B for a token"):  # fmt: skip
        assert words in shown


def test_the_engines_own_answer_stands_beside_the_chips(answer, plan):
    """512 tokens of SmolLM2 are 8 pages of 1,474,560 bytes; 45 sequences and a sink fit 512 MiB."""
    asked = ("--model=smollm2-135m", "--context=512", "--set=engine.max_context=512",
             "--set=engine.cache.cache_bytes=536870912")  # fmt: skip
    found = answer(*asked)
    assert found["engine"] == {"context": 512, "cache_bytes": 512 << 20, "batch": 45}
    assert found["largest_batch"][0]["batch"] > 1000
    assert "engine: 45 sequences of 512 in 536,870,912 bytes" in plan(*asked).out
    assert "engine" not in answer("--model=smollm2-135m")
    for changed, batch in (
        ("--hardware=h100", 51),  # of 400 tokens: 7 pages of 64
        ("--hardware=v6e", 45),  # 4 of 128
        ("--set=engine.cache.page_tokens=16", 58),
    ):
        found = answer(*asked, "--set=engine.max_context=400", changed)
        assert found["engine"]["batch"] == batch
    assert found["config"]["engine"]["cache"]["page_tokens"] == 16


def test_quantized_pages_are_those_of_the_chip(answer):
    """A token of Gemma 3 270M has 528 bytes in int8 in a layer; Hopper's kernel pads it to 640."""
    flags = ("--model=gemma3-270m", "--cache=int8", "--set=model.cache_format=int8",
             "--set=engine.cache.cache_bytes=536870912", "--context=1")  # fmt: skip
    for chip, row_bytes in (("h100", 640), ("h200", 640), ("a100", 528), ("v6e", 640)):
        plan = answer(*flags, f"--hardware={chip}")
        tokens = 128 if chip == "v6e" else 64
        for group in plan["engine"]["page_groups"]:
            assert group["bytes"] == group["pages"] * group["layers"] * tokens * row_bytes
        assert plan["rows"][0]["cache_bytes"] == 18 * row_bytes
        assert plan["parts"]["cache_bytes_per_token"] == 18 * row_bytes


def test_snapshots_of_states_stand_beside_the_cache(answer, plan):
    """By the engine's default as many as sequences; each is as large as a sequence's states."""
    arguments = ("--model=mamba2-2.7b", "--batch=4,8", "--set=engine.max_seqs=16")
    found = answer(*arguments)
    own, rows = found["snapshots"], found["rows"]
    each = rows[0]["cache_bytes"] / 4
    assert (own["number"], own["bytes_each"], own["bytes"]) == (4, each, 4 * each)
    assert [row["snapshot_bytes"] for row in rows] == [4 * each, 8 * each]
    assert all(
        row["memory_bytes"] == row["weight_bytes"] + row["cache_bytes"] + row["snapshot_bytes"]
        for row in rows
    )
    assert found["engine"]["snapshots"] == {"number": 17, "bytes": 17 * each}
    fewer = answer(*arguments, "--set=engine.cache.snapshots=2")
    assert [row["snapshot_bytes"] for row in fewer["rows"]] == [2 * each] * 2
    assert fewer["largest_batch"][0]["batch"] > found["largest_batch"][0]["batch"]
    none = answer(
        *arguments,
        "--set=engine.cache.prefix_cache=false",
        "--set=engine.cache.preemption=recompute",
    )
    assert none["rows"][0]["snapshot_bytes"] == 0 and none["engine"]["snapshots"]["number"] == 1
    shown = plan(*arguments).out
    assert f"4 of {each / 1e6:.4g} MB" in shown and "17 snapshots of states" in shown
    assert f"one of them a sink: {17 * each / 1e9:.4g} GB a chip" in shown


def test_page_groups_share_the_cache_by_the_length_that_is_expected(answer, plan):
    arguments = "--model=gemma3-270m", "--set=engine.max_seqs=64"
    groups = {}
    for expected in (500, 32_768):
        arguments = *arguments[:2], f"--set=engine.cache.expected_tokens={expected}"
        found = answer(*arguments)["engine"]
        local, world = groups[expected] = found["page_groups"]
        assert (local["sees"], local["layers"]) == ("window512", 15)
        assert (world["sees"], world["layers"]) == ("all", 3)
        assert local["bytes"] + world["bytes"] <= found["cache_bytes"] + 18 * 64 * 1024  # and sinks
        shown = f"15 layers that see window512: {local['pages']:,} pages"
        assert shown in plan(*arguments).out
    assert groups[500][0]["pages"] > 2 * groups[32_768][0]["pages"]


def test_drafts_that_are_found_are_in_all_that_is_shown(answer):
    """Rows, parts and largest batch are those of the same drafts, given."""
    asked = ("--model=llama2-13b", "--context=512")
    found = answer(*asked, "--speculate=auto")
    (drafts,) = found["speculation"]
    plain = answer(*asked)
    assert drafts["size"] > 0
    held = found["rows"][0]["weight_bytes"]
    assert held == pytest.approx((1 + drafts["size"]) * plain["rows"][0]["weight_bytes"])
    assert found["parts"]["weight_bytes"] == held
    attend = next(p for p in found["parts"]["decode"]["operations"] if p["operation"] == "attend")
    assert attend["flops"] == (1 + drafts["drafts"]) * 40 * 4 * 40 * 128 * (
        512 + drafts["drafts"] / 2
    )
    assert found["largest_batch"][0]["batch"] < plain["largest_batch"][0]["batch"]


# --- questions ------------------------------------------------------------------------------------


def test_slo(answer, plan):
    asked = ("--model=llama2-70b", "--slo=ttft=0.5,tpot=0.03", "--rate=20", "--price=2.5")
    found = answer(*asked)["slo"]
    assert [entry["mesh"]["model"] for entry in found] == [2, 4, 8]
    for entry in found:
        assert entry["replica"]["tpot_s"] <= 0.03 and entry["replica"]["ttft_s"] <= 0.5
        assert entry["replicas"] * entry["replica"]["requests_s"] * 0.8 >= 20
        assert (entry["replicas"] - 1) * entry["replica"]["requests_s"] * 0.8 < 20
    shown = plan(*asked).out
    assert "smallest mesh: model=2, up to" in shown
    assert "load" in shown and "time in the queue comes on top" in shown


def test_samples_and_thoughts_of_a_request(answer, plan):
    asked = ("--model=llama2-70b", "--mesh=model=4", "--context=1000", "--new_tokens=100",
             "--samples=12", "--thinking_tokens=600", "--price=3")  # fmt: skip
    found = answer(*asked)
    (request,) = [each for each in found["requests"] if each["samples"] == 12]
    (row,) = found["rows"]
    assert request["seconds"] == row["request_s"] and request["tokens"] == 12 * 700
    assert request["dollars"] == pytest.approx(3 * 4 * row["request_s"] / 3600)
    assert request["cache_bytes"] == row["cache_bytes"]
    assert request["largest_batch"] == found["largest_batch"][0]["batch"]
    shown = plan(*asked).out
    for words in ("12 *", "one sample thinks for", f"{request['equal_thinking_tokens']:,} tokens"):
        assert words in shown
    assert "requests" not in answer("--new_tokens=100")


def test_advice(answer):
    asked = ("--model=llama2-70b", "--hardware=h100", "--chips=2", "--advise")
    found = answer(*asked)["advice"]
    scores = [choice["output_tok_s"] for choice in found["choices"]]
    assert scores == sorted(scores, reverse=True)
    assert any("bfloat16 weights" in reason for reason in found["excluded"])
    best = found["choices"][0]
    assert best["weights"] == "w8a8_fp8" and best["batch"] > 50
    assert {part["technique"].split()[-1] for part in best["parts"]} >= {"weights", "cache"}
    assert all(part["costs"] for part in best["parts"])
    soon = answer(*asked, "--goal=latency")["advice"]["choices"]
    assert soon[0]["batch"] == 1 and soon[0]["speculation"]["drafts"] > 2
    assert soon[0]["request_s"] < best["request_s"]


def test_advice_on_experts_and_latents(answer, plan):
    asked = ("--model=deepseek-v2-lite", "--hardware=h200", "--chips=2", "--advise",
             "--goal=latency", "--weights=bfloat16")  # fmt: skip
    found = answer(*asked)["advice"]
    assert found["mixture"]["visits"][0]["visited"] == pytest.approx(6)
    assert found["exchange"][0]["saved"] < 1 and found["expanded_from"] == 159
    assert [cache["name"] for cache in found["caches"]][:3] == ["MLA", "GQA, 8 KV heads", "MHA"]
    text = plan(*asked).out
    assert "experts: 6 of 64 a token, 2.451 B of 15.71 B parameters" in text
    assert "MLA, chips divide the tokens (predicted alone)" in text
    assert "absorbed, chunks of 159 tokens on take more FLOPs" in text
    assert "all-gather, leave a chip" in text and "in the best" in text


# --- its start ------------------------------------------------------------------------------------


def test_an_iteration_of_reinforcement_learning(answer, plan):
    call = (
        "--model=llama3-8b", "--task=grpo", "--context=512", "--set=training.batch=32",
        "--set=training.group_size=4", "--set=training.lora_rank=16", "--set=training.staleness=2",
        "--mfu=0.5",
    )  # fmt: skip
    found = answer(*call)["grpo"]
    assert found["iteration"]["batch"] == 32 and found["prompt_tokens"] == 512
    assert found["training"]["mfu"] == 0.5 and found["training"]["passes"] == 3
    names = [schedule["name"] for schedule in found["schedules"]]
    assert names == ["same chips", "apart, synchronous", "apart, asynchronous by 2"]
    assert found["schedules"][2]["step_s"] < found["schedules"][1]["step_s"]
    shown = plan(*call, "--set=training.accumulate=64").out
    assert "32 prompts of 512 tokens x 4 answers of 256 = 128 samples" in shown
    assert "at 50% of its rate (an assumption: --mfu)" in shown
    assert "the same chips hold all of it" in shown
    assert "apart, the engine waits for the trainer" in shown


def test_slots_of_adapters(answer, plan):
    call = "--model=smollm2-135m", "--batch=8", "--set=engine.adapters.slots=6"
    few, many = (answer(*call, f"--set=engine.adapters.rank={rank}") for rank in (8, 64))
    few_bytes, many_bytes = (figures["adapters"]["bytes"] for figures in (few, many))
    ranks = 6 * 4 * 4 * 30  # bytes: of each slot and matrix
    assert many_bytes - ranks == 4 * (few_bytes - ranks)  # rank 8 takes the room of 16
    assert few["adapters"]["slots"] == 6 and few["adapters"]["rank"] == 8
    assert list(few["adapters"]["decode_s"]) == ["1", "2", "4", "6"]
    memory = [found["rows"][0]["memory_bytes"] for found in (few, many)]
    assert memory[1] - memory[0] == many_bytes - few_bytes
    assert "adapters: 6 slots of rank 16 = " in plan(*call).out


def test_it_starts_without_jax():
    code = (
        "import sys; sys.argv=['plan','--model=llama2-13b','--json']; from scripts import common, "
        "plan; common.run(plan.main)\n"
    )
    probe = (
        "import atexit, sys; atexit.register(lambda: print(sorted({'jax','numpy','flax','gguf'} & "
        "set(sys.modules)), file=sys.stderr));"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe + code], capture_output=True, cwd=apps.ROOT, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"


def test_it_starts_in_half_a_second(plan):
    """Or, on a slow machine, in seven times of what Python and absl take."""

    def seconds(start) -> float:  # of the processor's: a busy machine adds waiting to the clock's
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def absl() -> None:
        subprocess.run([sys.executable, "-c", "import absl.app"], check=True)

    def app() -> None:
        assert plan("--model=llama2-13b", "--json").status == 0

    absl_s, app_s = (min(seconds(start) for _ in range(5)) for start in (absl, app))
    assert app_s <= max(0.5, 7 * absl_s)


# --- files ----------------------------------------------------------------------------------------


def test_plot(plan, tmp_path):
    target = tmp_path / "out.png"
    ran = plan("--model=llama2-13b", "--batch=1,64,256", f"--plot={target}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert "pip install '.[plots]'" in ran.err and not target.exists()
        assert ran.error
    else:
        assert ran.status == 0 and target.read_bytes().startswith(b"\x89PNG")


def test_page(plan, tmp_path):
    target = tmp_path / "out.html"
    ran = plan(f"--html={target}")
    assert ran.status == 0 and "wrote" in ran.err
    assert target.read_text(encoding="utf-8").lower().startswith("<!doctype html>")


def test_this_machine(plan, tmp_path):
    """Measured by the first call, remembered by the second."""
    first, second = (plan("--hardware=cpu", "--batch=1,8", "--json") for _ in range(2))
    rows = [json.loads(ran.out)["rows"] for ran in (first, second)]
    assert rows[0] == rows[1] and 1e-4 < rows[0][0]["step_s"] < 10
    assert [path.suffix for path in (tmp_path / "hardware").iterdir()] == [".json"]
    assert "cpu has no links" in plan("--hardware=cpu", "--mesh=model=3").error


# --- bad input ------------------------------------------------------------------------------------

_REFUSED = {
    "uneven mesh": (
        ["--model=smollm2-135m", "--mesh=model=2"], "mesh model=2 gives chips unequal parts of"
    ),
    "uneven states": (
        ["--model=mamba2-2.7b", "--mesh=model=3"], "mesh model=3 does not divide the heads"
    ),
    "another task": (["--task=sft"], "--task=sft: `plan` knows grpo"),
    "batch of a task": (["--task=grpo", "--batch=4"], "reads --set training.batch=... instead"),
    "task and targets": (["--task=grpo", "--advise"], "leave --slo, --advise and --plot out"),
    "mfu without a task": (["--mfu=0.3"], "--mfu needs --task=grpo"),
    "mfu": (["--task=grpo", "--mfu=nan"], "--mfu=nan: must be above 0 and at most 1"),
    "field of a task": (["--task=grpo", "--set=training.steps=3"], "'steps' is not one of batch"),
    "model": (["--model=llama9"], "no model 'llama9'; valid: smollm2-135m"),
    "empty model": (["--model="], "no model ''"),
    "long model": (["--model=" + "x" * 5000], "no model"),
    "hardware": (["--hardware=h9000"], "no hardware 'h9000'; valid: h100, h200"),
    "weights": (["--weights=int2"], "no number format 'int2'; valid: float32, bfloat16"),
    "cache": (["--cache="], "is bfloat16 as model.dtype, fp8, int8 or int4, not ''"),
    "batch": (["--batch=0"], "--batch takes whole numbers from 1"),
    "negative batch": (["--batch=-4"], "--batch takes whole numbers from 1"),
    "no batch": (["--batch="], "--batch takes whole numbers from 1"),
    "words": (["--batch=1,many"], "--batch takes whole numbers from 1"),
    "digits": (["--batch=²"], "--batch takes whole numbers from 1"),
    "huge batch": (["--batch=" + "9" * 5000], "--batch takes whole numbers from 1"),
    "context": (["--context=1e3"], "--context takes whole numbers from 1"),
    "long context": (
        ["--model=llama2-13b", "--context=8192"], "at most the 4096 tokens of llama2-13b"
    ),
    "long answer": (["--model=llama2-13b", "--new_tokens=4000"], "at most the 4096 tokens"),
    "new tokens": (["--new_tokens=-1"], "new_tokens is at least 0, not -1"),
    "new tokens in words": (["--new_tokens=two"], "new_tokens"),
    "mesh": (["--mesh=2"], "a mesh is like data=2,model=4"),
    "mesh axis": (["--mesh=pipeline=2"], "with the axes data, model, expert"),
    "mesh heads": (
        ["--model=llama2-13b", "--mesh=model=41"],
        "does not divide the heads and feed-forward widths [40, 13824]",
    ),
    "mesh zero": (["--mesh=model=0"], "mesh axis model is at least 1, not 0"),
    "mesh of many digits": (["--mesh=data=" + "9" * 5000], "a mesh is like data=2,model=4"),
    "mesh beyond reason": (["--mesh=data=2000000"], "mesh axis data is at most 1000000 chips"),
    "chips of prefill": (
        ["--mesh=model=3", "--set=prefill.chips=1"], "must equal mesh.model (3)"
    ),
    "mesh experts": (["--model=mixtral-8x7b", "--mesh=expert=3"], "valid: 1, 2, 4, 8"),
    "no experts": (["--model=llama2-13b", "--mesh=expert=2"], "has no experts to divide"),
    "replicas": (["--replicas=0"], "at least 1 replica, not 0"),
    "replicas of many digits": (["--replicas=" + "9" * 400], "at most 1000000 replicas"),
    "width of many digits": (["--set=model.width=" + "9" * 400], "width is at most 16777216"),
    "layers": (["--set=model.num_layers=1000000000"], "model.num_layers is at most 10000"),
    "accounting": (["--accounting=guess"], "accounting is one of exact, lecture"),
    "price": (["--price=nan"], "--price is a number of dollars an hour above 0, not nan"),
    "price in words": (["--price=cheap"], "price"),
    "drafts": (["--speculate=4"], "--speculate is k,acceptance,cost"),
    "acceptance": (["--speculate=4,1.5,0.1"], "an acceptance is a number from 0 to 1, not 1.5"),
    "acceptance NaN": (["--speculate=4,nan,0.1"], "an acceptance is a number from 0 to 1"),
    "negative drafts": (["--speculate=-4,0.5,0.1"], "drafts is at least 0, not -4"),
    "many drafts": (["--speculate=1000000000,0.5,0.1"], "drafts is at most 1024"),
    "draft cost": (["--speculate=4,0.5,inf"], "a draft's cost is at least 0"),
    "setting": (["--set=model.heads=3"], "unknown key 'model.heads'"),
    "setting's value": (["--model=llama2-13b", f"--set={_KV_HEADS}=7"], "not a multiple of"),
    "samples": (["--samples=0"], "--samples is from 1 to 4096, not 0"),
    "samples of advice": (["--advise", "--samples=2"], "leave --samples out"),
    "thoughts": (["--thinking_tokens=-1"], "--thinking_tokens is at least 0, not -1"),
    "targets": (["--slo=fast"], "--slo is like ttft=0.5,tpot=0.03"),
    "targets below 0": (["--slo=ttft=-1"], "--slo ttft is a number of seconds above 0"),
    "targets not met": (["--model=llama2-70b", "--slo=tpot=1e-9"], "the fastest is model=8"),
    "rate": (["--slo=tpot=1", "--rate=0"], "--rate is a number of requests a second above 0"),
    "endless rate": (["--slo=tpot=1", "--rate=1e308"], "above 0 and at most 1e+09, not 1e+308"),
    "rate alone": (["--rate=3"], "--rate needs --slo"),
    "too large": (["--model=deepseek-v3.2", "--hardware=l4", "--slo=tpot=1"], "fits no mesh of l4"),
    "goal": (["--advise", "--goal=fame"], "--goal is one of throughput, latency"),
    "chips": (["--advise", "--chips=0"], "--chips is at least 1, not 0"),
    "goal alone": (["--goal=latency"], "--goal needs --advise"),
    "nothing fits": (["--model=llama2-70b", "--hardware=l4", "--advise"], "nothing fits"),
    "two questions": (["--advise", "--slo=tpot=1"], "either --slo or --advise"),
    "mesh of an answer": (["--advise", "--mesh=model=2"], "leave both out"),
    "plot of an answer": (
        ["--slo=tpot=1", "--plot=out.png"], "--plot draws a sweep: leave --slo and --advise out"
    ),
    "verify a chip": (["--verify", "--hardware=h100"], "leave --hardware out"),
    "verify a batch": (["--verify", "--batch=4"], "leave --batch out"),
    "verify new tokens": (["--verify", "--new_tokens=4"], "leave --new_tokens out"),
    "verify a mesh": (["--verify", "--mesh=model=2"], "leave --mesh out"),
    "verify a format": (["--verify", "--weights=int4"], "leave --weights out"),
    "plot": (["--plot=out.jpg"], "is not a .png file in an existing folder"),
    "plot's folder": (["--plot=missing/out.png"], "is not a .png file in an existing folder"),
    "page": (["--html=."], "is not a .html file in an existing folder"),
    "positional": (["h100"], "unexpected argument 'h100'"),
}  # fmt: skip


@pytest.mark.parametrize("name", _REFUSED)
def test_refusals_are_one_line(name, monkeypatch, capfd):
    args, words = _REFUSED[name]
    assert words in apps.call(script, monkeypatch, capfd, *args).error


@pytest.mark.parametrize("name", ["new tokens in words", "model", "positional"])
def test_refusals_of_a_process_are_one_line(name, plan):
    args, words = _REFUSED[name]
    assert words in plan(*args).error
