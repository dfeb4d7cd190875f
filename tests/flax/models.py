"""Models in small, as packages of Flax train them; `trees.json` has the paths and shapes of their
trees there, as `python -m tests.flax.packages` recorded them.
"""

import dataclasses
import json
from pathlib import Path

from configs.kinds.rope import Llama3, Rope
from tests import fakes

TREES = Path(__file__).with_name("trees.json")
# Tunix's Llama 3 and Qwen 3 always rotate by this base, whatever their configuration.
_ROPE = Rope(theta=1e6)
# MaxText's scale of queries is exact where the root of the head width is a power of two.
_LLAMA = fakes.llama(head_width=16, rope=_ROPE)
_LLAMA31 = fakes.llama(head_width=16, rope=Rope(5e5, Llama3(8.0)))
_QWEN2 = fakes.llama(family="qwen2", biases=("qkv",), tied=True)
_QWEN3 = fakes.llama(family="qwen3", qk_norm="head", rope=_ROPE)
_GEMMA3 = fakes.gemma(tied=True)
_GEMMA = fakes.gemma(family="gemma", qk_norm=None, window=None, post_norms=False, tied=True,
                     rope=Rope())  # fmt: skip
_GEMMA2 = fakes.gemma(
    family="gemma2", qk_norm=None, num_kv_heads=3, score_cap=50.0, logit_cap=30.0, tied=True,
    rope=Rope(),
)  # fmt: skip
MODELS = {
    "tunix-llama": _LLAMA,
    "tunix-qwen2": _QWEN2,
    "tunix-qwen3": _QWEN3,
    "tunix-gemma": _GEMMA,
    "tunix-gemma2": _GEMMA2,
    "tunix-gemma3": dataclasses.replace(_GEMMA3, pattern=_GEMMA3.pattern[:1]),  # one global in six
    "gemma-gemma": _GEMMA,
    "gemma-gemma2": _GEMMA2,
    "gemma-gemma3": _GEMMA3,
    "maxtext-llama": _LLAMA,
    "maxtext-llama31-scanned": _LLAMA31,
    "maxtext-qwen2-scanned": _QWEN2,
    "maxtext-qwen3-scanned": _QWEN3,
}


def recorded() -> dict[str, dict[str, list[int]]]:
    """Shapes by path of each model's tree."""
    trees: dict[str, dict[str, list[int]]] = json.loads(TREES.read_text())
    return trees
