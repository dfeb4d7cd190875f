"""How to sample: flags that `generate` and `chat` share."""

from collections.abc import Iterable
from typing import Any

from absl import flags

from configs.errors import InputError
from inference.request import MAX_STOP_IDS, SamplingParams
from scripts.flags import deployment_flags, seed_flag

flags.adopt_module_key_flags(seed_flag)
flags.adopt_module_key_flags(deployment_flags)
_DETERMINISTIC = flags.DEFINE_bool(
    "deterministic", False, "A request's bits do not depend on the requests beside it."
)
TEMPLATE = flags.DEFINE_string(
    "template",
    None,
    "Name of the chat template; default: the one that the checkpoint has for the conversation.",
)
_STOP = flags.DEFINE_multi_string("stop", [], "Text that ends a completion (repeatable).")
_PARAMS = {
    "max_new_tokens": flags.DEFINE_integer("max_new_tokens", 128, "Tokens to generate at most."),
    "temperature": flags.DEFINE_float("temperature", 0.0, "0 is greedy."),
    "top_k": flags.DEFINE_integer("top_k", 0, "Keep the k most likely tokens; 0 keeps all."),
    "top_p": flags.DEFINE_float("top_p", 1.0, "Keep the smallest set of this mass."),
    "min_p": flags.DEFINE_float("min_p", 0.0, "Keep tokens this likely beside the best."),
    "repetition": flags.DEFINE_float("repetition", 1.0, "Penalty on prompt and output tokens."),
    "presence": flags.DEFINE_float("presence", 0.0, "Penalty on each token that is in the output."),
    "frequency": flags.DEFINE_float(
        "frequency", 0.0, "Penalty on a token for each time it is in the output."
    ),
    "min_tokens": flags.DEFINE_integer("min_tokens", 0, "No end before this many tokens."),
    "ignore_eos": flags.DEFINE_bool("ignore_eos", False, "Go on past the model's end token."),
    "seed": seed_flag.SEED,
    "n": flags.DEFINE_integer("n", 1, "Answers to each prompt."),
    "best_of": flags.DEFINE_integer("best_of", None, "Sample this many, return the n likeliest."),
    "beam_width": flags.DEFINE_integer("beam_width", 0, "Beams of a beam search; 0 samples."),
    "length_penalty": flags.DEFINE_float(
        "length_penalty", 1.0, "A hypothesis scores log-probability / tokens**length_penalty."
    ),
    "early_stopping": flags.DEFINE_bool(
        "early_stopping", False, "A beam search ends with its beam_width-th hypothesis."
    ),
    "prompt_budget": flags.DEFINE_integer(
        "prompt_budget", None, "Tokens of a prompt that stay cached, chosen by attention; lossy."
    ),
}


def read() -> SamplingParams:
    """Sampling as the flags say."""
    values: dict[str, Any] = {name: flag.value for name, flag in _PARAMS.items()}
    if values["max_new_tokens"] < 1:
        raise InputError(f"--max_new_tokens is at least 1, not {values['max_new_tokens']}")
    return SamplingParams(**values, stop=tuple(_STOP.value))


def engine_needs(each: Iterable[SamplingParams]) -> dict[str, Any]:
    """Fields that an engine must be built with to sample so."""
    each = list(each)
    width = max(params.beam_width for params in each)
    needs = {
        "penalties": any(params.needs_counts for params in each),
        "prompt_budgets": any(params.prompt_budget is not None for params in each),
        "grammars": any(params.grammar is not None for params in each),
        "deterministic": _DETERMINISTIC.value,
        "top_logprobs": width and width + MAX_STOP_IDS,  # whichever tokens end its model's texts
    }
    return {name: value for name, value in needs.items() if value}
