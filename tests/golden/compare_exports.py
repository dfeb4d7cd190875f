"""How far transformers' logits of exported checkpoints are from those of their originals.

.venv-golden/bin/python tests/golden/compare_exports.py EXPORTS [FOLDER]

EXPORTS holds directories named like those of tests/golden, or of a folder in it; one JSON object on
stdout, by name. Weights of few bits are dequantized, and activations stay as they are.
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

_HERE = pathlib.Path(__file__).parent


def main(exports: pathlib.Path, originals: pathlib.Path) -> None:
    transformers.utils.logging.disable_progress_bar()
    mistral4 = transformers.Mistral4Config, transformers.Mistral4ForCausalLM
    # Which no class of `auto` names.
    transformers.AutoModelForCausalLM.register(*mistral4, exist_ok=True)
    found = {made.name: _worst(made, originals) for made in sorted(exports.iterdir())}
    print(json.dumps(found))


def _worst(made: pathlib.Path, originals: pathlib.Path) -> float:
    described = json.loads((made / "config.json").read_text()).get("quantization_config")
    options = {}
    if described is not None:
        is_one = len(described["config_groups"]) == 1  # as loading with `dequantize` assumes
        own = transformers.CompressedTensorsConfig(**described | {"dequantize": is_one})
        options = {"quantization_config": own}
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        made,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
        **options,
    )
    computed = {name for name, _ in model.named_buffers()}  # of the configuration, MiniMax's decays
    told["missing_keys"] = told["missing_keys"] - computed
    if any(told.values()):
        raise SystemExit(f"{made.name}: {told}")
    expected, differences = np.load(originals / made.name / "expected.npz"), []
    for i in (0, 1):
        tokens = torch.tensor(expected[f"tokens_{i}"]).long()
        with torch.no_grad():
            logits = model(tokens[None]).logits[0].numpy()
        differences.append(np.abs(logits - expected[f"logits_{i}"]).max())
    return float(max(differences))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), _HERE.joinpath(*sys.argv[2:]))
