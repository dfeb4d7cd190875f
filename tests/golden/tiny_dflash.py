"""Tiny DFlash heads in the published layout, and the logits that their authors' code computes.

    python tests/golden/tiny_dflash.py MODEL.PY

MODEL.PY is `dflash/model.py` of github.com/z-lab/dflash at 2d3e9b2, before heads had scales, which
are applied here. `dflash/CASE/` holds the heads of a tiny
checkpoint and `expected.npz`: its first prompt, `tokens` i32[T], and `logits` f32[n, B - 1, V] of
blocks of B tokens that begin at each of `starts` i32[n], behind everything before it.
"""

import importlib.util
import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

_TARGET, _LAYERS = "llama-gqa-tied-rope3", [0, 1]
_CASES = {
    "gqa-three-layers": dict(seed=4, num_layers=3, heads=(6, 2), block=8),
    "mha-scaled-cap": dict(
        seed=5, num_layers=1, heads=(3, 3), block=5, input_embedding_scale=1.5,
        output_multiplier=0.7, final_logit_softcapping=4.0,
    ),
}  # fmt: skip
_STARTS = (1, 2, 17, 40)


@torch.no_grad()
def main(code: str) -> None:
    spec = importlib.util.spec_from_file_location("dflash_model", code)
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    root = pathlib.Path(__file__).parent
    for name, case in _CASES.items():
        _write(reference, root / _TARGET, root / "dflash" / name, **case)


def _write(
    reference, checkpoint: pathlib.Path, folder: pathlib.Path, seed: int, num_layers: int,
    heads: tuple[int, int], block: int, **scales: float,
) -> None:  # fmt: skip
    target = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    vocab, width = target.config.vocab_size, target.config.hidden_size
    config = transformers.Qwen3Config(
        hidden_size=width, intermediate_size=60, num_hidden_layers=num_layers,
        num_attention_heads=heads[0], num_key_value_heads=heads[1], head_dim=10, vocab_size=vocab,
        max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
        dflash_config={"mask_token_id": vocab - 2, "target_layer_ids": _LAYERS} | scales,
        block_size=block, num_target_layers=target.config.num_hidden_layers,
    )  # fmt: skip
    model = reference.DFlashDraftModel(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.dim() == 1
        parameter.copy_(1 + 0.3 * noise if is_norm else noise * 0.9 / parameter.shape[-1] ** 0.5)
        parameter.copy_(parameter.to(torch.bfloat16))
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: value.to(torch.bfloat16) for name, value in model.named_parameters()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    described = config.to_dict() | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    }
    text = json.dumps(described, indent=1, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    with np.load(checkpoint / "expected.npz") as arrays:
        tokens = arrays["tokens_0"]
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    states = target(ids, output_hidden_states=True).hidden_states
    features = reference.extract_context_feature(states, _LAYERS)
    logits = []
    for start in _STARTS:
        filled = torch.full((1, block), vocab - 2)
        filled[0, 0] = ids[0, start]
        embedded = torch.nn.functional.embedding(filled, target.get_input_embeddings().weight)
        hidden = model(
            position_ids=torch.arange(start + block)[None],
            noise_embedding=embedded * scales.get("input_embedding_scale", 1.0),
            target_hidden=features[:, :start],
        )  # fmt: skip
        found = target.lm_head(hidden[:, 1:])[0] * scales.get("output_multiplier", 1.0)
        if cap := scales.get("final_logit_softcapping"):
            found = torch.tanh(found / cap) * cap
        logits.append(found.numpy())
    print(f"{folder.name}: logits' deviation {np.std(logits):.2f}")
    np.savez_compressed(
        folder / "expected.npz", tokens=tokens, starts=np.array(_STARTS, np.int32),
        logits=np.array(logits),
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
