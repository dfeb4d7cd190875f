"""Continues prompts: python -m scripts.generate --prompt="Once upon a time"."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from absl import flags

from configs.engine import Config
from configs.errors import InputError
from inference.request import SamplingParams
from scripts import common, costs, interrupts, meter, output, partial, prompts, sampling_flags
from scripts.prompts import Prompt

_PROMPT = flags.DEFINE_multi_string("prompt", [], "Text to continue (repeatable).")
_INPUT = flags.DEFINE_string(
    "input", None, "JSONL with a 'prompt' or 'messages' a line, and sampling of its own."
)
_OUTPUT = output.FLAG
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "Start over where an earlier run of --output was cut off."
)
_CHAT = flags.DEFINE_bool("chat", False, "A prompt is a user's message: apply the chat template.")
_NAIVE = flags.DEFINE_bool("naive", False, "Decode without a cache: slow, and an oracle.")
_LOGPROBS = flags.DEFINE_integer("logprobs", None, "Report log-probabilities and K alternatives.")
flags.adopt_module_key_flags(output)
flags.adopt_module_key_flags(sampling_flags)

Results = dict[int, dict[str, Any]]


def main(argv: Sequence[str]) -> None:
    del argv
    requests = _read_requests()
    target = None if _OUTPUT.value is None else output.check(_OUTPUT.value)
    resolved, config = common.resolve_config(
        {"max_seqs": min(len(requests), 32)},  # an engine no larger than the work
        sampling_flags.engine_needs(request.params for request in requests)
        | ({"top_logprobs": _LOGPROBS.value} if _LOGPROBS.value else {}),
    )
    checkpoint, tokenizer = common.open_checkpoint(resolved)
    if tokenizer.template is None and any(request.messages for request in requests):
        raise InputError(
            "this checkpoint has no chat template: leave --chat out, and give prompts, not messages"
        )
    ids = [_encode(tokenizer, request) for request in requests]
    _check_lengths(ids, config.max_context)
    with _kept(target, config, requests, ids) as kept:
        results: Results = {} if kept is None else kept.results
        streams = len(requests) == 1 and not (common.JSON.value or target)
        stats: dict[str, Any] = {}
        if _NAIVE.value:
            engine = common.load_engine(checkpoint, config)
            results, stats, line = _run_naive(engine, ids, requests[0].params)
        elif len(results) < len(requests):
            engine = common.load_engine(checkpoint, config)
            add = results.__setitem__ if kept is None else kept.add
            stats = _run(engine, requests, ids, results, add, streams)
            line = costs.summary(stats)
        else:
            line = f"all {len(results)} results had been computed before"
        ordered = [results[index] for index in range(len(requests))]
        if target:
            output.write(target, ordered, config)
    if common.JSON.value:
        common.print_json({"results": ordered, "stats": stats}, config)
    else:
        if streams:
            print()
        elif not target:
            for result in ordered:
                print(result["text"], end="\n\n")
        common.say(line)
    failed = [str(n) for n, r in enumerate(ordered, 1) if r["finish_reason"] == "error"]
    if failed:
        common.fail(f"the model gave non-finite logits for prompt {', '.join(failed)}")


def _read_requests() -> list[Prompt]:
    """Every prompt, checked before any work; a prompt under --chat is one user message."""
    params = sampling_flags.read()
    if _LOGPROBS.value is not None and not 0 <= _LOGPROBS.value <= 20:
        raise InputError(f"--logprobs is between 0 and 20, not {_LOGPROBS.value}")
    if bool(_PROMPT.value) == bool(_INPUT.value):
        raise InputError("give either --prompt or --input")
    if _INPUT.value is None:
        requests = prompts.from_texts(_PROMPT.value, params)
    else:
        requests = prompts.from_file(_INPUT.value, params)
    if _NAIVE.value and (
        _OUTPUT.value or _LOGPROBS.value or params.stop or params.needs_counts
        or any(request.params != params for request in requests)
    ):  # fmt: skip
        raise InputError(
            "--naive takes no --output, --stop, penalties, alternatives (--logprobs=0) or sampling "
            "of a line"
        )
    return [prompts.as_message(request) for request in requests] if _CHAT.value else requests


def _encode(tokenizer: Any, request: Prompt) -> list[int]:
    try:
        return request.encode(tokenizer)
    except InputError as error:
        raise InputError(f"{request.where}: {error}") from None


def _check_lengths(ids: Sequence[list[int]], max_context: int) -> None:
    for n, prompt in enumerate(ids, 1):
        if len(prompt) >= max_context:
            raise InputError(
                f"prompt {n} has {len(prompt)} tokens; the context of {max_context} holds at most "
                f"{max_context - 1} and one to generate"
            )


@contextmanager
def _kept(
    target: Path | None, config: Config, requests: Sequence[Prompt], ids: Sequence[list[int]]
) -> Iterator[partial.Partial | None]:
    """The results that an earlier run has left and this one adds to; they go when all is done."""
    if target is None:
        yield None
        return
    model = flags.FLAGS["config"].value or flags.FLAGS["model"].value
    asked = [
        [request.id, tokens, dataclasses.asdict(request.params)]
        for request, tokens in zip(requests, ids, strict=True)
    ]
    identity = {
        "configuration": partial.digest([model, dataclasses.asdict(config), _LOGPROBS.value]),
        "requests": partial.digest(asked),
    }
    kept = partial.Partial(target, identity, _OVERWRITE.value)
    finished = False
    try:
        if kept.results:
            common.say(f"{len(kept.results)} of {len(requests)} results are in {kept.path} already")
        yield kept
        finished = True
    except KeyboardInterrupt:
        count = f"{len(kept.results)} of {len(requests)} results"
        raise InputError(
            f"interrupted: {count} are in {kept.path}; the same command goes on from there"
            if kept.results
            else "interrupted before the first result"
        ) from None
    finally:
        kept.close(finished)


def _run(
    engine: Any,
    requests: Sequence[Prompt],
    ids: Sequence[list[int]],
    done: Results,
    add: Callable[[int, dict[str, Any]], None],
    streams: bool,
) -> dict[str, Any]:
    """Computes and adds what is not done; returns stats. With `streams`, text goes to stdout as it
    comes.
    """
    todo = [index for index in range(len(requests)) if index not in done]
    params = [requests[index].params for index in todo]
    start, compiled_before = time.perf_counter(), engine.compile_s
    first_token_s, completions = 0.0, []
    with common.bars() as bar, interrupts.Deferred() as interrupt:
        say = None if streams or common.console.is_terminal else common.say
        counted = meter.Meter(_most_tokens(engine, ids, todo, params), bar, say)

        def on_update(update: Any) -> None:
            nonlocal first_token_s
            if interrupt.asked:
                raise KeyboardInterrupt
            if update.token_ids:
                first_token_s = first_token_s or time.perf_counter() - start
            if streams:
                print(update.text, end="", flush=True)
            else:
                counted.add_tokens(len(update.token_ids))

        given = [ids[index] for index in todo]
        for position, completion in engine.as_completed(given, params, on_update):
            add(todo[position], _result(completion, requests[todo[position]].id))
            counted.add_answer(position, len(completion.token_ids))
            completions.append(completion)
    seconds, compile_s = time.perf_counter() - start, engine.compile_s - compiled_before
    num_prompt = sum(len(completion.prompt_token_ids) for completion in completions)
    num_output = sum(len(completion.token_ids) for completion in completions)
    return costs.stats(engine, num_prompt, num_output, first_token_s, seconds, compile_s)


def _most_tokens(
    engine: Any, ids: Sequence[list[int]], todo: Sequence[int], params: Sequence[SamplingParams]
) -> list[int]:
    limit = engine.config.max_context
    pairs = zip(todo, params, strict=True)
    return [min(own.max_new_tokens, limit - len(ids[index])) for index, own in pairs]


def _run_naive(
    engine: Any, ids: Sequence[list[int]], params: SamplingParams
) -> tuple[Results, dict[str, Any], str]:
    from scripts import uncached

    results, stats = uncached.compare(engine, ids, params)
    if _LOGPROBS.value is None:
        results = [result | {"logprobs": None} for result in results]
    return dict(enumerate(results)), stats, uncached.summary(stats)


def _result(completion: Any, id: str | int | None) -> dict[str, Any]:
    asked = _LOGPROBS.value is not None
    return ({} if id is None else {"id": id}) | {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_tokens": len(completion.prompt_token_ids),
        "finish_reason": completion.finish_reason,
        "logprobs": completion.logprobs if asked else None,
        "top_logprobs": completion.top_logprobs if asked and _LOGPROBS.value else None,
    }


if __name__ == "__main__":
    common.run(main)
