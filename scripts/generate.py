"""Continues prompts: python -m scripts.generate --prompt="Once upon a time"."""

from scripts import interrupts

# isort: split
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from configs.engine import Config
from configs.errors import InputError, reason
from inference.files import resumable_results, user_files
from inference.files.resumable_results import ResumableResults
from inference.outputs import RequestOutput
from inference.request import SamplingParams
from inference.text import prompts
from inference.text.prompts import Prompt
from scripts import common
from scripts.flags import adapter_flags, chat_flag, host_flags, output_flag, sampling_flags
from scripts.flags.requests import input_flags
from scripts.reports import costs
from scripts.reports.batch_progress import BatchProgress

if TYPE_CHECKING:
    from inference.engine import Engine
    from inference.outputs import Completion
    from inference.text.tokenizer import Tokenizer

_PROMPT = flags.DEFINE_multi_string("prompt", [], "Text to continue (repeatable).")
_INPUT = input_flags.INPUT
_OUTPUT = output_flag.OUTPUT
_OVERWRITE = input_flags.OVERWRITE
_CHAT = chat_flag.CHAT
_NAIVE = flags.DEFINE_bool("naive", False, "Decode without a cache: slow, and an oracle.")
_JSON_SCHEMA = flags.DEFINE_string(
    "json_schema", None, "File with a JSON schema that every answer follows."
)
_LOGPROBS = flags.DEFINE_integer("logprobs", None, "Report log-probabilities and K alternatives.")
for _module in (
    common, adapter_flags, chat_flag, host_flags, output_flag, input_flags, sampling_flags,
):  # fmt: skip
    flags.adopt_module_key_flags(_module)

_MAX_SCHEMA_BYTES = 1 << 20

Results = dict[str, dict[str, Any]]  # by key of the request


def main(_: Sequence[str]) -> None:
    requests = _read_requests()
    if any(request.messages for request in requests):
        from inference.text import chat_template

        chat_template.prepare()  # its process starts while this one imports JAX
    target = None
    if _OUTPUT.value is not None and host_flags.place().index == 0:
        label = f"--output={_OUTPUT.value}"
        target = resumable_results.check_target(label, _OUTPUT.value, _INPUT.value)
        if not _OVERWRITE.value:
            resumable_results.check_unfinished(label, target)
    resolved, config = common.resolve_config(
        {"max_seqs": _num_slots(requests)}, _engine_needs(requests)
    )
    if _NAIVE.value:
        common.check_one_chip(config, "--naive")
    adapters = adapter_flags.directories()
    config = adapter_flags.with_room(config, adapters)
    checkpoint = common.open_checkpoint(resolved)
    tokenizer = checkpoint.load_tokenizer()
    ids = [request.encode(tokenizer, config.max_context) for request in requests]
    _check(requests, ids, config, tokenizer, checkpoint.eos_ids)
    keys = resumable_results.keys(
        [request.id, tokens, dataclasses.asdict(request.params)]
        for request, tokens in zip(requests, ids, strict=True)
    )
    with _resumable(target, config, checkpoint.eos_ids, keys) as saved:
        results: Results = {} if saved is None else saved.results
        is_one = len(requests) == requests[0].params.num_running == 1
        streams = is_one and not (common.JSON.value or target)
        took: tuple[Any, ...] | None = None
        stats, line = costs.nothing(), f"all {len(results)} results had been computed before"
        if _NAIVE.value:
            engine = common.load_engine(checkpoint, config)
            answers, stats, line = _run_naive(engine, ids, requests[0].params)
            results = dict(zip(keys, answers, strict=True))
        elif len(results) < len(requests):
            todo = [index for index, key in enumerate(keys) if key not in results]
            lengths = [len(ids[index]) for index in todo]
            params = [requests[index].params for index in todo]
            num_seqs = sum(p.num_running for p in params)
            is_greedy = all(p.is_greedy for p in params)
            engine = common.load_engine(checkpoint, config, lengths, num_seqs, is_greedy)
            adapter_flags.load(engine.adapters, adapters)
            add = results.__setitem__ if saved is None else saved.add
            took = _run(
                engine,
                [requests[index] for index in todo],
                [ids[index] for index in todo],
                lambda index, result: add(keys[todo[index]], result),
                streams,
            )
        ordered = [results[key] for key in keys]
        if target:
            resumable_results.write(target, ordered, config)
    if streams:
        print(flush=True)
    elif not (common.JSON.value or target):
        for result in ordered:
            for choice in result.get("choices", [result]):
                print(choice["text"], end="\n\n", flush=True)
    if took is not None:
        stats = _stats(took)
        line = costs.summary(stats)
    if common.JSON.value:
        common.print_json({"results": ordered, "stats": stats}, config)
    else:
        common.say(line)
    failed = [str(n) for n, r in enumerate(ordered, 1) if r["finish_reason"] == "error"]
    if failed:
        why = "a grammar failed, or " if any(request.params.grammar for request in requests) else ""
        common.fail(f"{why}the model gave non-finite logits for prompt {', '.join(failed)}")


