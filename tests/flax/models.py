"""Models in small, as packages of Flax train them; `trees.json` has the paths and shapes of their
trees there, as `python -m tests.flax.packages` recorded them.
"""

import json
from pathlib import Path

from tests import fakes

TREES = Path(__file__).with_name("trees.json")
_LLAMA = fakes.llama(head_width=16)  # whose root is a power of two: MaxText's scale is exact
_QWEN2 = fakes.llama(family="qwen2", biases=("qkv",), tied=True)
_QWEN3 = fakes.llama(family="qwen3", qk_norm="head")
_GEMMA3 = fakes.gemma(tied=True)
_GEMMA2 = fakes.gemma(
    family="gemma2", qk_norm=None, num_kv_heads=3, score_cap=50.0, logit_cap=30.0, tied=True
)
MODELS = {
    "tunix-llama": _LLAMA,
    "tunix-qwen2": _QWEN2,
    "tunix-qwen3": _QWEN3,
    "tunix-gemma2": _GEMMA2,
    "tunix-gemma3": _GEMMA3,
    "gemma-gemma2": _GEMMA2,
    "gemma-gemma3": _GEMMA3,
    "maxtext-llama-scanned": _LLAMA,
    "maxtext-llama": _LLAMA,
    "maxtext-qwen2-scanned": _QWEN2,
    "maxtext-qwen3-scanned": _QWEN3,
}


def recorded() -> dict[str, dict[str, list[int]]]:
    """Shapes by path of each model's tree."""
    trees: dict[str, dict[str, list[int]]] = json.loads(TREES.read_text())
    return trees
