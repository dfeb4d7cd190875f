"""llama.cpp, compiled for this machine, on all its cores: VENV/bin/python llama.py FILE.gguf.

Sequences that decode together share a batch, as in its own `llama-batched-bench`. Run by
`scripts.reports.peers`, in an environment of its own (`pip install llama-cpp-python`, which
compiles); prints one JSON object.
"""

import json
import os
import random
import statistics
import sys
import time

START = time.perf_counter()
CORES = len(os.sched_getaffinity(0))

import llama_cpp  # noqa: E402
import numpy as np  # noqa: E402


@llama_cpp.llama_log_callback
def _drop(level: int, text: bytes, data: object) -> None:
    del level, text, data


class Engine:
    """A model and a cache of 32 sequences."""

    def __init__(self, path: str):
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_drop, None)
        self._model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = 32 * 128, 2048, 512
        params.n_seq_max, params.kv_unified = 32, True
        params.n_threads = params.n_threads_batch = CORES
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._batch = llama_cpp.llama_batch_init(2048, 0, 1)

    def seconds(self, count: int, length: int, new: int) -> float:
        """Times `count` prompts of random ids with `new` greedy tokens after each."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        drawn = [[random.randint(100, 40000) for _ in range(length)] for _ in range(count)]
        start = time.perf_counter()
        following = self._step(drawn, 0)
        for place in range(length, length + new - 1):
            following = self._step([[token] for token in following], place)
        return time.perf_counter() - start

    def _step(self, tokens: list[list[int]], first: int) -> list[int]:
        """Returns the greedy token after each sequence's tokens, the first of them at `first`."""
        batch, count = self._batch, 0
        lasts = []
        for sequence, ids in enumerate(tokens):
            for place, token in enumerate(ids, first):
                batch.token[count], batch.pos[count] = token, place
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, sequence
                batch.logits[count] = place == first + len(ids) - 1
                count += 1
            lasts.append(count - 1)
        batch.n_tokens = count
        if llama_cpp.llama_decode(self._context, batch):
            sys.exit("llama_decode failed")
        logits = (llama_cpp.llama_get_logits_ith(self._context, last) for last in lasts)
        return [int(np.ctypeslib.as_array(row, (self._vocab_size,)).argmax()) for row in logits]


def main() -> None:
    """Measures the work of `scripts.reports.peers`."""
    engine = Engine(sys.argv[1])
    engine.seconds(1, 64, 1)
    version = f"llama-cpp-python {llama_cpp.__version__}, {CORES} threads"
    figures = {"settings": version, "first_token_s": time.perf_counter() - START}
    for count in (1, 8, 32):
        engine.seconds(count, 64, 4)
        figures[f"output_tok_s_{count}"] = count * 48 / engine.seconds(count, 64, 48)
    figures["prefill_tok_s"] = 2000 / statistics.median(engine.seconds(4, 500, 1) for _ in range(3))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
