"""What the tiny checkpoints are described with: families as transformers has them, and the fields
that many of them share.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCAB_SIZE = 31


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint: its config's fields and how it is stored; 'family-...' is its name.

    Attributes:
        version_4_keys: config.json is rewritten with the keys of transformers 4, which most
            published checkpoints still have.
        rewrites: keys of config.json as other writers leave them; None removes a key.
        bare: tensors are named without the base model's prefix, and masks are stored with them,
            as in the first checkpoints of GPT-2.
        published: what the writers of published files make of the tensors, where that differs.
        rewritten: turns what transformers has read into files that it does not read.
        stepwise: logits are those of decoding token by token, after a prompt of so many tokens.
        greedy: greedy continuations of ten prompts are stored too.
        beams: beam searches of three prompts are stored too.
    """

    name: str
    fields: dict
    seed: int
    dtype: torch.dtype = torch.bfloat16
    version_4_keys: bool = False
    rewrites: dict = dataclasses.field(default_factory=dict)
    bare: bool = False
    published: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None
    rewritten: Callable[[pathlib.Path], None] | None = None
    max_shard_size: str = "5GB"
    tokenizer: bool = False
    stepwise: int | None = None
    greedy: bool = False
    beams: bool = False

    @property
    def family(self) -> str:
        """The first word of its name."""
        return self.name.split("-")[0]

    def config(self) -> transformers.PreTrainedConfig:
        """As transformers takes it."""
        kind, defaults = _FAMILIES[self.family]
        return kind(**defaults | self.fields)


