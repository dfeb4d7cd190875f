"""Tiny EAGLE-3 heads in both published layouts, and the logits that the code of speculators
computes.

    python tests/golden/tiny_eagle3.py

needs an environment with speculators, which takes an older transformers than the other goldens.
`eagle3/CASE/` holds the heads of a tiny checkpoint and `expected.npz`: of its first prompt, i32[T],
`logits` f32[T - 1, X] behind each token but the first, given the checkpoint's own states, and
`logits_next` f32[T - 1, X] one draft later: behind the token after that, which reads the head's own
state.
"""

import json
import pathlib

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from speculators.models.eagle3 import Eagle3SpeculatorConfig
from speculators.models.eagle3.core import Eagle3DraftModel

_TARGET, _LAYERS = "llama-gqa-tied-rope3", [1, 2]
_ROWS = 24  # of the head
_CASES = {
    "speculators-qwen3": dict(
        kind="qwen3", seed=1, num_layers=1, norm_before_residual=True, norm_before_fc=True
    ),
    "sglang-llama": dict(kind="llama", seed=2, num_layers=1),
    "sglang-two-layers": dict(kind="llama", seed=3, num_layers=2, fc_norm=True, norm_output=True),
}


def main() -> None:
    root = pathlib.Path(__file__).parent
    for name, case in _CASES.items():
        _write(root / _TARGET, root / "eagle3" / name, **case)


@torch.no_grad()
def _write(
    checkpoint: pathlib.Path, folder: pathlib.Path, kind: str, seed: int, num_layers: int,
    **flags: bool,
) -> None:  # fmt: skip
    target = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    vocab, width = target.config.vocab_size, target.config.hidden_size
    layer = transformers.AutoConfig.for_model(
        kind, hidden_size=width, intermediate_size=60, num_hidden_layers=num_layers,
        num_attention_heads=6, num_key_value_heads=2, head_dim=10, vocab_size=vocab,
        max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
    )  # fmt: skip
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=_ROWS,
        eagle_aux_hidden_state_layer_ids=_LAYERS, **flags,
    )  # fmt: skip
    model = Eagle3DraftModel(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        is_norm = parameter.dim() == 1
        parameter.copy_(1 + 0.3 * noise if is_norm else noise * 0.9 / parameter.shape[-1] ** 0.5)
        parameter.copy_(parameter.to(torch.bfloat16))
    has_embedding = kind == "qwen3"
    if not has_embedding:
        model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    ids = torch.randperm(vocab, generator=generator)[:_ROWS].sort().values
    stored = {
        name: tensor.to(torch.bfloat16)
        for name, tensor in model.named_parameters()
        if not name.startswith("verifier") and (has_embedding or "embed_tokens" not in name)
    }
    stored |= {"d2t": ids - torch.arange(_ROWS), "t2d": torch.zeros(vocab, dtype=torch.bool)}
    stored["t2d"][ids] = True
    described = config.to_dict() | {"transformer_layer_config": layer.to_dict()}
    if not has_embedding:
        described = _as_sglang(layer, flags)
        stored = {name.replace("layers.0.", "midlayer."): stored[name] for name in stored}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in stored.items()},
        folder / "model.safetensors", metadata={"format": "pt"},
    )  # fmt: skip
    text = json.dumps(described, indent=1, sort_keys=True)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    with np.load(checkpoint / "expected.npz") as arrays:
        tokens = arrays["tokens_0"]
    logits = _logits(model, target, torch.from_numpy(tokens.astype(np.int64))[None])
    print(f"{folder.name}: logits' deviation {logits[0].std():.2f}")
    np.savez_compressed(
        folder / "expected.npz", tokens=tokens, logits=logits[0], logits_next=logits[1]
    )


def _as_sglang(layer: transformers.PreTrainedConfig, flags: dict[str, bool]) -> dict[str, object]:
    """There is no example of `fc_norm` in this layout; vLLM reads it there, too."""
    return layer.to_dict() | flags | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": _ROWS,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [number - 1 for number in _LAYERS],
            "use_aux_hidden_state": True,
        },
    }  # fmt: skip


def _logits(
    model: Eagle3DraftModel, target: transformers.PreTrainedModel, tokens: torch.Tensor
) -> list[np.ndarray]:
    """Of both steps of its training-time test, in which every position drafts."""
    states = target(tokens, output_hidden_states=True).hidden_states
    features = torch.cat([states[number] for number in _LAYERS], dim=-1)[:, :-1]
    collected: list[np.ndarray] = []
    hook = model.lm_head.register_forward_hook(
        lambda module, inputs, output: collected.append(output[0].numpy().copy())
    )
    model(features, tokens[:, 1:], torch.zeros_like(tokens[:, 1:]), ttt_steps=2)
    hook.remove()
    return collected


if __name__ == "__main__":
    main()
