"""Classes that `auto_map` names are never run; those of another model are named in a line."""

import json
import shutil
from pathlib import Path

import pytest

from inference.checkpoints import resolve

TINY = Path(__file__).parents[2] / "golden" / "llama-mqa-float32"
CAUSAL, BASE, SCORES = "AutoModelForCausalLM", "AutoModel", "AutoModelForSequenceClassification"
# auto_map, and the class that the line names.
CASES = {
    "another": ({CAUSAL: "modeling_own.OwnForCausalLM"}, "OwnForCausalLM"),
    "another of a repository": ({CAUSAL: "someone/own--modeling.Own"}, "Own"),
    "another, beside the same base": (
        {BASE: "modeling_own.LlamaModel", CAUSAL: "modeling_own.LlamaForCausalLMTwice"},
        "LlamaForCausalLMTwice",
    ),
    "another base alone": ({BASE: "modeling_own.LlamaBidirectionalModel"},
                           "LlamaBidirectionalModel"),
    "lines in a name": ({CAUSAL: "own.A\nB"}, "A\\nB"),
    "the same elsewhere": ({CAUSAL: "modeling_own.LlamaForCausalLM"}, None),
    "the same, another base": (
        {BASE: "modeling_own.Layers", CAUSAL: "modeling_own.LlamaForCausalLM"}, None
    ),
    "its base": ({BASE: "modeling_own.LlamaModel"}, None),
    "its other head": ({SCORES: "modeling_own.LlamaForSequenceClassification"}, None),
    "no model": ({"AutoConfig": "configuration_own.OwnConfig", "AutoTokenizer": ["a.B", None]},
                 None),
    "no object": ("modeling_own.OwnForCausalLM", None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_class_of_another_model_is_one_line(case, tmp_path, caplog):
    auto_map, name = CASES[case]
    directory = shutil.copytree(TINY, tmp_path / "tiny")
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": auto_map}))
    (directory / "modeling_own.py").write_text("raise SystemExit\n")
    resolve.resolve(str(directory)).open(None)
    lines = [message for message in caplog.messages if "auto_map" in message]
    if name is None:
        assert not lines
        return
    (line,) = lines
    assert str(path) in line and f"'{name}', code of the repository" in line and "\n" not in line
    assert "never run: the model is served as 'LlamaForCausalLM'" in line
