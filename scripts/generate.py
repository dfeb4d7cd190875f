"""Continues prompts: python -m scripts.generate --prompt="Once upon a time"."""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import flags

from configs.errors import InputError
from inference.request import SamplingParams
from scripts import common, output

_PROMPT = flags.DEFINE_multi_string("prompt", [], "Text to continue (repeatable).")
_INPUT = flags.DEFINE_string("input", None, "JSONL with a 'prompt' or 'messages' a line.")
_OUTPUT = output.FLAG
flags.adopt_module_key_flags(output)
_CHAT = flags.DEFINE_bool("chat", False, "A prompt is a user's message: apply the chat template.")
_NAIVE = flags.DEFINE_bool("naive", False, "Decode without a cache: slow, and an oracle.")
_LOGPROBS = flags.DEFINE_integer("logprobs", None, "Report log-probabilities and K alternatives.")
_DETERMINISTIC = flags.DEFINE_bool(
    "deterministic", False, "A request's bits do not depend on the requests beside it."
)
_STOP = flags.DEFINE_multi_string("stop", [], "Text that ends a completion (repeatable).")
_PARAMS = {
    "max_new_tokens": flags.DEFINE_integer("max_new_tokens", 128, "Tokens to generate at most."),
    "temperature": flags.DEFINE_float("temperature", 0.0, "0 is greedy."),
    "top_k": flags.DEFINE_integer("top_k", 0, "Keep the k most likely tokens; 0 keeps all."),
    "top_p": flags.DEFINE_float("top_p", 1.0, "Keep the smallest set of this mass."),
    "min_p": flags.DEFINE_float("min_p", 0.0, "Keep tokens this likely beside the best."),
    "repetition": flags.DEFINE_float("repetition", 1.0, "Penalty on prompt and output tokens."),
    "presence": flags.DEFINE_float("presence", 0.0, "Penalty on tokens of the output."),
    "frequency": flags.DEFINE_float("frequency", 0.0, "The same for each occurrence."),
    "min_tokens": flags.DEFINE_integer("min_tokens", 0, "No end before as many tokens."),
    "ignore_eos": flags.DEFINE_bool("ignore_eos", False, "Go on past the model's end token."),
    "seed": flags.DEFINE_integer("seed", None, "64-bit seed of the random stream."),
}


def main(argv: Sequence[str]) -> None:
    del argv
    params = _sampling_params()
    if _NAIVE.value and (_OUTPUT.value or _LOGPROBS.value or _STOP.value or params.needs_counts):
        raise InputError(
            "--naive takes no --output, --stop, penalties or alternatives (--logprobs=0)"
        )
    requests = _read_requests()
    target = None if _OUTPUT.value is None else output.check(_OUTPUT.value)
    resolved, config = common.resolve_config(_engine_sizes(len(requests)), _engine_needs(params))
    checkpoint, tokenizer = common.open_checkpoint(resolved)
    if tokenizer.template is None and any("messages" in request for request in requests):
        raise InputError(
            "this checkpoint has no chat template: leave --chat out, and give prompts, not messages"
        )
    prompts = [_encode(tokenizer, request) for request in requests]
    _check_lengths(prompts, config.max_context)
    engine = common.load_engine(checkpoint, config)
    if _NAIVE.value:
        from scripts import uncached

        results, stats = uncached.compare(engine, prompts, params)
        if _LOGPROBS.value is None:
            results = [result | {"logprobs": None} for result in results]
        line, streams = uncached.summary(stats), False
    else:
        streams = len(prompts) == 1 and not (common.JSON.value or target)
        results, stats = _run(engine, prompts, params, streams)
        line = _summary(stats)
    if target:
        output.write(target, results, config)
    if common.JSON.value:
        common.print_json({"results": results, "stats": stats}, config)
    else:
        if streams:
            print()
        elif not target:
            for result in results:
                print(result["text"], end="\n\n")
        common.say(line)
    failed = [str(n) for n, r in enumerate(results, 1) if r["finish_reason"] == "error"]
    if failed:
        common.fail(f"the model gave non-finite logits for prompt {', '.join(failed)}")


