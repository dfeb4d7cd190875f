"""Answers a file of OpenAI's batches: python -m scripts.batch --input=FILE --output=FILE.

--url=http://127.0.0.1:8000                    by a server, whosever it is
--model=smollm2-135m                           by an engine of its own, as scripts.serve has it
"""

from scripts import interrupts  # noqa: F401

# isort: split
import json
from collections.abc import Sequence

from absl import flags

from configs.errors import InputError
from inference.files import resumable_results, user_files
from inference.files.resumable_results import ResumableResults
from scripts import common, failures
from scripts.flags import output_flag, shared_flags
from scripts.flags.requests import input_flags, remote_flags, serving_flags

_INPUT, _OUTPUT = input_flags.INPUT, output_flag.OUTPUT
_OVERWRITE = input_flags.OVERWRITE
_URL, _CONCURRENCY = remote_flags.URL, remote_flags.CONCURRENCY
for _module in (common, input_flags, output_flag, remote_flags, serving_flags):
    flags.adopt_module_key_flags(_module)

UNREAD = ("json",)
_OWN = ("input", "output", "overwrite", "concurrency")
_ENGINE = (
    *("model", "config", "set", "weights", "activations", "cache", "mesh", "speculate"),
    *("executables", "max_model_len", "max_num_seqs", "max_logprobs", "pooling", "warm_up"),
    "chat_template",
)
_APPLICATION = ("served_model_name", "tool_call_parser")
_READ = {"batch --url": (*_OWN, "url", "api_key_file"), "batch": (*_OWN, *_ENGINE, *_APPLICATION)}


def main(_: Sequence[str]) -> None:
    common.check_flags("batch" if _URL.value is None else "batch --url", _READ)
    failures.check_packages("batch", "serve", "httptools", "msgspec", "starlette", "uvloop")
    if _INPUT.value is None or _OUTPUT.value is None:
        raise InputError("give --input and --output")
    concurrency = shared_flags.whole_number(_CONCURRENCY) if _CONCURRENCY.present else None
    label = f"--output={_OUTPUT.value}"
    target = resumable_results.check_target(label, _OUTPUT.value, _INPUT.value)
    from inference.batches import lines, records
    from inference.batches.lines import Line
    from scripts.modes import batch_servers

    parsed_lines = lines.read(_INPUT.value)
    valid_lines = [line for line in parsed_lines if isinstance(line, Line)]
    ids = {line.custom_id for line in valid_lines}
    earlier = [] if _OVERWRITE.value else records.read(target)
    results = {record["custom_id"]: record for record in earlier if records.is_final(record)}
    with ResumableResults(target, {"kind": "batch"}, ids, _OVERWRITE.value) as saved:
        results |= saved.results
        todo = [
            line for line in valid_lines if not records.is_final(results.get(line.custom_id, {}))
        ]
        if num_done := len(valid_lines) - len(todo):
            common.say(f"{num_done} of {len(valid_lines)} results are there already")
        if todo:
            engine = _engine_flags() if _URL.value is None else []
            batch_servers.answer(todo, _URL.value, engine, concurrency, saved)
            results |= saved.results
        other_records = [record for name, record in results.items() if name not in ids]
        output_records = [
            results[line.custom_id] if isinstance(line, Line) else records.bad(line)
            for line in parsed_lines
        ]
        text = "".join(
            f"{json.dumps(record, ensure_ascii=False)}\n"
            for record in [*other_records, *output_records]
        )
        user_files.write({target: text.encode()})
    failed = sum(record["error"] is not None for record in output_records)
    refused = sum(
        record["error"] is None and not records.is_good(record) for record in output_records
    )
    common.say(
        f"{len(output_records) - failed - refused} answers in {_OUTPUT.value}, {refused} refused, "
        f"{failed} without an answer"
    )


def _engine_flags() -> list[str]:
    arguments = ["--nowarm_up"]  # it compiles what comes
    for name in _ENGINE:
        flag = flags.FLAGS[name]
        values = flag.value if isinstance(flag.value, list) else [flag.value]
        arguments += [f"--{name}={value}" for value in values if flag.present]
    return arguments


if __name__ == "__main__":
    common.run(main, UNREAD)
