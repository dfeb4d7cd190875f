"""How to sample: flags that `generate` and `chat` share, and the same fields in a line of input."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from absl import flags

from configs.errors import InputError
from inference.request import MAX_STOP_IDS, SamplingParams
from scripts.flags import seed_flag

flags.adopt_module_key_flags(seed_flag)
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
    "seed": seed_flag.SEED,
    "n": flags.DEFINE_integer("n", 1, "Answers to each prompt."),
    "best_of": flags.DEFINE_integer("best_of", None, "Sample as many, return the n likeliest."),
    "beam_width": flags.DEFINE_integer("beam_width", 0, "Beams of a beam search; 0 samples."),
    "length_penalty": flags.DEFINE_float(
        "length_penalty", 1.0, "A hypothesis scores log-probability / tokens**length_penalty."
    ),
    "early_stopping": flags.DEFINE_bool(
        "early_stopping", False, "A beam search ends with its beam_width-th hypothesis."
    ),
}
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")
FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))


def read() -> SamplingParams:
    """What the flags ask for."""
    values: dict[str, Any] = {name: flag.value for name, flag in _PARAMS.items()}
    if values["max_new_tokens"] < 1:
        raise InputError(f"--max_new_tokens is at least 1, not {values['max_new_tokens']}")
    return SamplingParams(**values, stop=tuple(_STOP.value))


def engine_needs(each: Iterable[SamplingParams]) -> dict[str, Any]:
    """What an engine must be built with to sample so."""
    each = list(each)
    width = max(params.beam_width for params in each)
    needs = {
        "penalties": any(params.needs_counts for params in each),
        "deterministic": _DETERMINISTIC.value,
        "top_logprobs": width and width + MAX_STOP_IDS,  # whichever tokens end its model's texts
    }
    return {name: value for name, value in needs.items() if value}


def override(params: SamplingParams, values: Mapping[str, Any]) -> SamplingParams:
    """`params` with fields as JSON writes them; `values` holds no other names than `FIELDS`.

    Raises:
        InputError: a value is not valid.
    """
    read_values = {name: _READERS[name](name, value) for name, value in values.items()}
    if read_values.get("max_new_tokens", 1) < 1:
        raise InputError(f"max_new_tokens is at least 1, not {read_values['max_new_tokens']}")
    return dataclasses.replace(params, **read_values)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():  # JSON knows one kind of number
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"{name} is a whole number, not {_shown(value)}")
    return value


def _number(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InputError(f"{name} is a number, not {_shown(value)}")
    try:
        return float(value)
    except OverflowError:  # a whole number of 400 digits
        raise InputError(f"{name} is a number that a float holds, not {_shown(value)}") from None


def _switch(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} is true or false, not {_shown(value)}")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InputError(f"{name} is a text or a list of them, not {_shown(value)}")
    return tuple(texts)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InputError(f"{name} is a list of token ids, not {_shown(value)}")
    return tuple(_whole(f"each of {name}", item) for item in value)


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    wanted = f'{name} is {{"token id": number, ...}}, not {_shown(value)}'
    if not isinstance(value, dict):
        raise InputError(wanted)
    if not all(_TOKEN_ID.fullmatch(token) for token in value):
        raise InputError(wanted)
    return tuple((int(token), _number(name, bias)) for token, bias in value.items())


def _optional(reader: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else reader(name, value)


def _shown(value: Any) -> str:
    return repr(value)[:60]


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "max_new_tokens": _whole,
    "temperature": _number,
    "top_k": _whole,
    "top_p": _number,
    "min_p": _number,
    "repetition": _number,
    "presence": _number,
    "frequency": _number,
    "logit_bias": _biases,
    "allowed_ids": _optional(_ids),
    "banned_ids": _ids,
    "min_tokens": _whole,
    "stop": _texts,
    "stop_ids": _ids,
    "ignore_eos": _switch,
    "seed": _optional(_whole),
    "priority": _whole,
    "n": _whole,
    "best_of": _optional(_whole),
    "beam_width": _whole,
    "length_penalty": _number,
    "early_stopping": _switch,
}
