"""The modes of `bench`, and the flags that each of them reads."""

_EVERY = ("model", "config", "set", "cache", "json")
_LOAD = (  # requests, drawn
    *("requests", "rate", "seed", "prompt_tokens", "new_tokens", "prompt_lengths"),
    *("output_lengths", "prefix_tokens", "prefix_share", "prefixes", "burstiness"),
)
_FORMATS = ("weights", "activations")
_STEPS = (*_EVERY, *_FORMATS, "repeats", "random_weights", "json_lines")
_SERVING = (
    *(*_EVERY, *_LOAD, *_FORMATS, "mesh", "executables", "speculate"),
    *("workload", "slo_ttft_s", "slo_itl_s", "repeats", "random_weights"),
)

READ = {
    "--workload=closed": (
        *_SERVING,
        *("concurrency", "prefill_tokens", "beside", "plot", "json_lines"),
    ),
    "--workload=poisson or FILE.jsonl": (*_SERVING, "plot"),
    "--workload=agents": (
        *(name for name in _SERVING if name not in ("rate", "burstiness")),
        *("concurrency", "turns", "result_lengths", "tool_s", "plot"),
    ),
    "--ablation": (*_EVERY, *_LOAD, "ablation", "ablation_only", "repeats", "plot"),
    "--interference": (*_EVERY, *_FORMATS, "interference", "running", "long_tokens", "repeats"),
    "--host_cost": (*_EVERY, "host_cost"),
    "--decode": (*_STEPS, "decode", "gap"),
    "--prefill": (*_STEPS, "prefill"),
}
URL = "--url"
READ[URL] = (
    *("url", "api_key_file", "model", "json", "workload", "concurrency", *_LOAD),
    *("endpoint", "dataset", "dataset_path", "as_text", "vocab_size", "goodput"),
)
_CLOSED, _OPEN, _AGENTS = list(READ)[:3]
# The mode of a workload's kind.
OF_KIND = {"closed": _CLOSED, "poisson": _OPEN, "trace": _OPEN, "agents": _AGENTS}