def _read_requests() -> list[Prompt]:
    """Every prompt, checked before any work; under --chat a prompt is a user's message."""
    if _OVERWRITE.value and _OUTPUT.value is None:
        raise InputError("--overwrite starts an --output over: give that as well")
    params = dataclasses.replace(sampling_flags.read(), adapter=adapter_flags.name())
    if _JSON_SCHEMA.value is not None:
        params = dataclasses.replace(params, grammar=_read_schema(_JSON_SCHEMA.value))
    if _LOGPROBS.value is not None and not 0 <= _LOGPROBS.value <= 20:
        raise InputError(f"--logprobs is between 0 and 20, not {_LOGPROBS.value}")
    if bool(_PROMPT.value) == bool(_INPUT.value):
        raise InputError("give either --prompt or --input")
    if _INPUT.value is None:
        requests = prompts.from_texts(_PROMPT.value, params)
    else:
        requests = prompts.from_file(_INPUT.value, params)
    if _NAIVE.value and (
        _OUTPUT.value or _LOGPROBS.value or params.adapter or params.stop or params.needs_counts
        or params.num_running > 1 or params.prompt_budget is not None or params.grammar
        or any(request.params != params for request in requests)
    ):  # fmt: skip
        raise InputError(
            "--naive takes no --output, --adapter, --stop, penalties, alternatives (--logprobs=0), "
            "several answers, --prompt_budget, --json_schema or sampling of a line"
        )
    if _CHAT.value:
        requests = [prompts.as_message(request) for request in requests]
    if sampling_flags.TEMPLATE.value is None:
        return requests
    if not all(request.messages for request in requests):
        raise InputError("--template is for messages: give --chat, or messages instead of prompts")
    return [prompts.with_template(request, sampling_flags.TEMPLATE.value) for request in requests]


def _read_schema(name: str) -> str:
    from inference.text import grammar

    if not grammar.is_available():
        raise InputError("--json_schema needs llguidance: pip install '.[serve]'")
    try:
        schema = json.loads(user_files.read_text(name, _MAX_SCHEMA_BYTES))
    except (ValueError, RecursionError) as error:  # InputError is a ValueError
        raise InputError(f"--json_schema={name}: {reason(error)}") from None
    if not isinstance(schema, dict):
        raise InputError(f"--json_schema={name} holds no JSON object")
    try:
        text = grammar.of_json_schema(schema)
    except InputError as error:
        raise InputError(f"--json_schema={name}: {error}") from None
    if relaxed := grammar.relaxed(text):
        common.say(f"--json_schema={name}: answers may not obey {', '.join(relaxed)}")
    return text


def _num_slots(requests: Sequence[Prompt]) -> int:
    """Sequences of an engine that is no larger than the work."""
    num_running = [request.params.num_running for request in requests]
    return max(min(sum(num_running), 32), *num_running)


def _engine_needs(requests: Sequence[Prompt]) -> dict[str, int]:
    needs = sampling_flags.engine_needs(request.params for request in requests)
    num_alternatives = max(_LOGPROBS.value or 0, needs.get("top_logprobs", 0))
    return needs | ({"top_logprobs": num_alternatives} if num_alternatives else {})


def _check(
    requests: Sequence[Prompt],
    ids: Sequence[list[int]],
    config: Config,
    tokenizer: "Tokenizer | None",
    eos_ids: Sequence[int],
) -> None:
    """Refuses before weights are read what the engine would refuse later."""
    from inference.input_processor import InputProcessor

    processor, limit = InputProcessor(config, tokenizer, frozenset(eos_ids)), config.max_context
    adapter_flags.load(processor.adapters, adapter_flags.directories())
    for request, prompt in zip(requests, ids, strict=True):
        if len(prompt) >= limit:
            raise InputError(
                f"{request.where} has {len(prompt)} tokens; the context of {limit} holds at most "
                f"{limit - 1} and one to generate"
            )
        try:
            processor.sequences(prompt, request.params)
        except InputError as error:
            raise InputError(f"{request.where}: {error}") from None


