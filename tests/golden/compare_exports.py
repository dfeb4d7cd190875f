"""How far transformers' logits of exported checkpoints are from those of their originals.

.venv-golden/bin/python tests/golden/compare_exports.py EXPORTS

EXPORTS holds directories named like those of tests/golden; one JSON object on stdout, by name.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

_HERE = pathlib.Path(__file__).parent


def main(exports: pathlib.Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    print(json.dumps({made.name: _worst(made) for made in sorted(exports.iterdir())}))


def _worst(made: pathlib.Path) -> float:
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        made, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(told.values()):
        raise SystemExit(f"{made.name}: {told}")
    expected, differences = np.load(_HERE / made.name / "expected.npz"), []
    for i in (0, 1):
        tokens = torch.tensor(expected[f"tokens_{i}"]).long()
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].numpy()
        differences.append(np.abs(logits - expected[f"logits_{i}"]).max())
    return float(max(differences))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
