"""Scheduling: which requests start, and what a step computes for them."""

import dataclasses
from typing import ClassVar

from configs.settings.section import Section, setting

POLICIES = ("continuous", "static", "dynamic")


@dataclasses.dataclass(frozen=True)
class SchedulingConfig(Section):
    """Admission of waiting requests, and the mix of prompts and decoding rows in a step."""

    path: ClassVar[str] = "engine.scheduling"

    policy: str = setting(
        "continuous",
        "When waiting requests start. 'continuous': as soon as a slot and pages are free. "
        "'static': when a full batch waits, which then runs to its end. 'dynamic': the same, or "
        "when the first request has waited max_wait_s.",
        one_of=POLICIES, host_only=True,
    )  # fmt: skip
    max_wait_s: float = setting(
        0.05, "Seconds that the dynamic policy waits for a full batch.", lower=0, host_only=True
    )
    chunked_prefill: bool = setting(
        True,
        "Steps compute chunks of prompts together with decoding rows. False: decoding stops until "
        "a prompt is computed.",
        host_only=True,
    )
    prefill_budget: int | None = setting(
        None,
        "Prompt tokens that a step may compute while others decode, at least chunk_tokens; None: "
        "no limit.",
        host_only=True,
    )
    max_prefill_seqs: int | None = setting(
        None, "Sequences whose prompts a step may compute; None: max_seqs.", lower=1,
        host_only=True,
    )  # fmt: skip
    max_overtakes: int = setting(
        16,
        "Later requests with longer cached prefixes that may be admitted before a request.",
        lower=0, host_only=True,
    )  # fmt: skip
    overlap: bool = setting(
        True, "The host schedules the next step while the device runs the current one.",
        host_only=True,
    )  # fmt: skip
