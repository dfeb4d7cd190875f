"""Dense relatives of Llama among the tiny checkpoints: layouts of heads, and what each
would be without its quirk.
"""

from configs.kinds.rope import Rope
from configs.model import ModelConfig
from inference.families.shared.fields import ModelFields

LAYOUTS = dict.fromkeys(
    (
        *("hunyuan_v1_dense", "seed_oss", "exaone4", "arcee", "glm4", "glm", "gemma", "mimo"),
        *("helium", "internlm2", "internlm3", "olmo", "nemotron", "apertus"),
    ),
    ("gqa", "mha"),
)
# The checkpoints whose parts others have; pages of all are those of Llama.
OTHERS = (
    "hunyuan_v1_dense-mha-bias-tied-float32", "seed_oss-mha-out-bias-tied-float32",
    "exaone4-mha-tied-float32", "arcee-mha-bias-tied-float32", "glm4-mha-bias-tied-float32",
    "glm-mha-tied-float32", "gemma-mha-bias-untied-float32", "mimo-mha-tied-float32",
    "helium-mha-tied-float32", "internlm2-mha-tied-float32", "internlm3-mha-bias-tied-float32",
    "olmo-mha-bias-tied-float32", "nemotron-mha-bias-tied-float32",
    "apertus-mha-bias-tied-float32",
)  # fmt: skip


def _with(**changes):
    """What changes these fields of every kind that has them."""

    def changed(model: ModelConfig) -> ModelFields:
        return {"pattern": model.with_kinds(**changes).pattern}

    return changed


VISIBLE = {
    "glm4-gqa-sandwich": (_with(rope=Rope(1e5, share=0.5)), _with(rope=Rope(1e5, neighbours=True))),
    "glm-gqa-bias": (_with(rope=Rope(share=0.5)), _with(rope=Rope(neighbours=True))),
    "gemma-gqa-tied": (
        lambda model: {"norm_offset": 0.0},
        lambda model: {"embedding_scale": 1.0},
        _with(activation="silu"),
    ),
    "olmo-gqa-limit": (_with(input_limit=None),),
    "nemotron-gqa-partial": (
        lambda model: {"norm_offset": 0.0},
        _with(rope=Rope()),
        _with(activation="silu"),
    ),
    "helium-gqa-neighbors": (_with(rope=Rope(1e5)),),
    "internlm3-gqa-linear-rope": (_with(rope=Rope(1e6)),),
    "hunyuan_v1_dense-gqa-alpha": (_with(rotates_first=False), _with(rope=Rope())),
    "exaone4-gqa-window": (_with(window=None), _with(rope=Rope(1e6))),
    "apertus-gqa-rope3": (_with(activation="relu2"), _with(rope=Rope(500.0))),
    "arcee-gqa-yarn": (_with(activation="silu"), _with(rope=Rope(500.0))),
}
