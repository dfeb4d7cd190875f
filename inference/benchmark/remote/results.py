"""Figures of a server that was measured, under the names that `vllm bench serve` gives them."""

import collections
import dataclasses
import datetime
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from configs.errors import InputError
from inference.benchmark.remote.load import Sent
from inference.benchmark.remote.stream import Stream

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT = ("ttft", "tpot", "e2el")
_PERCENTS = (50, 90, 99)


@dataclasses.dataclass(frozen=True)
class Goodput:
    """What a good answer keeps, in milliseconds by name: `ttft`, `tpot`, `e2el`."""

    most_ms: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> "Goodput":
        """Of 'ttft:500,tpot:50'.

        Raises:
            InputError: it is not like that.
        """
        limits: dict[str, float] = {}
        for part in text.replace(" ", ",").split(","):
            name, _, value = part.partition(":")
            try:
                limit = float(value)
            except ValueError:
                limit = math.nan
            if name not in GOODPUT or name in limits or not 0 < limit < math.inf:
                raise InputError(
                    "--goodput is milliseconds for some of ttft, tpot and e2el, such as "
                    f"ttft:500,tpot:50, not {text[:80]!r}"
                )
            limits[name] = limit
        return cls(limits)

    def is_met(self, stream: Stream) -> bool:
        """Whether an answer kept all."""
        measured = {"ttft": stream.ttft_s, "tpot": stream.tpot_s or 0.0, "e2el": stream.e2e_s}
        return all(1e3 * measured[name] <= limit for name, limit in self.most_ms.items())


def figures(sent: Sent, goodput: Goodput | None = None) -> dict[str, object]:
    """Every figure; times in milliseconds where the name says so, else in seconds."""
    answered = [stream for stream in sent.streams if stream.is_ok]
    per_request = _per_request(sent)
    input_lens = zip(per_request["input_lens"], sent.streams, strict=True)
    num_input = sum(length for length, stream in input_lens if stream.is_ok)
    num_output = sum(stream.num_tokens for stream in answered)
    num_events = sum(len(stream.event_s) for stream in sent.streams)
    seconds = max(sent.seconds, 1e-9)
    good = None if goodput is None else sum(map(goodput.is_met, answered)) / seconds
    return {
        "duration": sent.seconds,
        "completed": len(answered),
        "failed": len(sent.streams) - len(answered),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(answered) / seconds,
        "request_goodput": good,
        "output_throughput": num_output / seconds,
        "total_token_throughput": (num_input + num_output) / seconds,
        **per_request,
        **_peaks(answered),
        "rtfx": 0.0,  # of audio
        **_latencies(answered),
        "failures": failures(sent.streams),
        "cached_tokens": sum(stream.num_cached_tokens for stream in answered),
        "client_cpu_us_per_event": 1e6 * sent.client_cpu_s / max(1, num_events),
    }


def requested(model: str, endpoint: str, num_requests: int, rate: float | None) -> dict[str, Any]:
    """What was measured, under vLLM's names."""
    kind = "openai-chat" if "chat" in endpoint else "openai"
    return {
        "date": datetime.datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": kind,
        "backend": kind,
        "label": None,
        "model_id": model,
        "tokenizer_id": None,
        "num_prompts": num_requests,
        "request_rate": "inf" if rate is None else rate,
    }


def failures(streams: Sequence[Stream]) -> dict[str, int]:
    """Why requests failed, the most frequent reason first."""
    counted = collections.Counter(stream.error for stream in streams if stream.error)
    return dict(counted.most_common())


def _per_request(sent: Sent) -> dict[str, list]:
    """One value a request."""
    streams, start = sent.streams, sent.streams[0].start_s
    return {
        "input_lens": [
            request.num_prompt_tokens
            if stream.num_prompt_tokens is None
            else stream.num_prompt_tokens
            for request, stream in zip(sent.requests, streams, strict=True)
        ],
        "output_lens": [stream.num_tokens if stream.is_ok else 0 for stream in streams],
        "ttfts": [stream.ttft_s if stream.event_s else 0.0 for stream in streams],
        "itls": [stream.gaps_s for stream in streams],
        "latencies": [stream.e2e_s if stream.event_s else 0.0 for stream in streams],
        "start_times": [stream.start_s - start for stream in streams],
        "queue_times": [max(0.0, stream.sent_s - stream.start_s) for stream in streams],
        "errors": [stream.error for stream in streams],
    }


def _peaks(answered: Sequence[Stream]) -> dict[str, float]:
    """The busiest second: events, and requests that were open in it."""
    if not answered:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    start = min(stream.start_s for stream in answered)
    events, open_ = collections.Counter[int](), collections.Counter[int]()
    for stream in answered:
        events.update(int(at - start) for at in stream.event_s)
        open_.update(range(int(stream.start_s - start), int(stream.event_s[-1] - start) + 1))
    return {
        "max_output_tokens_per_s": float(max(events.values())),
        "max_concurrent_requests": max(open_.values()),
    }


def _latencies(answered: Sequence[Stream]) -> dict[str, float]:
    values = {
        "ttft": [stream.ttft_s for stream in answered],
        "tpot": [stream.tpot_s for stream in answered if stream.tpot_s is not None],
        "itl": [gap for stream in answered for gap in stream.gaps_s],
        "e2el": [stream.e2e_s for stream in answered],
    }
    latencies = {}
    for name in METRICS:
        ordered = sorted(values[name]) or [0.0]
        latencies[f"mean_{name}_ms"] = 1e3 * statistics.fmean(ordered)
        latencies[f"median_{name}_ms"] = 1e3 * percentile(ordered, 50)
        latencies[f"std_{name}_ms"] = 1e3 * statistics.pstdev(ordered)
        for percent in _PERCENTS:
            latencies[f"p{percent}_{name}_ms"] = 1e3 * percentile(ordered, percent)
    return latencies


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of values in order, between two of them in proportion, as numpy has it."""
    at = percent / 100 * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
