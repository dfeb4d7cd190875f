"""Flags of the workload that `bench` serves."""

from typing import Any

from absl import flags

from configs import workload
from configs.errors import InputError
from configs.workload import Fixed, Lengths, Workload
from inference.benchmark.metrics import SloTargets
from scripts.flags import seed_flag, shared_flags

_WORKLOAD = flags.DEFINE_string(
    "workload",
    "closed",
    "closed (--concurrency at a time), poisson (--rate), agents (sessions with tools) or a "
    "FILE.jsonl of arrivals.",
)
_REQUESTS = flags.DEFINE_integer(
    "requests", None, "How many, of agents sessions; closed: as many as run at a time."
)
_PROMPT_TOKENS = flags.DEFINE_integer("prompt_tokens", 64, "Random tokens a prompt.")
_NEW_TOKENS = shared_flags.NEW_TOKENS
_PROMPT_LENGTHS = flags.DEFINE_string(
    "prompt_lengths", None,
    "Instead of --prompt_tokens: fixed:150, uniform:10:200, lognormal:150:1.0, sharegpt-prompt.",
)  # fmt: skip
_OUTPUT_LENGTHS = flags.DEFINE_string(
    "output_lengths", None, "Instead of --new_tokens, likewise; sharegpt-output."
)
_PREFIX_TOKENS = flags.DEFINE_integer("prefix_tokens", None, "Tokens that some prompts share.")
_PREFIX_SHARE = flags.DEFINE_float("prefix_share", None, "Share of the prompts that begin so.")
_PREFIXES = flags.DEFINE_integer("prefixes", None, "Different ones of --prefix_tokens, in turn.")
_BURSTINESS = flags.DEFINE_float(
    "burstiness", None, "poisson: shape of a gamma distribution; below 1 makes bursts."
)
_TURNS = flags.DEFINE_string(
    "turns", "uniform:3:8", "agents: turns of a session, written like --prompt_lengths."
)
_RESULT_LENGTHS = flags.DEFINE_string(
    "result_lengths", "lognormal:400:1.0:2000", "agents: tokens of a tool's result, likewise."
)
_TOOL_S = flags.DEFINE_float("tool_s", 2.0, "agents: mean seconds that a tool runs.")
_SLO_TTFT_S = flags.DEFINE_float("slo_ttft_s", None, "Goodput: seconds to the first token.")
_SLO_ITL_S = flags.DEFINE_float("slo_itl_s", None, "Goodput: seconds between tokens (p99).")
for _module in (shared_flags, seed_flag):
    flags.adopt_module_key_flags(_module)

_DRAWN = (  # what a trace fixes by itself
    *(_PROMPT_TOKENS, _NEW_TOKENS, _PREFIX_TOKENS),
    *(_PROMPT_LENGTHS, _OUTPUT_LENGTHS, _PREFIX_SHARE, _PREFIXES, _BURSTINESS),
)


def named_kind() -> str:
    """Kind of the workload that `--workload` names."""
    name = _WORKLOAD.value
    return name if name in workload.KINDS else "trace"


def read(concurrency: int | None = None, kind: str | None = None, **defaults: Any) -> Workload:
    """The workload of the flags; `defaults` are fields that no flag sets. Raises InputError if a
    flag is invalid, or does not go with the kind.
    """
    seed = seed_flag.SEED.value or 0
    kind = kind or named_kind()
    if kind == "trace":
        name = _WORKLOAD.value
        if not name.endswith(".jsonl"):
            kinds = "closed, poisson, agents"
            raise InputError(f"--workload is {kinds} or a FILE.jsonl, not {name[:80]!r}")
        for flag in _DRAWN:
            if flag.present:
                raise InputError(f"a trace has its own lengths: leave --{flag.name} out")
        return Workload("trace", _REQUESTS.value, shared_flags.RATE.value, trace=name, seed=seed)
    flag_values = {
        "num_requests": _REQUESTS.value,
        "rate": shared_flags.RATE.value,
        "prompt": _lengths(_PROMPT_LENGTHS, _PROMPT_TOKENS),
        "output": _lengths(_OUTPUT_LENGTHS, _NEW_TOKENS),
        "prefix_tokens": _PREFIX_TOKENS.value,
        "prefix_share": _PREFIX_SHARE.value,
        "num_prefixes": _PREFIXES.value,
        "burstiness": _BURSTINESS.value,
    }
    if kind == "agents":
        defaults = {"tool_s": _TOOL_S.value, "prefix_tokens": 1024, **defaults}
        defaults |= {
            "turns": _parsed(_TURNS.name, _TURNS.value),
            "result": _parsed(_RESULT_LENGTHS.name, _RESULT_LENGTHS.value),
        }
    fields = {"num_requests": concurrency or 64} | defaults
    fields |= {field: value for field, value in flag_values.items() if value is not None}
    for field, flag in (("prompt", _PROMPT_TOKENS), ("output", _NEW_TOKENS)):
        fields.setdefault(field, Fixed(flag.value))
    if fields.get("prefix_tokens") and "prefix_share" not in fields:
        fields["prefix_share"] = 1.0
    return Workload(kind, concurrency=concurrency, seed=seed, **fields)


def slo() -> SloTargets:
    return SloTargets(_SLO_TTFT_S.value, _SLO_ITL_S.value)


def _lengths(
    lengths: flags.FlagHolder[str | None], tokens: flags.FlagHolder[int]
) -> Lengths | None:
    """The lengths that one of two flags gives; None where neither is given."""
    if lengths.value is None:
        return Fixed(tokens.value) if tokens.present else None
    if tokens.present:
        raise InputError(f"give either --{lengths.name} or --{tokens.name}")
    return _parsed(lengths.name, lengths.value)


def _parsed(flag: str, lengths: str) -> Lengths:
    try:
        return workload.parse_lengths(lengths)
    except InputError as error:
        raise InputError(f"--{flag}: {error}") from None
