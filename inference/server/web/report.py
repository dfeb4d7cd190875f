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
    """What happened between two heartbeats, as name=value; an engine that is new counts from 0."""

    def more(name: str) -> float:
        count = now.counters.get(name, 0) - before.counters.get(name, 0)
        return count if count >= 0 else now.counters.get(name, 0)

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
    found += [(name, f"{more(name):g}") for name in _COUNTS if more(name)]
    return " ".join(f"{name}={value}" for name, value in found)
