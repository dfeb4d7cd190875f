"""Adapters of tiny checkpoints as the `peft` package writes them, and the logits with them.

`adapters/NAME/` has what `PeftModel.save_pretrained` writes, and `expected.npz`: for prompt i
`tokens_i` i32[T] and `logits_i` f32[T, V] in float32. `base` is the checkpoint beside `adapters/`.
"""

import pathlib
from typing import NamedTuple

import numpy as np
import peft
import tiny_checkpoints
import torch
import transformers

_LENGTHS = 24, 7
_FIRST_ID = 4
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


class Adapter(NamedTuple):
    """An adapter of a checkpoint."""

    base: str
    rank: int
    modules: tuple[str, ...]
    seed: int
    more: dict[str, object] = {}  # noqa: RUF012


CASES = (
    Adapter("llama-gqa-tied-rope3", 8, (*_ATTENTION, *_FEED_FORWARD), 1300),
    Adapter("gemma3-mqa", 37, (*_ATTENTION, *_FEED_FORWARD), 1301, {"use_rslora": True}),
    Adapter(
        "qwen3_moe-gqa-float32", 1, _ATTENTION, 1302,
        {"rank_pattern": {"q_proj": 5}, "alpha_pattern": {"layers.0.self_attn.v_proj": 3}},
    ),
    Adapter("qwen2_moe-gqa-window", 8, (*_ATTENTION, *_FEED_FORWARD, "shared_expert_gate"), 1303),
    Adapter(
        "deepseek_v3-mha-halves-float32", 8,
        ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"), 1304,
    ),
    Adapter("jamba-gqa-experts-bias", 8, (*_ATTENTION, "in_proj", "x_proj", "out_proj"), 1305),
    Adapter("granitemoehybrid-mqa-rope-experts", 37, (*_ATTENTION, "in_proj", "out_proj"), 1306),
    Adapter("phi3-mha-window", 1, ("qkv_proj", "gate_up_proj", "o_proj"), 1307),
    Adapter(
        "gpt2-mha-untied-inner-float32", 8, ("c_attn", "c_proj", "c_fc"), 1308,
        {"fan_in_fan_out": True},
    ),
    Adapter(
        "deepseek_v3-mha-groups-yarn", 3, ("q_b_proj", "kv_b_proj"), 1312,
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
    Adapter(
        "glm4_moe-mqa-groups-float32", 2, (), 1313, {"target_parameters": ["experts.down_proj"]}
    ),
    Adapter("deepseek_v2-mha-lite", 5, ("q_proj", "kv_b_proj", "o_proj"), 1310),
    Adapter(
        "gemma-mha-bias-untied-float32", 8, ("embed_tokens", "lm_head", "q_proj"), 1311,
        {"rank_pattern": {"lm_head": 3}},
    ),
    Adapter("gpt_neox-mha-untied", 37, ("query_key_value", "dense", "dense_h_to_4h"), 1309),
)  # fmt: skip


def write(root: pathlib.Path, goldens: pathlib.Path) -> None:
    """Writes all cases under `root`, of the checkpoints in `goldens`."""
    for case in CASES:
        directory = root / "adapters" / case.base
        _write_adapter(case, goldens / case.base, directory)
        model, exact = (
            _load(goldens / case.base, directory, dtype) for dtype in (torch.float32, torch.float64)
        )
        generator = np.random.default_rng(case.seed)
        merged = _load(goldens / case.base, directory, torch.float32).merge_and_unload()
        expected, error = dict[str, np.ndarray](), 0.0
        for i, length in enumerate(_LENGTHS):
            tokens = generator.integers(_FIRST_ID, model.config.vocab_size, length)
            logits, precise, of_merged = (_logits(each, tokens) for each in (model, exact, merged))
            error = max(error, float(np.abs(logits - precise).max()))
            error = max(error, float(np.abs(logits - of_merged).max()))  # transformers' modules may
            # read weights without the adapter, as Mamba's do of dt_proj
            expected |= {f"tokens_{i}": tokens.astype(np.int32), f"logits_{i}": logits}
        np.savez_compressed(directory / "expected.npz", **expected)
        print(f"adapters/{case.base}: float32 error {error:.1e}", flush=True)
        if error > tiny_checkpoints.MAX_ROUNDING_ERROR:
            raise ValueError(f"{case.base}: float32 differs from float64 by {error}")


def _write_adapter(case: Adapter, base: pathlib.Path, directory: pathlib.Path) -> None:
    torch.manual_seed(case.seed)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(
        r=case.rank, lora_alpha=2 * case.rank, target_modules=list(case.modules),
        init_lora_weights=False, task_type="CAUSAL_LM", **case.more,
    )  # fmt: skip
    adapted = peft.get_peft_model(model, config)
    adapted.peft_config["default"].base_model_name_or_path = case.base
    adapted.save_pretrained(directory)
    (directory / "README.md").unlink()


def _load(base: pathlib.Path, directory: pathlib.Path, dtype: torch.dtype) -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=dtype, experts_implementation="eager"
    )
    return peft.PeftModel.from_pretrained(model, directory).to(dtype).eval()


@torch.no_grad()
def _logits(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    return model(torch.tensor(tokens[None])).logits[0].numpy().astype(np.float32)
