"""Measures the engine beside what was predicted: python -m scripts.bench --concurrency=1,8,32.

--workload=poisson --rate=2 --requests=64      requests that arrive at times of their own
--workload=agents --concurrency=8              sessions of agents, whose tools run between turns
--ablation                                     what each technique is worth, one after another
--interference                                 a long prompt beside requests that decode
--host_cost                                    the host's part of a step
--decode=1x1024,16x1024 --random_weights       decode steps alone, for any model that fits
--prefill=1x512,1x4096 --random_weights        steps alone that prefill whole prompts
--url=http://127.0.0.1:8000                    a server of OpenAI's interface, whosever it is
"""

from scripts import interrupts  # noqa: F401

# isort: split
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

START = time.time()  # before anything heavy is imported: the first token's time counts from here

from absl import flags  # noqa: E402

from configs.errors import InputError  # noqa: E402
from scripts import common  # noqa: E402
from scripts.flags import (  # noqa: E402
    deployment_flags,
    file_flags,
    json_lines_flag,
    shared_flags,
    workload_flags,
)
from scripts.flags.requests import remote_flags  # noqa: E402
from scripts.modes import bench_modes  # noqa: E402

if TYPE_CHECKING:
    from inference.checkpoints.checkpoint import Checkpoint
    from inference.checkpoints.resolve import Resolved

_CONCURRENCY = remote_flags.CONCURRENCY
_PREFILL_TOKENS = flags.DEFINE_integer(
    "prefill_tokens", 500, "Tokens of each of four prompts that measure prefill."
)
_REPEATS = shared_flags.REPEATS
_BESIDE = flags.DEFINE_string("beside", None, "JSON file of another engine's figures.")
_ABLATION = flags.DEFINE_bool(
    "ablation", False, "Add one technique after another, each judged by its own metric."
)
_ABLATION_ONLY = flags.DEFINE_list("ablation_only", None, "Only these of --ablation, by name.")
_INTERFERENCE = flags.DEFINE_bool(
    "interference", False, "Time between tokens while a long prompt is prefilled."
)
_LONG_TOKENS = flags.DEFINE_integer("long_tokens", 4000, "--interference: tokens of that prompt.")
_RUNNING = flags.DEFINE_integer("running", 8, "--interference: requests that decode beside it.")
_RANDOM_WEIGHTS = flags.DEFINE_bool(
    "random_weights", False, "Draw the weights on the device: no checkpoint, no network."
)
_DECODE = flags.DEFINE_list(
    "decode", None, "Decode steps alone: sequences x context, such as 1x1024,16x1024."
)
_PREFILL = flags.DEFINE_list(
    "prefill", None, "Prefill steps alone: prompts x tokens, such as 1x512,1x4096."
)
_GAP = flags.DEFINE_bool("gap", False, "--decode: also what the engine adds to a step.")
_HOST_COST = flags.DEFINE_bool("host_cost", False, "The host's part of a step, without a device.")
_PLOT = file_flags.PLOT
_URL = remote_flags.URL
_ENDPOINT = flags.DEFINE_enum(
    "endpoint", "/v1/completions", ["/v1/completions", "/v1/chat/completions"], "--url: its path."
)
_DATASET = flags.DEFINE_enum(
    "dataset",
    "random",
    ["random", "sharegpt", "custom", "prefix_repetition"],
    "--url: prompts that are drawn, or those of --dataset_path; prefix_repetition: each begins "
    "with one of --prefixes (10) of --prefix_tokens (256).",
)
_DATASET_PATH = flags.DEFINE_string(
    "dataset_path", None, "--url: ShareGPT's JSON, or JSONL with a prompt a line (custom)."
)
_AS_TEXT = flags.DEFINE_bool(
    "as_text", False, "--url: random words, for servers that take no token ids; chats have no ids."
)
_VOCAB_SIZE = flags.DEFINE_integer("vocab_size", 32000, "--url: random token ids are below it.")
_GOODPUT = flags.DEFINE_string(
    "goodput", None, "--url: milliseconds that a good answer keeps: ttft:500,tpot:50,e2el:5000."
)
_shared = (common, file_flags, json_lines_flag, deployment_flags, workload_flags, remote_flags)
for _module in _shared:
    flags.adopt_module_key_flags(_module)


def main(_: Sequence[str]) -> None:
    every: tuple[flags.FlagHolder[object], ...] = (
        _ABLATION, _INTERFERENCE, _HOST_COST, _DECODE, _PREFILL, _URL,
    )  # fmt: skip
    modes = [f"--{flag.name}" for flag in every if flag.value not in (False, None)]
    if len(modes) > 1:
        raise InputError(f"give one of {', '.join(modes)}")
    usual = bench_modes.OF_KIND[workload_flags.named_kind()]
    common.check_flags(modes[0] if modes else usual, bench_modes.READ)
    if _REPEATS.value < 1:
        raise InputError(f"--repeats is at least 1, not {_REPEATS.value}")
    file_flags.check_plot()
    if _URL.value is not None:
        _run_url()
    elif _ABLATION.value:
        from scripts.modes import bench_ablation

        bench_ablation.run(_REPEATS.value, _ABLATION_ONLY, _PLOT.value)
    elif _INTERFERENCE.value or _HOST_COST.value:
        from scripts.modes import bench_probes

        if _HOST_COST.value:
            bench_probes.host_cost()
        else:
            bench_probes.interference(_RUNNING.value, _LONG_TOKENS.value, _REPEATS.value)
    elif _DECODE.value is not None:
        from scripts.modes import bench_steps

        bench_steps.decode(_DECODE.value, _open, _REPEATS.value, _GAP.value)
    elif _PREFILL.value is not None:
        from scripts.modes import bench_steps

        bench_steps.prefill(_PREFILL.value, _open, _REPEATS.value)
    else:
        _run_engine()


def _run_engine() -> None:
    from scripts.modes import bench_engine

    options = bench_engine.Options(START, _open, _RANDOM_WEIGHTS.value, _REPEATS.value, _PLOT.value)
    kind = workload_flags.named_kind()
    if kind == "agents":
        concurrency = shared_flags.whole_number(_CONCURRENCY) if _CONCURRENCY.present else 8
        bench_engine.run_load(options, concurrency)
        return
    if kind != "closed":
        bench_engine.run_load(options)
        return
    sizes = shared_flags.whole_numbers(_CONCURRENCY)
    bench_engine.run_closed(sizes, _PREFILL_TOKENS.value, _BESIDE.value, options)


def _run_url() -> None:
    from scripts.modes import bench_url

    concurrency = shared_flags.whole_number(_CONCURRENCY) if _CONCURRENCY.present else None
    model = flags.FLAGS["model"]
    assert _URL.value is not None
    options = bench_url.BenchOptions(
        _URL.value, model.value if model.present else None, _ENDPOINT.value, _DATASET.value,
        _DATASET_PATH.value, _AS_TEXT.value, _VOCAB_SIZE.value, concurrency, _GOODPUT.value,
    )  # fmt: skip
    bench_url.run(options)


def _open(resolved: "Resolved") -> "Checkpoint | None":
    return None if _RANDOM_WEIGHTS.value else common.open_checkpoint(resolved)


if __name__ == "__main__":
    common.run(main)