@contextmanager
def _resumable(
    target: Path | None, config: Config, eos_ids: Sequence[int], keys: Sequence[str]
) -> Iterator[ResumableResults | None]:
    """The results that an earlier run has left and this one adds to, until all are there."""
    if target is None:
        yield None
        return
    from inference.checkpoints import provenance

    engine = config.engine  # only what can change an answer
    decisive: list[object] = [
        config.max_context,
        engine.deterministic,
        engine.seed,
        _LOGPROBS.value,
    ]
    if engine.requests.prompt_budgets:  # whole pages are given up
        decisive.append(config.page_tokens)
    if (adapter := adapter_flags.read(config.model)) is not None:
        decisive.append(adapter.digest)
    identity = {
        "weights": resumable_results.digest([provenance.identity(common.model_name()), eos_ids]),
        "configuration": resumable_results.digest([dataclasses.asdict(config.model), *decisive]),
    }
    with ResumableResults(target, identity, keys, _OVERWRITE.value) as saved:
        if saved.results:
            common.say(f"{len(saved.results)} of {len(keys)} results are in {saved.path} already")
        yield saved


def _run(
    engine: "Engine",
    requests: Sequence[Prompt],
    ids: Sequence[list[int]],
    add: Callable[[int, dict[str, object]], None],
    streams: bool,
) -> tuple[object, ...]:
    """Calls `add` with each request's index and result as it ends; `streams` prints text as it
    comes. Returns the engine, tokens of prompts, and a stopwatch's figures.
    """
    params = [request.params for request in requests]
    watch, completions = costs.Stopwatch(engine), []
    with common.bars() as bar, common.compile_progress(engine) as compiling:
        say = None if streams or common.console.is_terminal else common.say
        limit = engine.config.max_context
        max_tokens = [
            sampling.n * min(sampling.max_new_tokens, limit - len(prompt))
            for prompt, sampling in zip(ids, params, strict=True)
        ]
        progress = BatchProgress(max_tokens, bar, say)

        def on_output(output: RequestOutput) -> None:
            watch.note(len(output.token_ids))
            if streams:
                compiling.set()
                print(output.text, end="", flush=True)
            else:
                progress.add_tokens(len(output.token_ids))

        for index, completion in engine.as_completed(ids, params, on_output):
            with interrupts.Deferred() as interrupt:  # a result that is there is saved
                add(index, _result(completion, requests[index]))
            if interrupt.requested:
                raise KeyboardInterrupt
            answers = (completion, *completion.others)
            progress.add_answer(index, sum(len(answer.token_ids) for answer in answers))
            completions.append(completion)
    num_prompt = sum(len(completion.prompt_token_ids) for completion in completions)
    is_one = len(requests) == 1 and params[0].num_running == 1
    return engine, num_prompt, watch.figures(is_one)


def _stats(took: tuple[Any, ...]) -> dict[str, object]:
    """Figures of `_run`; calibrates the machine for a model's first answer, now that it is out."""
    from inference.benchmark import first_start

    return costs.stats(*took, machine=first_start.calibration(took[0], say=common.say))


def _run_naive(
    engine: "Engine", ids: Sequence[list[int]], params: SamplingParams
) -> tuple[list[dict[str, object]], dict[str, float], str]:
    from scripts.modes import generate_naive

    with common.compile_progress(engine):
        results, stats = generate_naive.compare(engine, ids, params)
    if _LOGPROBS.value is None:
        results = [result | {"logprobs": None} for result in results]
    return results, stats, generate_naive.summary(stats)


def _result(completion: "Completion", request: Prompt) -> dict[str, object]:
    id, has_budget = request.id, request.params.prompt_budget is not None
    choices = [_choice(answer) for answer in (completion, *completion.others)]
    return (
        ({} if id is None else {"id": id})
        | choices[0]
        | {"prompt_tokens": len(completion.prompt_token_ids)}
        | ({"kept_prompt_tokens": completion.kept_prompt_tokens} if has_budget else {})
        | ({"choices": choices} if len(choices) > 1 else {})
    )


def _choice(answer: "Completion") -> dict[str, object]:
    has_logprobs = _LOGPROBS.value is not None
    tops = [dict(itertools.islice(top.items(), _LOGPROBS.value)) for top in answer.top_logprobs]
    return {
        "text": answer.text,
        "token_ids": answer.token_ids,
        "finish_reason": answer.finish_reason,
        "logprobs": answer.logprobs if has_logprobs else None,
        "top_logprobs": tops if has_logprobs and _LOGPROBS.value else None,
    } | ({} if answer.score is None else {"score": answer.score})


if __name__ == "__main__":
    common.run(main)
