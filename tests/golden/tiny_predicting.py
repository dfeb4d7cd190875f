"""Layers that predict a second token, for tiny checkpoints of families that have them, and the
logits that they compute (MTP: DeepSeek-AI 2024, arXiv 2412.19437, section 2.2).

transformers leaves these layers out, so they are put together of its modules: a model of one layer
of the checkpoint's kind, which is fed with what `eh_proj` makes of each token's embedding and of
the checkpoint's normalized last hidden state before it, and whose norm is `shared_head.norm`.
`predicting/CASE.safetensors` holds the layer without the embedding and the head, which it shares;
`CASE.npz` holds `logits` f32[T, V] at every position of the checkpoint's first prompt. Position 0,
before which there is no state, is read as zeros, as vLLM does.
"""

import pathlib
import tempfile
from collections.abc import Callable

import numpy as np
import tiny_checkpoints
import tiny_recurrent
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_cases import CASES
from tiny_families import Case

_CASES = "deepseek_v3-mha-groups-yarn", "glm4_moe-gqa-norm-bias"
_APART = (  # their layers have names and numbers of their own; the first token has no entry
    "qwen3_next-gqa-shared-experts",
    "qwen3_next-mha-listed-tied-float32",
    "qwen3_5-gqa-sections",
    "qwen3_5-mha-tied-float32",
    "qwen3_5_moe-gqa-stacked",
    "qwen3_5_moe-mqa-tied-float32",
)
_NAMES_APART = {
    "shared_head.norm.weight": "mtp.norm.weight",
    "eh_proj.weight": "mtp.fc.weight",
    "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
    "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
}
_OWN = "eh_proj", "enorm", "hnorm", "shared_head"  # what no layer of the model has


def write(root: pathlib.Path, chosen: Callable[[Case], bool] = lambda case: True) -> None:
    """Writes the layers of the chosen cases under `root`, beside their checkpoints."""
    for case in (*CASES, *tiny_recurrent.CASES):
        if case.name in (*_CASES, *_APART) and chosen(case):
            _write(case, root / case.name, root / "predicting" / case.name)


def _write(case: Case, checkpoint: pathlib.Path, target: pathlib.Path) -> None:
    target.parent.mkdir(exist_ok=True)
    layer, number = _layer(case), case.fields["num_hidden_layers"]
    stored = {f"model.layers.{number}.{name}": tensor for name, tensor in layer.items()}
    if case.name in _APART:
        stored = {_NAMES_APART.get(n, f"mtp.layers.0.{n}"): tensor for n, tensor in layer.items()}
    save_file(stored, target.with_suffix(".safetensors"), metadata={"format": "pt"})
    with np.load(checkpoint / "expected.npz") as arrays:
        tokens = torch.from_numpy(arrays["tokens_0"].astype(np.int64))[None]
    types = torch.float32, torch.float64
    logits, exact = (_logits(checkpoint, case, layer, tokens, dtype) for dtype in types)
    error = (logits - exact).abs().max().item()
    print(f"{target.name}: logits' deviation {logits.std():.2f}, float32 error {error:.1e}")
    if error > tiny_checkpoints.MAX_ROUNDING_ERROR:
        raise ValueError(f"{target.name}: float32 differs from float64 by {error}")
    np.savez_compressed(target.with_suffix(".npz"), logits=logits.numpy())


def _config_of_one(case: Case) -> transformers.PreTrainedConfig:
    config = case.config()
    config.num_hidden_layers, config.first_k_dense_replace = 1, 0
    if case.name in _APART:
        config.layer_types, config.mlp_only_layers = ["full_attention"], []
        config.decoder_sparse_step = 1
    return config


def _layer(case: Case) -> dict[str, torch.Tensor]:
    """Random tensors, by their names behind the layer's number."""
    model = transformers.AutoModelForCausalLM.from_config(_config_of_one(case))
    generator = np.random.default_rng(1000 + case.seed)
    tiny_checkpoints.randomize(model, case, generator)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        saved = load_file(pathlib.Path(folder) / "model.safetensors")
    prefix, width = "model.layers.0.", model.config.hidden_size
    layer = {n.removeprefix(prefix): t for n, t in saved.items() if n.startswith(prefix)}
    layer["shared_head.norm.weight"] = saved["model.norm.weight"]
    for name in ("enorm", "hnorm"):
        factors = _neutral(case) + 0.3 * generator.standard_normal(width)
        layer[f"{name}.weight"] = torch.from_numpy(factors)
    layer["eh_proj.weight"] = torch.from_numpy(0.2 * generator.standard_normal((width, 2 * width)))
    return {name: tensor.to(case.dtype) for name, tensor in layer.items()}


def _neutral(case: Case) -> float:
    return 0.0 if tiny_checkpoints.stores_offset(case, "norm") else 1.0


@torch.no_grad()
def _logits(
    checkpoint: pathlib.Path,
    case: Case,
    layer: dict[str, torch.Tensor],
    tokens: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What the layer says after each token."""
    whole = tiny_checkpoints.load(checkpoint, dtype)
    layer = {name: tensor.to(dtype) for name, tensor in layer.items()}
    with tempfile.TemporaryDirectory() as folder:
        tensors = {f"model.layers.0.{n}": t for n, t in layer.items() if not n.startswith(_OWN)}
        tensors |= {
            "model.embed_tokens.weight": whole.model.embed_tokens.weight,
            "model.norm.weight": layer["shared_head.norm.weight"],
            "lm_head.weight": whole.lm_head.weight.clone(),
        }
        _config_of_one(case).save_pretrained(folder)
        save_file(tensors, pathlib.Path(folder) / "model.safetensors", metadata={"format": "pt"})
        one = tiny_checkpoints.load(pathlib.Path(folder), dtype)
    states = whole.model(tokens).last_hidden_state
    read = {
        "enorm": whole.model.embed_tokens(tokens),
        "hnorm": torch.nn.functional.pad(states[:, :-1], (0, 0, 1, 0)),
    }
    if case.name in _APART:
        read = {name: x[:, 1:] for name, x in read.items()}
    else:
        read["enorm"][:, 0] = 0
    eps, width = one.config.rms_norm_eps, one.config.hidden_size
    both = [
        torch.nn.functional.rms_norm(x, (width,), 1 - _neutral(case) + layer[f"{name}.weight"], eps)
        for name, x in read.items()
    ]
    x = torch.cat(both, dim=-1) @ layer["eh_proj.weight"].T
    return one.lm_head(one.model(inputs_embeds=x).last_hidden_state)[0]