_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "intermediate_size": 28,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_OWN_TOKENS: dict[str, Any] = {k: v for k, v in _COMMON.items() if not k.endswith("token_id")}
# The logits of a small vocabulary leave room for layers of several kinds.
_RECURRENT = {k: v for k, v in _COMMON.items() if k.endswith("token_id")} | {"vocab_size": 29}
_HYBRID = _COMMON | {"vocab_size": 29, "intermediate_size": 28}
_LLAMA = _OWN_TOKENS | {
    "vocab_size": 131,
    "intermediate_size": 52,
    "pad_token_id": None,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def _step(**fields: Any) -> transformers.PreTrainedConfig:
    """Step 3.5's fields as the text of Step 3.7, with next to nothing that reads images."""
    eyes = {"width": 8, "layers": 1, "heads": 1, "image_size": 28, "patch_size": 14}
    return transformers.Step3p7Config(
        text_config=fields,
        vision_config=eyes,
        tie_word_embeddings=fields["tie_word_embeddings"],
    )


_FAMILIES: dict[str, tuple[Any, dict]] = {
    "llama": (transformers.LlamaConfig, _LLAMA),
    "gemma3": (transformers.Gemma3TextConfig, _OWN_TOKENS | {"sliding_window": 24}),
    "gemma4": (transformers.Gemma4TextConfig, _OWN_TOKENS | {
        "pad_token_id": None, "sliding_window": 24, "vocab_size_per_layer_input": VOCAB_SIZE,
    }),
    "gemma4_unified": (transformers.Gemma4UnifiedTextConfig, _OWN_TOKENS | {
        "pad_token_id": None, "sliding_window": 24,
    }),
    "mistral": (transformers.MistralConfig, _COMMON),
    "ministral3": (transformers.Ministral3Config, _COMMON),
    "mistral4": (transformers.Mistral4Config, _COMMON),
    "mistral_large3": (transformers.Mistral4Config, _COMMON),
    "llama4": (transformers.Llama4TextConfig, _COMMON),
    "ernie4_5": (transformers.Ernie4_5Config, _COMMON),
    "hunyuan_v1_dense": (transformers.HunYuanDenseV1Config, _COMMON),
    "seed_oss": (transformers.SeedOssConfig, _COMMON),
    "exaone4": (transformers.Exaone4Config, _COMMON),
    "apertus": (transformers.ApertusConfig, _COMMON),
    "arcee": (transformers.ArceeConfig, _COMMON),
    "olmo": (transformers.OlmoConfig, _COMMON),
    "nemotron": (transformers.NemotronConfig, _COMMON),
    "glm": (transformers.GlmConfig, _COMMON | {"eos_token_id": 2}),
    "glm4": (transformers.Glm4Config, _COMMON | {"eos_token_id": 2}),
    "gemma": (transformers.GemmaConfig, _COMMON),
    "mimo": (transformers.Qwen2Config, _COMMON),
    "helium": (transformers.HeliumConfig, _COMMON),
    "internlm2": (transformers.LlamaConfig, _COMMON),
    "internlm3": (transformers.InternLM3Config, _COMMON),
    "cohere": (transformers.CohereConfig, _COMMON),
    "cohere2": (transformers.Cohere2Config, _COMMON | {"sliding_window": 24}),
    "granite": (transformers.GraniteConfig, _COMMON),
    "qwen2": (transformers.Qwen2Config, _COMMON),
    "qwen3": (transformers.Qwen3Config, _COMMON),
    "smollm3": (transformers.SmolLM3Config, _COMMON),
    "gemma2": (transformers.Gemma2Config, _COMMON | {"sliding_window": 24}),
    "gpt_neox": (transformers.GPTNeoXConfig, _COMMON),
    "stablelm": (transformers.StableLmConfig, _COMMON),
    "starcoder2": (transformers.Starcoder2Config, _COMMON),
    "falcon": (transformers.FalconConfig, {
        k: v for k, v in _COMMON.items() if k != "intermediate_size"
    }),
    "phi": (transformers.PhiConfig, _COMMON),
    "phi3": (transformers.Phi3Config, _COMMON),
    "phimoe": (transformers.PhimoeConfig, _COMMON | {"intermediate_size": 12}),
    "olmo2": (transformers.Olmo2Config, _COMMON),
    "mixtral": (transformers.MixtralConfig, _COMMON | {"intermediate_size": 12}),
    "qwen2_moe": (transformers.Qwen2MoeConfig, _COMMON),
    "qwen3_moe": (transformers.Qwen3MoeConfig, _COMMON),
    "olmoe": (transformers.OlmoeConfig, _COMMON | {"intermediate_size": 12}),
    "deepseek_v2": (transformers.DeepseekV2Config, _COMMON),
    "deepseek_v3": (transformers.DeepseekV3Config, _COMMON),
    "deepseek_v32": (transformers.DeepseekV32Config, _COMMON),
    "deepseek_v4": (transformers.DeepseekV4Config, {
        key: value for key, value in _COMMON.items() if key != "intermediate_size"
    }),
    "glm_moe_dsa": (transformers.GlmMoeDsaConfig, _COMMON),
    "glm4_moe": (transformers.Glm4MoeConfig, _COMMON),
    "dots1": (transformers.Dots1Config, _COMMON),
    "flex_olmo": (transformers.FlexOlmoConfig, _COMMON | {"intermediate_size": 12}),
    "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, _COMMON),
    "ernie4_5_moe": (transformers.Ernie4_5_MoeConfig, _COMMON),
    "granitemoe": (transformers.GraniteMoeConfig, _COMMON | {"intermediate_size": 12}),
    "granitemoeshared": (transformers.GraniteMoeSharedConfig, _COMMON | {"intermediate_size": 12}),
    "bailing_moe_v2": (transformers.SarvamMoEConfig, _COMMON),  # the same, by another name
    "solar_open": (
        transformers.SolarOpenConfig, {k: v for k, v in _COMMON.items() if k != "intermediate_size"}
    ),
    "hunyuan_v1_moe": (transformers.HunYuanMoEV1Config, _COMMON | {"intermediate_size": 12}),
    "hy_v3": (transformers.HYV3Config, _COMMON),
    "exaone_moe": (transformers.ExaoneMoeConfig, _COMMON | {"sliding_window": 24}),
    "afmoe": (transformers.AfmoeConfig, _COMMON | {"sliding_window": 24}),
    "laguna": (transformers.LagunaConfig, _COMMON | {"sliding_window": 24}),
    "mimo_v2_flash": (transformers.MiMoV2FlashConfig, _COMMON | {"sliding_window": 24}),
    "youtu": (transformers.YoutuConfig, _COMMON),
    "axk1": (transformers.AXK1Config, _COMMON),
    "step3p5": (_step, _COMMON | {"pad_token_id": 0, "sliding_window": 24}),
    "mellum": (transformers.MellumConfig, _COMMON | {"sliding_window": 24}),
    "minimax_m2": (transformers.MiniMaxM2Config, _COMMON | {"intermediate_size": 12}),
    "gpt_oss": (
        transformers.GptOssConfig, _COMMON | {"sliding_window": 24, "intermediate_size": 12}
    ),
    "olmo3": (transformers.Olmo3Config, _COMMON | {"sliding_window": 24}),
    "gpt2": (transformers.GPT2Config, {"vocab_size": VOCAB_SIZE} | {
        key: value for key, value in _COMMON.items() if key.endswith("token_id")
    }),
    "mamba2": (transformers.Mamba2Config, _RECURRENT),
    "mamba": (transformers.MambaConfig, _RECURRENT),
    "falcon_mamba": (transformers.FalconMambaConfig, _RECURRENT),
    "jamba": (transformers.JambaConfig, _HYBRID),
    "qwen3_next": (transformers.Qwen3NextConfig, _HYBRID),
    "lfm2": (transformers.Lfm2Config, _HYBRID),
    "lfm2_moe": (transformers.Lfm2MoeConfig, _HYBRID),
    "minimax": (transformers.MiniMaxConfig, _HYBRID | {"intermediate_size": 12}),
    "bamba": (transformers.BambaConfig, _HYBRID),
    "falcon_h1": (transformers.FalconH1Config, _HYBRID),
    "granitemoehybrid": (transformers.GraniteMoeHybridConfig, _HYBRID | {"intermediate_size": 12}),
    "nemotron_h": (transformers.NemotronHConfig, _HYBRID),
    "qwen3_5": (transformers.Qwen3_5TextConfig, _HYBRID),
    "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, {
        key: value for key, value in _HYBRID.items() if key != "intermediate_size"
    }),
    "olmo_hybrid": (transformers.OlmoHybridConfig, _HYBRID),
    "kimi_linear": (transformers.KimiLinearConfig, _HYBRID),
}  # fmt: skip

# Which no class of `auto` names; Step 3.5 is the text of a model that reads images.
transformers.AutoModelForCausalLM.register(
    transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True
)
transformers.AutoModelForCausalLM.register(
    transformers.Step3p7Config, transformers.Step3p7ForConditionalGeneration, exist_ok=True
)

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


def widths(
    width: int, num_layers: int, heads: int, kv_heads: int, head_width: int | None = None
) -> dict:
    """`head_width` where the family has one that is not width / heads."""
    return {
        "hidden_size": width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    } | ({} if head_width is None else {"head_dim": head_width})


def layers(pattern: str) -> list[str]:
    """'ssf' names two sliding layers, then a full one."""
    return [{"s": "sliding_attention", "f": "full_attention"}[letter] for letter in pattern]


def rope(kind: str, theta: float = 10000.0, **more: Any) -> dict:
    """Rotary positions of one kind in all layers."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta} | more}
