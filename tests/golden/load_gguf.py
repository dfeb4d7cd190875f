"""The logits that transformers computes from a .gguf file: FILE.npz with `tokens` and `logits`.

PYTHON tests/golden/load_gguf.py FILE

PYTHON's environment is that of `make golden`.
"""

import pathlib
import sys

import numpy as np
import torch
import transformers


def main(file: pathlib.Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, 40)
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None]).logits[0]
    np.savez(file.with_suffix(".npz"), tokens=tokens.astype(np.int32), logits=logits.numpy())


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
