"""Reports the work of the last seconds in a line of the log."""

import asyncio
import time
from collections.abc import Callable

from inference.server.frames import Heartbeat
from inference.server.service import Service

_RATES = (("prompt_tok_s", "prompt_tokens"), ("output_tok_s", "generated_tokens"))
_COUNTS = ("preemptions", "late_compiles")


async def report(service: Service, say: Callable[[str], None], every_s: float) -> None:
    """Calls `say` with a line after each interval with work, until cancelled."""
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
    """Work between two heartbeats, and the state at the second, as name=value. `step_ms` is the
    mean of decoding steps, and `predicted_ms` the mean of their predictions.
    """

    def more(name: str) -> float:
        return now.counters.get(name, 0) - before.counters.get(name, 0)

    fields: list[tuple[str, object]] = [
        ("running", now.num_running),
        ("waiting", now.num_waiting),
        ("cache", f"{now.cache_used:.0%}"),
    ]
    fields += [(name, f"{more(counter) / seconds:.1f}") for name, counter in _RATES]
    if prompt_tokens := more("prompt_tokens"):
        fields.append(("cached", f"{more('cached_tokens') / prompt_tokens:.0%}"))
    if drafts := more("drafts"):
        fields.append(("accepted", f"{more('accepted_drafts') / drafts:.0%}"))
    if steps := more("decode_steps"):
        step_s, predicted_s = more("decode_step_seconds"), more("predicted_decode_step_seconds")
        fields.append(("step_ms", f"{1000 * step_s / steps:.2f}"))
        if predicted_s:
            fields.append(("predicted_ms", f"{1000 * predicted_s / steps:.2f}"))
        if now.read_bandwidth and step_s:
            share = more("decode_step_bytes") / step_s / now.read_bandwidth
            if share <= 1:  # more: the bytes came from caches, which the memory's roofline ignores
                fields.append(("roofline", f"{share:.0%}"))
    if now.num_running:
        fields += [("waste", f"{now.page_waste:.0%}"), ("shared", f"{now.page_sharing:.0%}")]
    if now.oldest_waiting_s:
        fields.append(("waited_s", f"{now.oldest_waiting_s:.1f}"))
    fields += [(name, f"{more(name):g}") for name in _COUNTS if more(name)]
    return " ".join(f"{name}={value}" for name, value in fields)
