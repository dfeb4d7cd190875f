"""Configurations that few files have: transformers' logits of tiny checkpoints under them, and what
it takes no notice of or fails on.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from configs.errors import InputError
from configs.kinds.attention import Attention
from configs.kinds.latent import Latent
from inference.checkpoints import convert, mapped, resolve
from inference.checkpoints.hf import config_export, config_json
from inference.families import nemotron
from inference.families.shared import rope_keys
from layers import decoder
from layers.ragged import contiguous
from tests import compiling

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = json.loads((GOLDEN / "changed" / "cases.json").read_text())
NEMOTRON, GEMMA = "nemotron_h-mha-bias-float32", "gemma4-gqa-inputs-sharing"
LLAMA = "llama-mqa-float32"


def parse(checkpoint: str, **changes):
    raw = mapped.read_json(GOLDEN / checkpoint / "config.json") | changes
    return config_json.parse(raw, Path("/models") / checkpoint)


def changed(folder: Path, checkpoint: str, config: dict, tensors: dict) -> Path:
    """A copy of a tiny checkpoint with other keys and more tensors."""
    folder = Path(shutil.copytree(GOLDEN / checkpoint, folder / checkpoint))
    raw = mapped.read_json(folder / "config.json") | config
    (folder / "config.json").write_text(json.dumps(raw))
    stored = load_file(folder / "model.safetensors") | tensors
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def logits(folder: Path, checkpoint: str) -> np.ndarray:
    """Of prompt 1 at every position, in float32."""
    found = resolve.resolve(str(folder)).open(None)
    model = dataclasses.replace(found.config, dtype="float32")
    loaded = found.load_params(decoder.param_infos(model), None)
    with np.load(GOLDEN / checkpoint / "expected.npz") as arrays:
        tokens = arrays["tokens_1"]

    @compiling.jit
    def forward(own, tokens_T):
        hidden_TD, _ = decoder.forward(own, model, tokens_T, contiguous(1, len(tokens)))
        return decoder.logits(own, model, hidden_TD)

    return np.asarray(forward(loaded, tokens))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_transformers(case, tmp_path):
    checkpoint, config = CASES[case]["checkpoint"], CASES[case]["config"]
    with np.load(GOLDEN / "changed" / "logits.npz") as arrays:
        own = {key.split(":")[1]: arrays[key] for key in arrays.files if key.startswith(f"{case}:")}
    expected = own.pop("logits")
    folder = changed(tmp_path, checkpoint, config, own)
    worst = np.abs(logits(folder, checkpoint)[-len(expected) :] - expected).max()
    assert worst <= 1e-4, worst
    model = resolve.resolve(str(folder)).config
    raw = json.loads(json.dumps(config_export.of_model(model)))  # and is exported as such
    assert config_json.parse(raw, Path(model.name)).layers == model.layers


def test_the_changes_are_in_the_model():
    """None of the logits is that of the checkpoint without them, but where it says so."""
    limit = parse("olmoe-gqa-norm", clip_qkv=0.6).mixers(Attention)[0].input_limit
    assert limit == 0.6 and parse("olmoe-gqa-norm").mixers(Attention)[0].input_limit is None
    gpt2 = "gpt2-mha-untied-inner-float32"
    (plain,) = parse(gpt2).mixers(Attention)
    scaled = [layer.mixer.scale for layer in
              parse(gpt2, scale_attn_by_inverse_layer_idx=True).layers]  # fmt: skip
    assert plain.scale is None
    assert scaled == [plain.head_width**-0.5 / n for n in range(1, len(scaled) + 1)]
    assert parse(gpt2, scale_attn_weights=False).mixers(Attention)[0].scale == 1.0
    for name in ("deepseek_v2-mha-lite", "deepseek_v32-mha-yarn", "glm_moe_dsa-mha-listed",
                 "glm4_moe_lite-mha-listed"):  # fmt: skip
        assert parse(name, attention_bias=True).mixers(Latent)[0].has_bias


def test_what_transformers_takes_no_notice_of_is_said(monkeypatch):
    said = []
    for module in (rope_keys, nemotron):
        monkeypatch.setattr(
            module.logging, "log_first_n", lambda level, text, n, *a: said.append(text % a)
        )
    rope = {"rope_type": "default", "rope_theta": 1e4}
    plain = parse(LLAMA, rope_parameters=rope)
    assert parse(LLAMA, rope_parameters=rope | {"partial_rotary_factor": 1}) == plain and not said
    for own in ({"rope_parameters": rope | {"partial_rotary_factor": 0.5}},
                {"rope_parameters": rope, "partial_rotary_factor": 0.5}):  # fmt: skip
        assert parse(LLAMA, **own) == plain
        assert "partial_rotary_factor=0.5 has no effect" in said.pop()
    assert parse(NEMOTRON, attention_bias=True) == parse(NEMOTRON)
    assert said == [
        "attention_bias=true has no effect: attention of nemotron_h has no biases, in "
        "transformers, too"
    ]


FAILS = {
    "a share of scaled positions": (
        LLAMA, {"rope_parameters": {
            "rope_type": "linear", "factor": 2.0, "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        }},
        "partial_rotary_factor=0.5 with rope_type=linear is not supported: transformers scales",
    ),
    "experts that offsets do not rank": (
        "deepseek_v3-mha-groups-yarn", {"num_experts_per_tok": 4, "topk_group": 1},
        "which others are chosen is undefined",
    ),
    "tokens without inputs": (
        GEMMA, {"vocab_size_per_layer_input": 30},
        "vocab_size_per_layer_input=30 is not supported: tokens from there to vocab_size=31",
    ),
    "a limit": ("olmoe-gqa-norm", {"clip_qkv": -1}, "clip_qkv must be positive"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILS)
def test_what_transformers_fails_on_is_refused(case):
    checkpoint, changes, message = FAILS[case]
    with pytest.raises(InputError) as caught:
        parse(checkpoint, **changes)
    assert message in str(caught.value)


def test_inputs_of_layers_for_more_tokens_than_there_are(tmp_path):
    """The rows that no token has stay behind."""
    table = "model.embed_tokens_per_layer.weight"
    rows = load_file(GOLDEN / GEMMA / "model.safetensors")[table]
    more = {table: np.concatenate([rows, np.full_like(rows[:5], np.nan)])}
    folder = changed(tmp_path, GEMMA, {"vocab_size_per_layer_input": len(rows) + 5}, more)
    convert.convert(resolve.resolve(str(folder)).open(None), tmp_path / "back", "hf")
    assert mapped.read_json(tmp_path / "back" / "config.json")["vocab_size_per_layer_input"] == len(
        rows
    )
    stored = load_file(tmp_path / "back" / "model.safetensors")
    np.testing.assert_array_equal(stored[table], rows)
