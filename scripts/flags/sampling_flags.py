"""Flags of sampling that `generate` and `chat` share, one for each request field with a flag."""

from collections.abc import Iterable
from typing import Any

from absl import flags

from configs.errors import InputError
from inference.field_kinds import Number, Switch
from inference.request import FIELDS, MAX_STOP_IDS, Field, SamplingParams
from scripts.flags import deployment_flags, seed_flag

flags.adopt_module_key_flags(seed_flag)
flags.adopt_module_key_flags(deployment_flags)
_DETERMINISTIC = flags.DEFINE_bool(
    "deterministic", False, "A request's bits do not depend on other requests in its steps."
)
TEMPLATE = flags.DEFINE_string(
    "template",
    None,
    "Name of the chat template; default: the one that the checkpoint has for the conversation.",
)


def _define(name: str, field: Field) -> flags.FlagHolder[Any]:
    match field.kind:
        case Switch():
            return flags.DEFINE_bool(name, field.default, field.doc)
        case Number(type=number):
            define = flags.DEFINE_integer if number is int else flags.DEFINE_float
            return define(name, field.default, field.doc)
        case _:
            return flags.DEFINE_multi_string(name, [*field.default], field.doc)


_PARAMS = {"seed": seed_flag.SEED} | {
    name: _define(name, field) for name, field in FIELDS.items() if field.has_flag
}


def read() -> SamplingParams:
    values = {name: flag.value for name, flag in _PARAMS.items()}
    if values["max_new_tokens"] < 1:
        raise InputError(f"--max_new_tokens is at least 1, not {values['max_new_tokens']}")
    return SamplingParams(**values)


def engine_needs(requests: Iterable[SamplingParams]) -> dict[str, int]:
    """Returns the `engine` settings without which an engine rejects one of the requests."""
    requests = list(requests)
    width = max(params.beam_width for params in requests)
    needs = {
        "penalties": any(params.needs_counts for params in requests),
        "prompt_budgets": any(params.prompt_budget is not None for params in requests),
        "grammars": any(params.is_constrained for params in requests),
        "deterministic": _DETERMINISTIC.value,
        "top_logprobs": width and width + MAX_STOP_IDS,  # whichever tokens end its model's texts
    }
    return {name: value for name, value in needs.items() if value}
