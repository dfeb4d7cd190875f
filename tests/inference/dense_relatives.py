"""Dense relatives of Llama among the tiny checkpoints: what each would be without its quirk."""

from configs.kinds.rope import Rope
from configs.model import ModelConfig
from inference.families.shared.fields import ModelFields

# Each has a GQA and an MHA checkpoint, and keeps what Llama keeps.
FAMILIES = (
    *("hunyuan_v1_dense", "seed_oss", "exaone4", "arcee", "glm4", "glm", "gemma", "mimo", "helium"),
    *("internlm2", "internlm3"),
)


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
    "helium-gqa-neighbors": (_with(rope=Rope(1e5)),),
    "internlm3-gqa-linear-rope": (_with(rope=Rope(1e6)),),
    "hunyuan_v1_dense-gqa-alpha": (_with(rotates_first=False), _with(rope=Rope())),
    "exaone4-gqa-window": (_with(window=None), _with(rope=Rope(1e6))),
    "arcee-gqa-yarn": (_with(activation="silu"), _with(rope=Rope(500.0))),
}
