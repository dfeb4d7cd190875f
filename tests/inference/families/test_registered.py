"""Every family is whole, and what is not is refused by name."""

import dataclasses
from pathlib import Path

import pytest

from configs import presets
from configs.errors import InputError
from configs.kinds.params import leaves
from inference.checkpoints import mapped, names
from inference.families import families, missing
from inference.families.shared.config_keys import Keys

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
LLAMA, MISTRAL = families.ALL["llama"], families.ALL["mistral"]


def models(family):
    """Of each golden checkpoint of a family."""
    configs = sorted(GOLDEN.glob(f"{family.name}-*/config.json"))
    assert configs, f"family {family.name!r} has no golden checkpoint {GOLDEN}/{family.name}-*/"
    return [family.model(Keys(mapped.read_json(path)), path.parent.name) for path in configs]


def check_names(config):
    maps = [names.huggingface(config)] + ([names.gguf(config)] if families.of(config).gguf else [])
    for path, _ in leaves(config.parameters()):
        for name_map in maps:
            name_map("/".join(path))


@pytest.mark.parametrize("name", families.ALL)
def test_a_family_has_goldens_and_names(name):
    for config in models(families.ALL[name]):
        check_names(config)


def test_a_parameter_without_a_name_is_refused(monkeypatch):
    tensors = {path: name for path, name in LLAMA.tensors.items() if path != "ffn/down"}
    monkeypatch.setitem(families.ALL, "llama", dataclasses.replace(LLAMA, tensors=tensors))
    with pytest.raises(InputError, match=r"'layers/0/ffn/down' has no counterpart"):
        check_names(models(LLAMA)[0])


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        (LLAMA, "the name 'llama' is taken by the family 'llama'"),
        (
            dataclasses.replace(MISTRAL, architecture="LlamaForCausalLM"),
            "'mistral': the architecture 'LlamaForCausalLM' is taken by the family 'llama'",
        ),
        (
            dataclasses.replace(MISTRAL, gguf=LLAMA.gguf),
            "'mistral': the architecture of llama.cpp 'llama' is taken by the family 'llama'",
        ),
    ],
)
def test_what_is_taken_is_refused(other, cause):
    with pytest.raises(InputError, match=cause):
        families.registered((LLAMA, other))


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("LlamaForCausalLm", "the nearest names: LlamaForCausalLM, "),
        ("Qwen9ForConditionalGeneration", "the nearest names: Qwen3_5ForConditionalGeneration, "),
        ("RwkvForCausalLM", "the part that it needs first is not here: the time mixing"),
        ("x", "'x' is not supported; docs/families.md lists all that are"),
        (None, "None is not supported; docs/families.md lists all that are"),
    ],
)
def test_an_architecture_that_is_not_read_is_explained(architecture, words):
    message = families.unknown(architecture)
    assert words in message and "\n" not in message


def test_an_architecture_that_is_read_lacks_no_part():
    assert not [name for name in missing.PARTS if families.of_architecture(name)]
    assert not [name for name in missing.PARTS if families.of_wrapper(name)]


def test_the_shortest_pattern_is_found_among_thousands_of_layers():
    stated = mapped.read_json(GOLDEN / "gemma2-gqa-tied" / "config.json")

    def pattern(kinds):
        changes = {"num_hidden_layers": 10_000, "layer_types": kinds, "sliding_window": 9}
        return families.ALL["gemma2"].model(Keys(stated | changes), "tiny").pattern

    kinds = (["sliding_attention"] * 2 + ["full_attention"]) * 3333 + ["sliding_attention"]
    assert [layer.mixer.window for layer in pattern(kinds)] == [9, 9, None]
    assert len(pattern(["full_attention"] * 9_999 + ["sliding_attention"])) == 10_000


def test_biases_go_by_their_matrices_names():
    found = names.huggingface(presets.get("qwen2.5-0.5b").config)("layers/3/mixer/qkv_bias")
    assert found.names == tuple(f"model.layers.3.self_attn.{part}_proj.bias" for part in "qkv")
    assert names.huggingface(presets.get("phi3-mini").config)("layers/0/ffn/gate_up").names == (
        "model.layers.0.mlp.gate_up_proj.weight",
    )
    with pytest.raises(InputError, match="'layers/0/mixer/latent' has no counterpart"):
        names.huggingface(presets.get("smollm2-135m").config)("layers/0/mixer/latent")
