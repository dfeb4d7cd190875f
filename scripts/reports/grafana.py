"""Writes docs/deploy/grafana.json, a dashboard of `/metrics`.

python -m scripts.reports.grafana
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

_TARGET = Path(__file__).resolve().parents[2] / "docs" / "deploy" / "grafana.json"
_MODEL = 'model_name="$model"'
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_WIDTH, _HEIGHT = 8, 8  # of 24 columns


class Panel(NamedTuple):
    """Curves over time.

    Attributes:
        title: what they show.
        unit: Grafana's name of it.
        about: how to read them.
        queries: PromQL by the name of the curve.
    """

    title: str
    unit: str
    about: str
    queries: dict[str, str]


def _rate(name: str, **labels: str) -> str:
    """Of a counter, summed over replicas."""
    filters = ", ".join([_MODEL, *(f'{key}="{value}"' for key, value in labels.items())])
    return f"sum(rate({name}{{{filters}}}[$__rate_interval]))"


def _by(label: str, name: str, filters: str = _MODEL) -> str:
    return f"sum by ({label}) (rate({name}{{{filters}}}[$__rate_interval]))"


def _gauge(name: str, how: str = "sum") -> str:
    return f"{how}({name}{{{_MODEL}}})"


def _quantiles(name: str) -> dict[str, str]:
    buckets = _by("le", f"{name}_bucket")
    return {f"p{q:g}": f"histogram_quantile({q / 100}, {buckets})" for q in (50, 90, 99)}


def _mean(name: str) -> str:
    return f"{_rate(f'{name}_sum')} / {_rate(f'{name}_count')}"


_DECODE = {"kind": "decode"}
_MEASURED = _rate("ridgeline:step_seconds_total", **_DECODE)
_PREDICTED = _rate("ridgeline:predicted_step_seconds_total", **_DECODE)
_STEPS = _rate("ridgeline:timed_steps_total", **_DECODE)
_BYTES = _rate("ridgeline:step_bytes_total", **_DECODE)
_DRAFTS, _ACCEPTED = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"

ROWS = {
    "Requests": (
        Panel("Tokens", "cps", "Tokens a second of all replicas.", {
            "prompts": _rate("vllm:prompt_tokens_total"),
            "prompts, from the cache": _rate("vllm:prefix_cache_hits_total"),
            "answers": _rate("vllm:generation_tokens_total"),
        }),
        Panel("Answers", "cps", "Answers a second by why they ended.", {
            "{{finished_reason}}": _by("finished_reason", "vllm:request_success_total"),
        }),
        Panel("Sequences", "short", "Those with a slot, and those that wait for one.", {
            "running": _gauge("vllm:num_requests_running"),
            "waiting: {{reason}}":
                f"sum by (reason) (vllm:num_requests_waiting_by_reason{{{_MODEL}}})",
        }),
        Panel("First token", "s", "From a request to its first token.",
              _quantiles("vllm:time_to_first_token_seconds")),
        Panel("Next token", "s", "Between two tokens of an answer.",
              _quantiles("vllm:inter_token_latency_seconds")),
        Panel("Whole answer", "s", "From a request to its end.",
              _quantiles("vllm:e2e_request_latency_seconds")),
        Panel("Where the time goes", "s", "Means of requests that ended.", {
            "queue": _mean("vllm:request_queue_time_seconds"),
            "prefill": _mean("vllm:request_prefill_time_seconds"),
            "decode": _mean("vllm:request_decode_time_seconds"),
        }),
        Panel("Longest wait", "s", "Since the oldest request came that never ran.", {
            "oldest": _gauge("ridgeline:oldest_waiting_seconds", "max"),
        }),
        Panel("Sizes", "short", "Mean tokens of requests.", {
            "prompt": _mean("vllm:request_prompt_tokens"),
            "answer": _mean("vllm:request_generation_tokens"),
            "step": _mean("vllm:iteration_tokens_total"),
        }),
    ),
    "Steps": (
        Panel("Decode step: predicted beside measured", "s",
              "Means of the same steps. No prediction: the machine is not calibrated.", {
            "measured": f"{_MEASURED} / {_STEPS}", "predicted": f"{_PREDICTED} / {_STEPS}",
        }),
        Panel("Measured over predicted", "short",
              "1: as predicted. Above: the machine is slower than it was, or shared.", {
            "ratio": f"{_MEASURED} / {_PREDICTED}",
        }),
        Panel("Share of the roofline", "percentunit",
              "Bytes that decode steps had to move a second, over those that the machine reads.", {
            "share": f"{_BYTES} / {_MEASURED} / {_gauge('ridgeline:read_bandwidth_bytes', 'avg')}",
        }),
        Panel("Time of steps", "percentunit", "Share of the time in steps of each kind.", {
            "{{kind}}": _by("kind", "ridgeline:step_seconds_total"),
            "host": _rate("ridgeline:host_seconds_total"),
        }),
        Panel("Compilations", "short", "After warm-up there should be none.", {
            "late": _gauge("ridgeline:late_compiles_total"),
        }),
        Panel("Accepted drafts", "percentunit",
              "Of the drafts that were verified, and of rounds by position.", {
            "all": f"{_rate(f'{_ACCEPTED}_total')} / "
                   f"{_rate('vllm:spec_decode_num_draft_tokens_total')}",
            "position {{position}}": f"{_by('position', f'{_ACCEPTED}_per_pos_total')} / "
                                     f"ignoring(position) group_left {_rate(f'{_DRAFTS}_total')}",
        }),
    ),
    "Pages": (
        Panel("Pages in use", "percentunit", "Of running sequences; the fullest replica.", {
            "used": _gauge("vllm:kv_cache_usage_perc", "max"),
        }),
        Panel("Waste and sharing", "percentunit",
              "Room in pages without a token; pages that sharing saves.", {
            "waste": _gauge("ridgeline:page_waste", "avg"),
            "sharing": _gauge("ridgeline:page_sharing", "avg"),
        }),
        Panel("Prefix cache", "percentunit", "Share of the tokens of prompts that were cached.", {
            "hits": f"{_rate('vllm:prefix_cache_hits_total')} / "
                    f"{_rate('vllm:prefix_cache_queries_total')}",
        }),
    ),
    "Faults": (
        Panel("Answers by status", "cps", "Of all paths.", {
            "{{status}}": _by("status", "http_requests_total", 'handler!="/metrics"'),
        }),
        Panel("Refused, left, stalled, failed", "cps", "Requests that did not get their answer.", {
            "refused: {{reason}}": _by("reason", "vllm:admission_rejections_total"),
            "left": _rate("ridgeline:client_disconnects_total"),
            "did not read": _rate("ridgeline:stream_stalls_total"),
            "failed in a stream": _rate("ridgeline:stream_errors_total"),
            "not finite": _rate("vllm:corrupted_requests_total"),
        }),
        Panel("Engines", "short", "Ready ones; restarts and preemptions in the last hour.", {
            "ready": _gauge("ridgeline:engine_ready"),
            "restarts": f"sum(increase(ridgeline:engine_restarts_total{{{_MODEL}}}[1h]))",
            "preemptions": f"sum(increase(vllm:num_preemptions_total{{{_MODEL}}}[1h]))",
        }),
    ),
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """All of it, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False,
                       "panels": [], "gridPos": {"x": 0, "y": top, "w": 24, "h": 1}})  # fmt: skip
        top += 1
        for at, panel in enumerate(row):
            down, across = divmod(at, 24 // _WIDTH)
            place = {"x": across * _WIDTH, "y": top + down * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append({"id": len(panels) + 1, "gridPos": place} | _described(panel))
        top += _HEIGHT * -(-len(row) // (24 // _WIDTH))
    models = {"name": "model", "label": "Model", "type": "query", "datasource": _SOURCE,
              "query": "label_values(vllm:num_requests_running, model_name)", "refresh": 2,
              "sort": 1}  # fmt: skip
    source = {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "ridgeline", "title": "Ridgeline", "tags": ["inference"], "schemaVersion": 39,
        "editable": True, "refresh": "10s", "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, models]}, "panels": panels,
    }  # fmt: skip


def _described(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + at), "expr": query, "legendFormat": name, "datasource": _SOURCE}
        for at, (name, query) in enumerate(panel.queries.items())
    ]
    return {
        "type": "timeseries", "title": panel.title, "description": panel.about,
        "datasource": _SOURCE, "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
    }  # fmt: skip


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    _TARGET.write_text(text(), "utf-8")
