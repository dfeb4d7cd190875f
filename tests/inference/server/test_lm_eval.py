"""lm-eval's own clients against `scripts.serve`, and the same tasks scored in this process, alone
and as `scripts.evaluate --task_file` does.

LM_EVAL_PYTHON names a Python that has lm-eval (`pip install 'lm-eval[api,ifeval]'`), LM_EVAL_MODEL
another model than a tiny one with random weights; one that puts no token before texts, as lm-eval
puts none.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest
import tokenizers

from inference.benchmark.quality.tasks import documents as task_documents
from inference.benchmark.quality.tasks import scored
from inference.engine import Engine
from inference.request import SamplingParams
from tests.inference.server.running import wait_until

ROOT = Path(__file__).resolve().parents[3]
PYTHON = Path(os.environ.get("LM_EVAL_PYTHON", ROOT / ".venv-lm-eval" / "bin" / "python"))
TINY = ROOT / "tests" / "golden" / "llama-tokenizer"
STOP = ("\n", ".", ",", "!", "?")  # and the end token: more than vLLM takes unasked
NUM_NEW, NUM_NEW_OF_NUMBERS = 12, 60
IFEVAL_CASES = ROOT / "tests" / "golden" / "ifeval" / "cases.jsonl"
METRICS = {
    "exact_match_strict": "exact_match,strict-match",
    "exact_match_flexible": "exact_match,flexible-extract",
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason="lm-eval is missing: pip install 'lm-eval[api]', LM_EVAL_PYTHON=",
    ),
]

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Germany": "Berlin", "Japan": "Tokyo",
    "China": "Beijing", "Russia": "Moscow", "Egypt": "Cairo", "Greece": "Athens", "Cuba": "Havana",
    "Kenya": "Nairobi", "Peru": "Lima", "Norway": "Oslo", "Austria": "Vienna", "Chile": "Santiago",
    "Canada": "Ottawa", "Iran": "Tehran", "Iraq": "Baghdad", "Poland": "Warsaw", "Latvia": "Riga",
}  # fmt: skip
TASK = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
num_fewshot: 0
output_type: {kind}
target_delimiter: ""
"""
TEXT = """\
doc_to_text: "{{text}}"
"""
CHOICE = f"""\
{TEXT}
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""
GSM8K = r"""
doc_to_text: "Question: {{question}}\nAnswer:"
doc_to_target: "{{answer}}"
metric_list:
  - metric: exact_match
    ignore_case: true
    ignore_punctuation: false
    regexes_to_ignore: [",", "\\$", "(?s).*#### ", "\\.$"]
generation_kwargs:
  until: ["Question:", "</s>", "<|im_end|>"]
  max_gen_toks: 60
filter_list:
  - name: strict-match
    filter:
      - function: regex
        regex_pattern: "#### (\\-?[0-9\\.\\,]+)"
      - function: take_first
  - name: flexible-extract
    filter:
      - function: regex
        group_select: -1
        regex_pattern: "(-?[$0-9.,]{2,})|(-?[0-9]+)"
      - function: take_first
"""
IFEVAL = """
doc_to_text: prompt
doc_to_target: 0
generation_kwargs:
  until: []
  max_gen_toks: 12
process_results: !function utils.process_results
metric_list:
  - metric: prompt_level_strict_acc
    aggregation: mean
    higher_is_better: true
  - metric: inst_level_strict_acc
    aggregation: !function utils.agg_inst_level_acc
    higher_is_better: true
  - metric: prompt_level_loose_acc
    aggregation: mean
    higher_is_better: true
  - metric: inst_level_loose_acc
    aggregation: !function utils.agg_inst_level_acc
    higher_is_better: true
"""
UNTIL = f"""\
{TEXT}
doc_to_target: "{{{{target}}}}"
generation_kwargs:
  until: {json.dumps(STOP)}
  max_gen_toks: {NUM_NEW}
metric_list:
  - metric: exact_match
    ignore_case: false
