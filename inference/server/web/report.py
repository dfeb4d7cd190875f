"""A line every few seconds of what was served, where anything was."""

import asyncio
import time
from collections.abc import Callable

from inference.server.frames import Heartbeat
from inference.server.service import Service

_RATES = (("prompt_tok_s", "prompt_tokens"), ("output_tok_s", "generated_tokens"))
_COUNTS = ("preemptions", "late_compiles")


async def report(service: Service, say: Callable[[str], None], every_s: float) -> None:
    """Says it until it is cancelled."""
    before, since = service.client.heartbeat, time.monotonic()
    while True:
        await asyncio.sleep(every_s)
        now, at = service.client.heartbeat, time.monotonic()
        if (
            now.num_running
            or now.num_waiting
            or now.counters.get("steps", 0) != before.counters.get("steps", 0)
        ):
            say(line(before, now, at - since))
        before, since = now, at


def line(before: Heartbeat, now: Heartbeat, seconds: float) -> str:
    """What happened between two heartbeats, and what is there in the end, as name=value: `step_ms`
    is the mean of steps that only decode, and `predicted_ms` what they should have taken.
    """

    def more(name: str) -> float:
        return now.counters.get(name, 0) - before.counters.get(name, 0)

    found: list[tuple[str, object]] = [
        ("running", now.num_running),
        ("waiting", now.num_waiting),
        ("cache", f"{now.cache_used:.0%}"),
    ]
    found += [(name, f"{more(counter) / seconds:.1f}") for name, counter in _RATES]
    if asked := more("prompt_tokens"):
        found.append(("cached", f"{more('cached_tokens') / asked:.0%}"))
    if drafts := more("drafts"):
        found.append(("accepted", f"{more('accepted_drafts') / drafts:.0%}"))
    if steps := more("decode_steps"):
        step_s, predicted_s = more("decode_step_seconds"), more("predicted_decode_step_seconds")
        found.append(("step_ms", f"{1000 * step_s / steps:.2f}"))
        if predicted_s:
            found.append(("predicted_ms", f"{1000 * predicted_s / steps:.2f}"))
        if now.read_bandwidth and step_s:
            share = more("decode_step_bytes") / step_s / now.read_bandwidth
            if share <= 1:  # else the bytes came from caches, which no roofline of memory bounds
                found.append(("roofline", f"{share:.0%}"))
    if now.num_running:
        found += [("waste", f"{now.page_waste:.0%}"), ("shared", f"{now.page_sharing:.0%}")]
    if now.oldest_waiting_s:
        found.append(("waited_s", f"{now.oldest_waiting_s:.1f}"))
    found += [(name, f"{more(name):g}") for name in _COUNTS if more(name)]
    return " ".join(f"{name}={value}" for name, value in found)
