"""What llama.cpp makes of a .gguf file that scripts.convert wrote, as one JSON object on stdout.

PYTHON tests/golden/read_gguf.py FILE "a text" 8

PYTHON's environment has `llama-cpp-python` (0.3.36 compiles for some ten minutes).
"""

import itertools
import json
import sys

import llama_cpp


def main(file: str, text: str, num_tokens: int) -> None:
    model = llama_cpp.Llama(file, n_ctx=512, n_threads=2, n_threads_batch=2, verbose=False)
    ids = model.tokenize(text.encode(), add_bos=True, special=True)
    greedy = list(itertools.islice(model.generate(ids, temp=0.0), num_tokens))
    print(json.dumps({"ids": ids, "greedy": greedy}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