"""


def documents() -> list[dict]:
    names, found = list(CAPITALS.values()), []
    for n, country in enumerate(CAPITALS):
        choices = [f" {names[(n + 3 * k) % len(names)]}" for k in range(4)]
        label = n % 4
        choices[0], choices[label] = choices[label], choices[0]
        found.append({"text": f"The capital of {country} is", "choices": choices, "label": label})
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    if "LM_EVAL_MODEL" in os.environ:
        return os.environ["LM_EVAL_MODEL"]
    folder = shutil.copytree(TINY, tmp_path_factory.mktemp("models") / "tiny")
    path = str(folder / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    backend.post_processor = None
    backend.save(path)
    return str(folder)


@pytest.fixture(scope="module")
def engine(model):
    return Engine.from_model(
        model, dtype="float32", deterministic=True, max_seqs=8, top_logprobs=20, penalties=True
    )


@contextlib.contextmanager
def serving(model: str):
    command = [
        *(sys.executable, "-m", "scripts.serve", f"--model={model}", "--port=0", "--nowarm_up"),
        *("--set=model.dtype=float32", "--set=engine.deterministic=true", "--max_num_seqs=8"),
        "--served_model_name=it",
    ]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        url = process.stderr.readline().split()[0]
        try:
            wait_until(lambda: httpx2.get(f"{url}/ready").status_code == 200, 240)
            yield url
        finally:
            process.terminate()
            process.communicate(timeout=60)


def evaluated(model: str, url: str, folder: Path, *tasks: str, chat: bool = False):
    """What lm-eval found, and each document's answers."""
    command = [
        *(str(PYTHON), "-m", "lm_eval", "run", "--model", model, "--tasks", ",".join(tasks)),
        *("--include_path", str(folder), "--output_path", str(folder / model), "--log_samples"),
        *("--model_args", f"model=it,base_url={url},num_concurrent=4,max_retries=3,max_length=256"),
        *(["--apply_chat_template"] if chat else []),
    ]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    environment |= {"HF_HOME": str(folder / "hub"), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    (whole,) = (folder / model).rglob("results_*.json")
    samples = {}
    for task in tasks:
        (path,) = (folder / model).rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        samples[task] = sorted(lines, key=lambda each: each["doc_id"])
    return json.loads(whole.read_text())["results"], samples


def scores(engine, given: list[dict]) -> list[list[tuple[float, bool]]]:
    """Of each document's choices: the log-probability behind its text, and whether greedy decoding
    gives it.
    """
    encode = engine.tokenizer.encode
    contexts = [encode(each["text"], False) for each in given for _ in each["choices"]]
    texts = [encode(each["text"] + one, False) for each in given for one in each["choices"]]
    found = []
    for context, whole, score in zip(contexts, texts, engine.score(texts), strict=True):
        assert whole[: len(context)] == context
        tops = score.top_logprobs[len(context) - 1 :]
        greedy = [max(top, key=top.get) for top in tops] == whole[len(context) :]
        found.append((sum(score.logprobs[len(context) - 1 :]), greedy))
    return [found[n : n + 4] for n in range(0, len(found), 4)]


def generated(engine, prompts: list[list[int]], stop, num_new: int = NUM_NEW) -> list[str]:
    params = SamplingParams(max_new_tokens=num_new, stop=tuple(stop))
    return [answer.text for answer in engine.generate(prompts, params)]


def test_scores_are_those_of_this_process(model, engine, tmp_path):
    given = documents()
    texts = [each["text"] for each in given]
    end = engine.tokenizer.special_tokens["eos_token"]
    plain = generated(
        engine, [engine.tokenizer.encode(text, False) for text in texts], (*STOP, end)
    )
    chats = [[{"role": "user", "content": text}] for text in texts]
    told = [engine.tokenizer.apply_chat_template(one, True) for one in chats]
    answered = generated(engine, told, STOP[:4])
    for name, answers in (("plain", plain), ("told", answered)):
        # Every third document wants something else, so a score says which ones were met.
        lines = [
            document | {"target": "another" if n % 3 == 0 else answer}
            for n, (document, answer) in enumerate(zip(given, answers, strict=True))
        ]
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        for kind, more in (("multiple_choice", CHOICE), ("generate_until", UNTIL)):
            task = f"{name}_{kind}"
            head = TASK.format(name=task, data=data, kind=kind)
            (tmp_path / f"{task}.yaml").write_text(head + more)
    with serving(model) as url:
        tasks = "plain_multiple_choice", "plain_generate_until"
        found, samples = evaluated("local-completions", f"{url}/v1/completions", tmp_path, *tasks)
        chat = "told_generate_until"
        other, chat_samples = evaluated(
            "local-chat-completions", f"{url}/v1/chat/completions", tmp_path, chat, chat=True
        )
    own = scores(engine, given)
    for sample, mine in zip(samples[tasks[0]], own, strict=True):
        theirs = [(float(one[0]), str(one[1]) == "True") for (one,) in sample["resps"]]
        assert theirs == mine, "to the last bit"
    picked = [max(range(4), key=lambda k, one=one: one[k][0]) for one in own]
    right = [pick == document["label"] for pick, document in zip(picked, given, strict=True)]
    assert found[tasks[0]]["acc,none"] == sum(right) / len(right)
    per_byte = [
        max(range(4), key=lambda k: one[k][0] / len(document["choices"][k]))  # noqa: B023
        for one, document in zip(own, given, strict=True)
    ]
    normed = [pick == document["label"] for pick, document in zip(per_byte, given, strict=True)]
    assert found[tasks[0]]["acc_norm,none"] == sum(normed) / len(normed)
    for each, task, answers in ((samples, tasks[1], plain), (chat_samples, chat, answered)):
        assert [sample["resps"][0][0] for sample in each[task]] == answers
    share = sum(n % 3 != 0 for n in range(len(given))) / len(given)
    assert found[tasks[1]]["exact_match,none"] == other[chat]["exact_match,none"] == share
    print(f"acc {found[tasks[0]]['acc,none']}, acc_norm {found[tasks[0]]['acc_norm,none']}, "
          f"exact_match {share} and {share}: as scored here")  # fmt: skip


def numbers(engine) -> list[dict]:
    """Questions of the form of GSM8K; every second answer is the last number that is found."""
    found = []
    for n in range(40):
        question = f"{n} and {3 * n} are"
        prompt = engine.tokenizer.encode(f"Question: {question}\nAnswer:")
        (text,) = generated(engine, [prompt], ("Question:",), NUM_NEW_OF_NUMBERS)
        last = (re.findall(r"(?:[$0-9.,]{2,})|(?:[0-9]+)", text) or ["1"])[-1]
        met = n % 3 > 0 and re.fullmatch("[0-9]+", last)
        found.append({"question": question, "answer": f"So.\n#### {last if met else 12345}"})
    return found


def instructions() -> list[dict]:
    lines = [json.loads(line) for line in IFEVAL_CASES.read_text("utf-8").splitlines()[::3]]
    pairs = zip(lines, [*lines[7:], *lines[:7]], strict=True)
    return [
        {"key": n, "prompt": f"Text {n}:", "instruction_id_list": [one["id"], two["id"]],
         "kwargs": [one["kwargs"], two["kwargs"]]}
        for n, (one, two) in enumerate(pairs)
    ]  # fmt: skip


def test_files_of_tasks_score_as_with_lm_eval(model, engine, tmp_path):
    given = {"gsm8k": numbers(engine), "ifeval": instructions(), "choices": documents()}
    kinds = {"gsm8k": GSM8K, "ifeval": IFEVAL, "choices": CHOICE}
    (tmp_path / "utils.py").write_text(
        "import nltk\nnltk.download = lambda *args, **kwargs: True\n"
        "from lm_eval.tasks.ifeval.utils import agg_inst_level_acc, process_results\n"
    )
    for name, lines in given.items():
        data = tmp_path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        kind = "multiple_choice" if name == "choices" else "generate_until"
        head = TASK.format(name=f"own_{name}", data=data, kind=kind)
        (tmp_path / f"own_{name}.yaml").write_text(head + kinds[name])
    with serving(model) as url:
        tasks = [f"own_{name}" for name in given]
        found, samples = evaluated("local-completions", f"{url}/v1/completions", tmp_path, *tasks)
    prompts = scored.Prompts(engine.tokenizer, chat=False)
    for name, lines in given.items():
        documents_of_task, left_out = task_documents.read(str(tmp_path / f"{name}.jsonl"))
        num_new = NUM_NEW_OF_NUMBERS if name == "gsm8k" else NUM_NEW
        outcomes = list(scored.run(engine, documents_of_task, prompts, num_new))
        assert left_out == 0 and len(outcomes) == len(lines)
        theirs = found[f"own_{name}"]
        for metric, own in scored.metrics(outcomes).items():
            assert theirs[METRICS.get(metric, f"{metric},none")] == pytest.approx(own.mean), metric
        each = samples[f"own_{name}"]
        if name == "choices":
            resps = [[float(one[0][0]) for one in sample["resps"]] for sample in each]
            assert resps == [list(outcome.logprobs) for outcome in outcomes]
        else:
            resps = {sample["doc_id"]: sample["resps"][0][0] for sample in each}
            assert list(resps.values()) == [outcome.answer for outcome in outcomes]
        print(f"{name}: { ({k: round(m.mean, 4) for k, m in scored.metrics(outcomes).items()}) }")