def _run(
    engine: Any, prompts: Sequence[list[int]], params: SamplingParams, streams: bool
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Results and stats; with `streams`, the text goes to stdout as it comes."""
    start, compiled_before = time.perf_counter(), engine.compile_s
    first_token_s, num_tokens = 0.0, 0
    with common.bars() as progress:

        def on_update(update: Any) -> None:
            nonlocal first_token_s, num_tokens
            if update.token_ids:
                first_token_s = first_token_s or time.perf_counter() - start
            num_tokens += len(update.token_ids)
            if streams:
                print(update.text, end="", flush=True)
            else:
                total = len(prompts) * params.max_new_tokens
                progress(num_tokens, total, "generating tokens")

        completions = engine.generate(prompts, params, on_update)
    seconds, compile_s = time.perf_counter() - start, engine.compile_s - compiled_before
    stats = _stats(engine, completions, first_token_s, seconds, compile_s)
    return [_result(completion) for completion in completions], stats


def _sampling_params() -> SamplingParams:
    values: dict[str, Any] = {name: flag.value for name, flag in _PARAMS.items()}
    if values["max_new_tokens"] < 1:
        raise InputError(f"--max_new_tokens is at least 1, not {values['max_new_tokens']}")
    if _LOGPROBS.value is not None and not 0 <= _LOGPROBS.value <= 20:
        raise InputError(f"--logprobs is between 0 and 20, not {_LOGPROBS.value}")
    return SamplingParams(**values, stop=tuple(_STOP.value))


def _read_requests() -> list[dict[str, Any]]:
    """Every prompt, checked before any work; a prompt under --chat is one user message."""
    if bool(_PROMPT.value) == bool(_INPUT.value):
        raise InputError("give either --prompt or --input")
    if _INPUT.value is None:
        prompts = enumerate(_PROMPT.value, 1)
        requests = [{"prompt": _check_text(f"prompt {n}", prompt)} for n, prompt in prompts]
    else:
        lines = enumerate(_read_lines(_INPUT.value), 1)
        requests = [_parse_line(n, line) for n, line in lines if line.strip()]
    if not requests:
        raise InputError(f"{_INPUT.value}: no line holds a request")
    return [
        {"messages": [{"role": "user", "content": r["prompt"]}]}
        if _CHAT.value and "prompt" in r
        else r
        for r in requests
    ]


def _check_text(where: str, text: str) -> str:
    if not text:
        raise InputError(f"{where} is empty: at least one character is needed")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # From the command line: a byte that is no UTF-8. From JSON: half of an escaped pair.
        raise InputError(
            f"{where} is not valid text: character {error.start} has no UTF-8 form"
        ) from None
    return text


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_bytes().decode("utf-8").split("\n")  # not at U+2028, as splitlines
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8: byte {error.start}") from None


def _parse_line(number: int, line: str) -> dict[str, Any]:
    where = f"{_INPUT.value} line {number}"
    try:
        request = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of 5,000 digits; deep nesting
        raise InputError(f"{where} is not JSON: {error}") from None
    wanted = 'one of {"prompt": text} and {"messages": [{"role": text, "content": text}, ...]}'
    if not isinstance(request, dict) or len({"prompt", "messages"} & set(request)) != 1:
        raise InputError(f"{where} is not {wanted}")
    if "prompt" in request:
        if not isinstance(request["prompt"], str):
            raise InputError(f"{where}: 'prompt' is a text, not {type(request['prompt']).__name__}")
        _check_text(f"{where}: 'prompt'", request["prompt"])
        return request
    if not _are_messages(request["messages"]):
        raise InputError(f"{where}: 'messages' is not {wanted}")
    for message in request["messages"]:
        for field in ("role", "content"):
            _check_text(f"{where}: {field!r}", message[field] or " ")  # may be empty
    return request


def _are_messages(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in messages
        )
    )


def _engine_sizes(num_requests: int) -> dict[str, Any]:
    """An engine no larger than the work."""
    return {"max_seqs": min(num_requests, 32)}


def _engine_needs(params: SamplingParams) -> dict[str, Any]:
    """What the requests cannot do without."""
    needs = {
        "penalties": params.needs_counts,
        "top_logprobs": _LOGPROBS.value or 0,
        "deterministic": _DETERMINISTIC.value,
    }
    return {name: value for name, value in needs.items() if value}


def _encode(tokenizer: Any, request: dict[str, Any]) -> list[int]:
    if "messages" in request:
        return tokenizer.apply_chat_template(request["messages"])
    return tokenizer.encode(request["prompt"])


def _check_lengths(prompts: Sequence[list[int]], max_context: int) -> None:
    for n, prompt in enumerate(prompts, 1):
        if len(prompt) >= max_context:
            raise InputError(
                f"prompt {n} has {len(prompt)} tokens; the context of {max_context} holds at most "
                f"{max_context - 1} and one to generate"
            )


def _result(completion: Any) -> dict[str, Any]:
    asked = _LOGPROBS.value is not None
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_tokens": len(completion.prompt_token_ids),
        "finish_reason": completion.finish_reason,
        "logprobs": completion.logprobs if asked else None,
        "top_logprobs": completion.top_logprobs if asked and _LOGPROBS.value else None,
    }


def _stats(
    engine: Any,
    completions: Sequence[Any],
    first_token_s: float,
    seconds: float,
    compile_s: float,
) -> dict[str, Any]:
    """What it took beside what it had to take: medians over steps that only decode.

    The first token is what the user waited for, compilation included; the rate is that of a program
    that is there already.
    """
    from inference.planner import calibrate, report

    machine = calibrate.this_machine()
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    return {
        "prompt_tokens": sum(len(completion.prompt_token_ids) for completion in completions),
        "output_tokens": num_tokens,
        "ttft_s": first_token_s,
        "output_tok_s": num_tokens / (seconds - compile_s),
        "compile_s": compile_s,
        **dataclasses.asdict(report.decode_steps(engine.config, engine.records, machine)),
    }


def _summary(stats: dict[str, Any]) -> str:
    line = (
        f"{stats['prompt_tokens']} prompt tokens, first token after {stats['ttft_s']:.2f} s, "
        f"{stats['output_tok_s']:.1f} tokens/s beside {stats['compile_s']:.1f} s of compiling"
    )
    if stats["measured_step_s"] is None:
        return line
    return (
        f"{line}; a step reads {stats['step_bytes'] / 1e6:.0f} MB: "
        f"predicted {1e3 * stats['predicted_step_s']:.1f} ms ({stats['predicted_by']}), "
        f"measured {1e3 * stats['measured_step_s']:.1f} ms, "
        f"{100 * stats['bandwidth_share']:.0f} % of {stats['read_bandwidth'] / 1e9:.0f} GB/s"
    )


if __name__ == "__main__":
    common.run(main)
